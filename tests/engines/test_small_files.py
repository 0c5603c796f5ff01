"""Small files: read within bounds, whatever they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engines.errors import ModelLoadError
from engines.small_files import MAX_CONFIG_BYTES, read_json, require_small
from engines.tensor_files import weight_files
from engines.tokenizer import load_tokenizer
from tests.engines.pairs.tokenizers_of_kinds import bpe, write_model


def sparse(file: Path, num_bytes: int) -> Path:
    with file.open("wb") as out:
        out.truncate(num_bytes)
    return file


def test_an_object_is_read(tmp_path: Path):
    (tmp_path / "a.json").write_text('{"a": [1, "ü"]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"a": [1, "ü"]}


@pytest.mark.parametrize(
    "content",
    ["", "[1]", "{", '{"a": NaN', "[" * 200_000],
    ids=["empty", "list", "cut", "NaN", "deep"],
)
def test_what_is_no_object_is_refused(tmp_path: Path, content: str):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_json(tmp_path / "a.json")


def test_a_file_of_two_gigabytes_is_refused_before_it_is_read(tmp_path: Path):
    file = sparse(tmp_path / "config.json", 2**31)
    with pytest.raises(ModelLoadError, match="has 2147 MB, and no file of its kind"):
        read_json(file)


def test_a_pipe_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelLoadError, match="it is no file"):
        read_json(tmp_path / "config.json")


def test_a_loop_of_links_is_refused(tmp_path: Path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        require_small(tmp_path / "a", MAX_CONFIG_BYTES)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_a_tokenizer_beyond_all_measure_is_refused_unread(tmp_path: Path, name: str):
    folder = write_model(tmp_path / "model", bpe())
    sparse(folder / name, 2**31)
    with pytest.raises(ModelLoadError, match="is not read: it has 2147 MB"):
        load_tokenizer(folder, name="x")


def test_a_tokenizer_of_a_million_entries_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("engines.tokenizer.MAX_TOKENS", 9)
    folder = write_model(tmp_path / "model", bpe())
    with pytest.raises(ModelLoadError, match="the tokenizer of 'x' has 10 entries, more than any"):
        load_tokenizer(folder, name="x")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_weights_that_an_index_names_elsewhere_are_refused(tmp_path: Path, name: str):
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"w": "{name}"}}}}')
    with pytest.raises(ModelLoadError, match="which is not beside it"):
        weight_files(tmp_path, "x")
