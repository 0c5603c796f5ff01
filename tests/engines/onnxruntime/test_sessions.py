"""The graph over a checkpoint's weights says what transformers says; the cache rolls back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from engines.errors import ModelLoadError
from engines.onnxruntime_backend.llama import LlamaShape
from engines.onnxruntime_backend.model import OnnxModel
from engines.onnxruntime_backend.narrow import narrowed
from engines.onnxruntime_backend.sessions import load_session
from engines.sampling import softmax
from engines.tensor_files import Arrays, read_checkpoint, write_arrays
from engines.transformers_backend.model import load_model
from tests.conftest import write_tiny_model
from tests.engines.onnxruntime.conftest import HEAD_DIM

TOKEN_IDS = tuple(range(40, 64))
VOCAB_SIZE = 258  # of the tokenizer; the embeddings have padding behind it
CAPACITY = 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def model_of(folder: Path, arrays: Arrays | None = None, *, is_narrow: bool = False) -> OnnxModel:
    shape = LlamaShape.load(folder, name="x")
    arrays = read_checkpoint(folder, "x") if arrays is None else arrays
    session = load_session(shape, arrays, name="x", is_narrow=is_narrow)
    return OnnxModel(session, shape, capacity=CAPACITY, vocab_size=VOCAB_SIZE)


def reference(folder: Path) -> np.ndarray[Any, Any]:
    model = load_model(folder, name="x", dtype=torch.float32, device=torch.device("cpu"))
    with torch.inference_mode():
        logits: np.ndarray[Any, Any] = model(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    return logits[:, :VOCAB_SIZE]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"rope_parameters": LLAMA3},
        {"rms_norm_eps": 1e-2},
    ],
    ids=["grouped", "tied", "as many heads", "one head", "llama3 positions", "large epsilon"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]):
    folder = write_tiny_model(tmp_path / "model", seed=5, head_dim=HEAD_DIM, **settings)
    logits = model_of(folder).forward(TOKEN_IDS, num_logits=len(TOKEN_IDS))
    np.testing.assert_allclose(logits, reference(folder), atol=1e-3)


def test_a_checkpoint_in_16_bits_is_widened(target: Path, tmp_path: Path):
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "config.json").write_bytes((target / "config.json").read_bytes())
    arrays = read_checkpoint(target, "x")
    narrow = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    write_arrays(narrow, folder / "model.safetensors")
    logits = model_of(folder).forward(TOKEN_IDS, num_logits=len(TOKEN_IDS))
    np.testing.assert_allclose(logits, reference(folder), atol=1e-3)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 320], ids=["padded", "whole"])
def test_probabilities_are_those_of_the_logits_that_were_given(target: Path, vocab_size: int):
    shape = LlamaShape.load(target, name="x")
    session = load_session(shape, read_checkpoint(target, "x"), name="x", is_narrow=False)
    model = OnnxModel(session, shape, capacity=CAPACITY, vocab_size=vocab_size)
    model.forward(TOKEN_IDS[:8], num_logits=8)
    logits = model.forward(TOKEN_IDS[8:12], num_logits=3)
    rows, token_ids = [0, 1, 2, 2], [5, 250, 7, 9]
    expected = softmax(logits.astype(np.float64))[rows, token_ids]
    np.testing.assert_allclose(model.token_probs(rows, token_ids), expected, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 5, 9])
def test_parts_say_what_the_whole_says(target: Path, num_tokens: int):
    whole = model_of(target).forward(TOKEN_IDS, num_logits=len(TOKEN_IDS)).copy()
    model = model_of(target)
    rows = []
    for at in range(0, len(TOKEN_IDS), num_tokens):
        part = TOKEN_IDS[at : at + num_tokens]
        rows.append(model.forward(part, num_logits=len(part)).copy())
    np.testing.assert_allclose(np.concatenate(rows), whole, atol=1e-4)


def test_only_the_last_rows_are_given(target: Path):
    whole = model_of(target).forward(TOKEN_IDS, num_logits=len(TOKEN_IDS)).copy()
    last = model_of(target).forward(TOKEN_IDS, num_logits=3)
    np.testing.assert_array_equal(last, whole[-3:])


def test_what_was_rolled_back_leaves_no_trace(target: Path):
    model = model_of(target)
    model.forward(TOKEN_IDS[:10], num_logits=1)
    expected = model.forward(TOKEN_IDS[10:14], num_logits=4).copy()
    model.truncate(10)
    model.forward((7, 8, 9, 10, 11, 12), num_logits=6)
    model.truncate(10)

    again = model.forward(TOKEN_IDS[10:14], num_logits=4)

    np.testing.assert_array_equal(again, expected)
    assert model.num_cached_tokens == 14


def test_a_narrow_model_says_nearly_the_same(target: Path):
    arrays = read_checkpoint(target, "x")
    narrow: Arrays = {}
    for name, array in arrays.items():
        if array.ndim == 2 and "embed" not in name:
            narrow |= narrowed(name, np.asarray(array))
    logits = model_of(target, arrays | narrow, is_narrow=True).forward(TOKEN_IDS, num_logits=24)
    exact = reference(target)
    assert np.corrcoef(logits.ravel(), exact.ravel())[0, 1] > 0.8
    assert not np.allclose(logits, exact, atol=1e-3)


def test_a_missing_weight_is_told(target: Path):
    arrays = read_checkpoint(target, "x")
    del arrays["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        model_of(target, arrays)


def test_a_weight_of_another_size_is_told(target: Path, tmp_path: Path):
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(ModelLoadError, match=r"is \[64, 32\], not \[128, 32\] as config\.json"):
        model_of(tmp_path, read_checkpoint(target, "x"))
