"""Safetensors files as mapped NumPy arrays, bfloat16 too, which the package itself lacks there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import TensorSpec, serialize_file

from engines.errors import ModelLoadError, translate_errors
from engines.small_files import read_json

Arrays = dict[str, "np.ndarray[Any, Any]"]

MAX_INDEX_BYTES = 64 * 2**20  # it names every tensor
DTYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
UNREADABLE: Mapping[type[Exception], type[ModelLoadError]] = dict.fromkeys(
    (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError),
    ModelLoadError,
)


def weight_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a checkpoint's weights, those that the index names where there is one.

    Raises:
        ModelLoadError: It has none in this format, or names them where they may not be.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with translate_errors(f"'{index}' cannot be read", UNREADABLE):
            weight_map = read_json(index, max_bytes=MAX_INDEX_BYTES)["weight_map"]
            names = sorted(set(weight_map.values()))
            if outside := [file for file in names if Path(file).name != file]:
                raise ModelLoadError(f"'{index}' names '{outside[0]}', which is not beside it")
            return [folder / file for file in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(
            f"the model '{name}' has no weights in the safetensors format; choose one that has, or "
            "write them with 'save_pretrained'"
        )
    return files


def read_arrays(file: Path) -> Arrays:
    """Return the tensors of a file by name. They are mapped: pages are read when they are used.

    Raises:
        ModelLoadError: The file cannot be read, or is cut short.
    """
    with translate_errors(f"'{file}' cannot be read", UNREADABLE):
        mapped = np.memmap(file, mode="r", dtype=np.uint8)
        start = 8 + int(mapped[:8].view("<u8")[0])
        header = json.loads(bytes(mapped[8:start]))
        header.pop("__metadata__", None)
        data = mapped[start:]
        arrays = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if end > len(data):
                raise ModelLoadError(f"'{file}' is cut short at '{name}': fetch it again")
            arrays[name] = data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return arrays


def read_checkpoint(folder: Path, name: str) -> Arrays:
    """Return all tensors of a checkpoint by name, mapped.

    Raises:
        ModelLoadError: A file is missing, unreadable or cut short.
    """
    arrays: Arrays = {}
    for file in weight_files(folder, name):
        arrays |= read_arrays(file)
    return arrays


def write_arrays(arrays: Mapping[str, np.ndarray[Any, Any]], file: Path) -> None:
    """Write tensors as a file that every reader of safetensors takes for a checkpoint's.

    Raises:
        OSError: It cannot be written.
    """
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    tensors = {
        name: TensorSpec(
            dtype=array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in contiguous.items()
    }
    serialize_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # to be read by others, unlike what safetensors makes
