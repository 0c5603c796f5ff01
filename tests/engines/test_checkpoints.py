"""Model references: what each kind names, and a sentence for everything that names no model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.checkpoints import (
    Reference,
    built_path,
    bundled_key,
    hash_file,
    parse_reference,
    stored_key,
)
from engines.errors import ModelLoadError, ModelNotBuiltError
from engines.store import EngineStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "My Model.Q4.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_the_bundled_target_is_named_for_people():
    reference = parse_reference("bundled")

    assert (reference.source, reference.name) == ("bundled", "SmolLM2-135M-Instruct")


def test_a_folder_with_a_configuration_is_a_model(folder: Path):
    reference = parse_reference(str(folder))

    assert (reference.source, reference.name, reference.path) == ("folder", "my-model", folder)


def test_a_relative_folder_is_named_by_its_last_part(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)

    assert parse_reference(".").name == "my-model"


def test_a_folder_comes_before_a_hub_id_of_the_same_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder.parent.parent)

    assert parse_reference(f"{folder.parent.name}/{folder.name}").source == "folder"


def test_a_tilde_is_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(folder.parent))

    assert parse_reference("~/my-model").path == folder


def test_a_gguf_file_is_a_model(gguf: Path):
    reference = parse_reference(str(gguf))

    assert (reference.source, reference.name, reference.path) == ("gguf", "My Model.Q4", gguf)


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("org/name", "org/name", None),
        ("Org-1/na.me_2", "Org-1/na.me_2", None),
        ("org/name@main", "org/name", "main"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
    ],
)
def test_a_hub_id_may_name_a_revision(text: str, repo: str, revision: str | None):
    reference = parse_reference(text)

    assert (reference.source, reference.text, reference.name) == ("hub", text, repo)
    assert (reference.repo, reference.revision) == (repo, revision)


@pytest.mark.parametrize(
    "text",
    [
        "gpt2",
        "./models/typo",
        "../typo",
        "/no/such/folder",
        "~nobody-of-that-name/model",
        "org/na--me",
        "org/name.",
        "org/name.git",
        "orgé/name",
        "org/name@",
        "org/name@a@b",
        "org/name/more",
        "org/model.gguf",
        "https://huggingface.co/org/name",
        "a" * 5000,
        "a\0b",
        " ",
        "org/name\n",
    ],
)
def test_what_names_no_model_is_told_with_what_would(text: str):
    with pytest.raises(ModelLoadError, match=r"(?s)there is no model '.*: name a folder, a \.gguf"):
        parse_reference(text)


def test_a_folder_without_a_configuration_is_told(tmp_path: Path):
    with pytest.raises(ModelLoadError, match=r"it has no config\.json; name the folder that"):
        parse_reference(str(tmp_path))


def test_a_file_of_another_kind_is_told(tmp_path: Path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"")

    with pytest.raises(ModelLoadError, match=r"is a file but not a \.gguf file; name a"):
        parse_reference(str(path))


def test_a_folder_is_loaded_where_it_lies(folder: Path, store: EngineStore):
    assert built_path(parse_reference(str(folder)), store) == folder


@pytest.mark.parametrize("text", ["bundled", "org/never-downloaded", "org/name@some-revision"])
def test_a_model_that_is_not_built_is_told_with_the_remedy(text: str, store: EngineStore):
    with pytest.raises(ModelNotBuiltError, match=r"is not .* yet; build it first"):
        built_path(parse_reference(text), store)


def test_a_gguf_file_is_not_built_until_it_is_converted(gguf: Path, store: EngineStore):
    reference = parse_reference(str(gguf))
    with pytest.raises(ModelNotBuiltError, match=r"'My Model\.Q4' is not converted yet"):
        built_path(reference, store)

    with store.aside("any") as aside:
        entry = store.commit(aside, key=stored_key(reference), name="My Model", identity={})

    assert built_path(reference, store) == entry.path


def test_the_key_of_a_gguf_file_is_that_of_its_content(gguf: Path):
    before = stored_key(parse_reference(str(gguf)))
    gguf.write_bytes(b"GGUG")

    assert stored_key(parse_reference(str(gguf))) != before


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for every hash that is begun."""
    begun: list[object] = []
    sha256 = hashlib.sha256

    def counted(data: bytes = b"") -> object:
        begun.append(data)
        return sha256(data)

    monkeypatch.setattr(hashlib, "sha256", counted)
    return begun


def hashes_of_key(reference: Reference, hashes: list[object]) -> int:
    """Return how many hashes one more key takes."""
    before = len(hashes)
    stored_key(reference)
    return len(hashes) - before


def test_an_unchanged_gguf_file_is_read_once(gguf: Path, hashes: list[object]):
    reference = parse_reference(str(gguf))
    first, *later = (hashes_of_key(reference, hashes) for _ in range(3))

    assert later == [first - 1] * 2  # the key itself is a hash of a few facts


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"GGUF, longer"),
        lambda path: os.utime(path, ns=(0, 0)),
    ],
    ids=["size", "time"],
)
def test_a_changed_gguf_file_is_read_again(
    gguf: Path, hashes: list[object], change: Callable[[Path], object]
):
    reference = parse_reference(str(gguf))
    first = hashes_of_key(reference, hashes)
    change(gguf)

    assert hashes_of_key(reference, hashes) == first


def test_a_gguf_file_that_cannot_be_read_is_told(tmp_path: Path, store: EngineStore):
    path = tmp_path / "model.gguf"
    path.symlink_to("/proc/self/mem")  # a file that even root cannot read from its start

    with pytest.raises(ModelLoadError, match=rf"'{path}' cannot be read"):
        built_path(parse_reference(str(path)), store)


def test_the_bundled_key_is_that_of_its_published_hash():
    assert bundled_key().startswith("smollm2-135m-instruct-")


def test_a_file_is_hashed_with_signs_of_life_between(gguf: Path):
    *signs, digest = hash_file(gguf)

    assert signs == [None]
    assert digest == "b83633aa785344791618f2fddf131b010ea04912a60430760b070bad293f65bd"
