"""A GGUF file becomes the same checkpoint without PyTorch as through transformers."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import gguf
import numpy as np
import pytest

from engines import checkpoint_build, gguf_conversion
from engines.checkpoints import parse_reference
from engines.errors import EngineBuildError
from engines.gguf_files import is_plain_llama, num_weights
from engines.store import EngineStore
from engines.tensor_files import read_arrays
from engines.transformers_backend import convert as through_transformers
from tests.engines.test_backend import write_tiny_gguf

CONFIG = ("hidden_size", "head_dim", "num_key_value_heads", "rms_norm_eps", "vocab_size")


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", splitting="smollm")


def test_both_ways_write_the_same_checkpoint(tiny_gguf: Path, tmp_path: Path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, convert in (
        (ours, gguf_conversion.convert),
        (theirs, through_transformers.convert),
    ):
        folder.mkdir()
        convert(tiny_gguf, folder)
    arrays, expected = (read_arrays(folder / "model.safetensors") for folder in (ours, theirs))
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    config, reference = (
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for folder in (ours, theirs)
    )
    assert {name: config[name] for name in CONFIG} == {name: reference[name] for name in CONFIG}
    assert config["tie_word_embeddings"] is reference["tie_word_embeddings"] is False
    theta = [values["rope_parameters"]["rope_theta"] for values in (config, reference)]
    assert theta[0] == theta[1]
    assert (ours / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()


def test_the_child_process_says_in_one_sentence_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "bad.gguf").write_bytes(b"not a GGUF file")
    monkeypatch.setattr("sys.argv", ["convert", str(tmp_path / "bad.gguf"), str(tmp_path)])
    assert gguf_conversion.main() == 1
    assert capsys.readouterr().out.startswith("error: 'bad.gguf' cannot be converted")


def test_weights_that_are_no_numbers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        gguf_conversion, "dequantize", lambda data, kind: np.full(data.shape, np.nan, np.float32)
    )
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(EngineBuildError, match=r"the tensor token_embd\.weight holds what is no"):
        gguf_conversion.convert(path, tmp_path)


# -- which files are converted here


def test_a_file_says_how_large_it_is(tiny_gguf: Path):
    arrays = gguf.GGUFReader(tiny_gguf).tensors
    assert num_weights(tiny_gguf) == sum(int(np.prod(tensor.shape)) for tensor in arrays)


def write_header(path: Path, **changes: object) -> Path:
    """Write a file of a Llama that has one tensor, changed in something."""
    settings: dict[str, object] = {
        "architecture": "llama",
        "tokenizer": "gpt2",
        "scaling": None,
        "tensor": "output",
    }
    settings |= changes
    writer = gguf.GGUFWriter(path, str(settings["architecture"]))
    writer.add_rope_dimension_count(8)
    writer.add_tokenizer_model(str(settings["tokenizer"]))
    if settings["scaling"]:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_tensor(f"{settings['tensor']}", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"architecture": "qwen2"}, False),
        ({"tokenizer": "llama"}, False),
        ({"scaling": True}, False),
        ({"tensor": "rope_freqs.weight"}, False),
        ({"tensor": "blk.0.attn_q.bias"}, False),
    ],
)
def test_a_llama_with_nothing_unusual_is_converted_here(tmp_path: Path, changes, expected: bool):
    assert is_plain_llama(write_header(tmp_path / "x.gguf", **changes)) is expected


def test_another_file_needs_pytorch_and_says_so_without(
    tmp_path: Path, store: EngineStore, monkeypatch: pytest.MonkeyPatch
):
    path = write_header(tmp_path / "x.gguf", architecture="qwen2")
    monkeypatch.setattr(checkpoint_build, "missing_packages", lambda names: ["torch"])
    with ExitStack() as cleanup:
        reference = parse_reference(str(path))
        *before, convert = checkpoint_build.checkpoint_stages([reference], store, cleanup)
        for stage in before:
            list(stage.run())
        with pytest.raises(EngineBuildError, match=r"pip install -r requirements-torch\.txt"):
            list(convert.run())
