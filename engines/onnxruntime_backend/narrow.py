"""Matrices as 4-bit integers, each block of a row with a scale and a zero point of its own.

A draft decides nothing, so rounding costs it acceptance alone, and a step of it reads a seventh of
the bytes. The layout is that of onnxruntime's MatMulNBits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engines.tensor_files import Arrays

BITS = 4
BLOCK_SIZE = 32  # columns that share a scale
LEVELS = 2**BITS - 1
PARTS = ("values", "scales", "zeros")  # behind a matrix's name


def narrowed(name: str, weight: np.ndarray[Any, Any]) -> Arrays:
    """Return a matrix [rows, columns] as three arrays, under its name and a part's.

    Returns:
        values [rows, blocks, BLOCK_SIZE / 2], uint8, two columns a byte, the earlier one low;
        scales [rows * blocks], float32; zeros [rows * ceil(blocks / 2)], uint8, packed alike.
    """
    rows, columns = weight.shape
    num_blocks = -(-columns // BLOCK_SIZE)
    padded = np.zeros((rows, num_blocks * BLOCK_SIZE), np.float32)
    padded[:, :columns] = weight
    blocks = padded.reshape(rows, num_blocks, BLOCK_SIZE)
    lowest = np.minimum(blocks.min(axis=-1), 0)
    highest = np.maximum(blocks.max(axis=-1), 0)
    scales = np.maximum(highest - lowest, np.finfo(np.float32).tiny * LEVELS) / LEVELS
    zeros = np.clip(np.round(-lowest / scales), 0, LEVELS)
    values = np.clip(np.round(blocks / scales[..., None] + zeros[..., None]), 0, LEVELS)
    arrays = (
        _paired(values.astype(np.uint8)),
        scales.astype(np.float32).reshape(-1),
        _paired(zeros.astype(np.uint8)).reshape(-1),
    )
    return dict(zip(parts_of(name), arrays, strict=True))


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of a narrow matrix's arrays."""
    return tuple(f"{name}.{part}" for part in PARTS)


def sizes_of(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of a narrow matrix's arrays."""
    num_blocks = -(-columns // BLOCK_SIZE)
    packed = -(-num_blocks // 2)
    return (rows, num_blocks, BLOCK_SIZE // 2), (rows * num_blocks,), (rows * packed,)


def _paired(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return 4-bit numbers two a byte along the last axis."""
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros_like(values[..., :1])], axis=-1)
    paired: np.ndarray[Any, Any] = values[..., ::2] | values[..., 1::2] << BITS
    return paired
