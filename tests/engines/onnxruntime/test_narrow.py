"""4-bit matrices: what they lose, and that onnxruntime reads them as they are meant."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from engines.onnxruntime_backend.narrow import (
    BITS,
    BLOCK_SIZE,
    LEVELS,
    narrowed,
    parts_of,
    sizes_of,
)
from engines.onnxruntime_backend.sessions import shared_options


def widened(name: str, arrays: dict[str, np.ndarray], rows: int, columns: int) -> np.ndarray:
    """Return what narrow arrays stand for, worked out entry by entry."""
    values, scales, zeros = (arrays[part] for part in parts_of(name))
    num_blocks = -(-columns // BLOCK_SIZE)
    scales = scales.reshape(rows, num_blocks)
    zeros = zeros.reshape(rows, -1)
    wide = np.empty((rows, num_blocks * BLOCK_SIZE), np.float32)
    for row in range(rows):
        for column in range(num_blocks * BLOCK_SIZE):
            block, place = divmod(column, BLOCK_SIZE)
            value = values[row, block, place // 2] >> BITS * (place % 2) & LEVELS
            zero = zeros[row, block // 2] >> BITS * (block % 2) & LEVELS
            wide[row, column] = (int(value) - int(zero)) * scales[row, block]
    return wide[:, :columns]


@pytest.mark.parametrize("columns", [32, 64, 96, 80])
def test_an_entry_is_off_by_at_most_a_step_of_its_block(columns: int):
    weight = np.random.default_rng(0).normal(size=(5, columns)).astype(np.float32)
    arrays = narrowed("w", weight)
    assert tuple(arrays[part].shape for part in parts_of("w")) == sizes_of(5, columns)
    difference = np.abs(widened("w", arrays, 5, columns) - weight)
    for block in range(0, columns, BLOCK_SIZE):
        part = weight[:, block : block + BLOCK_SIZE]
        step = (np.maximum(part.max(1), 0) - np.minimum(part.min(1), 0)) / LEVELS
        # Half a step for the entry, half a step for the zero point.
        assert (difference[:, block : block + BLOCK_SIZE] <= step[:, None] * 1.001).all()


def test_a_block_of_zeros_stays_zeros():
    arrays = narrowed("w", np.zeros((2, 64), np.float32))
    assert not widened("w", arrays, 2, 64).any()


@pytest.mark.parametrize("columns", [64, 96, 80])
def test_onnxruntime_multiplies_by_what_the_arrays_stand_for(columns: int):
    random = np.random.default_rng(1)
    weight = random.normal(size=(7, columns)).astype(np.float32)
    rows = random.normal(size=(3, columns)).astype(np.float32)
    arrays = narrowed("w", weight)
    types = (TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8)
    node = helper.make_node(
        "MatMulNBits",
        ["rows", *parts_of("w")],
        ["product"],
        domain="com.microsoft",
        K=columns,
        N=7,
        bits=BITS,
        block_size=BLOCK_SIZE,
        accuracy_level=1,  # float32 activations: exact, to compare with
    )
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, rows.shape)],
        [helper.make_tensor_value_info("product", TensorProto.FLOAT, [3, 7])],
        [
            helper.make_tensor(name, type_, arrays[name].shape, arrays[name].tobytes(), raw=True)
            for name, type_ in zip(parts_of("w"), types, strict=True)
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), shared_options(), providers=["CPUExecutionProvider"]
    )
    expected = rows @ widened("w", arrays, 7, columns).T
    np.testing.assert_allclose(session.run(None, {"rows": rows})[0], expected, atol=1e-4)
