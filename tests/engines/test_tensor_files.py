"""Safetensors files by NumPy: what the package writes and reads, and damage."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.errors import ModelLoadError
from engines.tensor_files import read_arrays, read_checkpoint, weight_files, write_arrays

TENSORS = {
    "wide": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "half": torch.tensor([1.5, -2.25], dtype=torch.float16),
    "brain": torch.tensor([[1.0, 3.140625]], dtype=torch.bfloat16),
    "whole": torch.tensor([1, -2], dtype=torch.int8),
    "one": torch.tensor(4.0),
}


def test_what_the_package_writes_is_read(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    arrays = read_arrays(file)
    assert arrays.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert arrays[name].shape == tuple(tensor.shape)
        assert arrays[name].astype(np.float64).tolist() == tensor.double().tolist()
    assert arrays["brain"].dtype == ml_dtypes.bfloat16


def test_what_is_written_the_package_reads(tmp_path: Path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    save_file(TENSORS, first)
    write_arrays(read_arrays(first), second)
    again = load_file(second)
    assert again.keys() == TENSORS.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in TENSORS.items())
    assert second.stat().st_mode & 0o777 == 0o644


def test_a_turned_array_is_written_as_it_reads(tmp_path: Path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_arrays({"turned": array}, tmp_path / "x.safetensors")
    np.testing.assert_array_equal(read_arrays(tmp_path / "x.safetensors")["turned"], array)


def test_an_index_names_the_files(tmp_path: Path):
    for name, number in (("b", 2.0), ("a", 1.0)):
        write_arrays({name: np.full(2, number)}, tmp_path / f"{name}.safetensors")
    write_arrays({"stray": np.zeros(1)}, tmp_path / "stray.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert read_checkpoint(tmp_path, "x").keys() == {"a", "b"}


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"\xff" * 16, (9).to_bytes(8, "little") + b"not json!"],
    ids=["empty", "cut in the length", "absurd length", "no header"],
)
def test_a_file_of_another_format_is_a_sentence(tmp_path: Path, content: bytes):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_arrays(file)


def test_half_a_file_is_told(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(1000)}, file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ModelLoadError, match="is cut short at 'weight'"):
        read_arrays(file)


def test_a_folder_without_weights_is_told(tmp_path: Path):
    with pytest.raises(ModelLoadError, match="'mine' has no weights in the safetensors format"):
        weight_files(tmp_path, "mine")


def test_an_index_that_cannot_be_read_is_told(tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        weight_files(tmp_path, "mine")
