"""Which configurations are a Llama that is run here, and their positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engines.errors import ModelLoadError, UnsupportedModelError
from engines.onnxruntime_backend.llama import LlamaShape

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**settings: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    values: dict[str, Any] = LlamaConfig(**sizes, **heads).to_dict()
    return values | settings


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        LLAMA3,
    ],
    ids=["default", "linear", "llama3"],
)
def test_positions_turn_as_in_transformers(rope: dict[str, Any]):
    values = config(rope_parameters=rope, max_position_embeddings=16384)
    reference = LlamaRotaryEmbedding(LlamaConfig(**values))
    positions = torch.arange(0, 16384, 97)[None]
    cosines, sines = reference(torch.zeros(1), positions)

    ours = LlamaShape.of(values, name="x").rotations(16384)

    half = cosines.shape[-1] // 2
    for theirs, mine in zip((cosines, sines), ours, strict=True):
        assert mine.dtype == np.float32
        # Angles of thousands of radians: the reference works them out in float32.
        np.testing.assert_allclose(mine[positions[0]], theirs[0, :, :half].numpy(), atol=2e-3)


def test_an_older_configuration_names_its_positions_otherwise():
    values = config()
    del values["rope_parameters"]
    values |= {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}}
    new = config(rope_parameters=LLAMA3)
    for ours, expected in zip(
        LlamaShape.of(values, name="x").rotations(50),
        LlamaShape.of(new, name="x").rotations(50),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "qwen2"}, "it is a 'qwen2', not a Llama"),
        ({"model_type": "mamba"}, "it is a 'mamba'"),
        ({"hidden_act": "gelu"}, "its hidden_act is 'gelu'"),
        ({"attention_bias": True}, "its attention_bias is True"),
        ({"mlp_bias": True}, "its mlp_bias is True"),
        ({"quantization_config": {"bits": 4}}, "its weights are quantised"),
        ({"head_dim": 24}, "its heads have 24 dimensions"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "its positions are scaled by 'yarn'"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason_and_the_way_out(settings, reason):
    with pytest.raises(UnsupportedModelError) as caught:
        LlamaShape.of(config(**settings), name="mine")
    assert reason in str(caught.value)
    assert str(caught.value).endswith("use the transformers back end")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "llama"}'])
def test_a_configuration_that_cannot_be_read_is_a_sentence(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        LlamaShape.load(tmp_path, name="mine")
