"""LlamaShape: what a Llama's configuration says of its sizes, and which configurations are one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from engines.errors import ModelLoadError, UnsupportedModelError, translate_errors
from engines.small_files import read_json

# What would change the model if it were there, with the value that changes nothing.
PLAIN_SETTINGS = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # in a checkpoint
HEAD_MULTIPLE = 16  # what GroupQueryAttention can turn
UNREADABLE = dict.fromkeys((OSError, ValueError, KeyError, TypeError), ModelLoadError)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama, and how it turns queries and keys by their position."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # rows of the embeddings, padding included
    context_length: int  # prompt and output together, in tokens
    rms_norm_eps: float
    is_tied: bool  # the head is the embeddings
    rope: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path, *, name: str) -> Self:
        """Return that of a checkpoint.

        Raises:
            ModelLoadError: Its configuration cannot be read.
            UnsupportedModelError: It is no Llama, or one that is changed beyond what is run here.
        """
        with translate_errors(f"the configuration of '{name}' cannot be read", UNREADABLE):
            return cls.of(read_json(folder / "config.json"), name=name)

    @classmethod
    def of(cls, config: Mapping[str, Any], *, name: str) -> Self:
        """Return that of a configuration; raises as `load` does."""
        if (kind := config["model_type"]) != "llama":
            raise _unsupported(name, f"it is a '{kind}', not a Llama")
        for key, plain in PLAIN_SETTINGS.items():
            if config.get(key, plain) != plain:
                raise _unsupported(name, f"its {key} is {config[key]!r}")
        if "quantization_config" in config:
            raise _unsupported(name, "its weights are quantised")
        num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
        rope = config.get("rope_parameters") or {
            **(config.get("rope_scaling") or {}),
            "rope_theta": config.get("rope_theta", 10000.0),
        }
        shape = cls(
            num_layers=config["num_hidden_layers"],
            hidden_size=hidden_size,
            intermediate_size=config["intermediate_size"],
            num_heads=num_heads,
            num_key_value_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            vocab_size=config["vocab_size"],
            context_length=config["max_position_embeddings"],
            rms_norm_eps=config["rms_norm_eps"],
            is_tied=config.get("tie_word_embeddings", False),
            rope=rope,
        )
        if shape.head_dim % HEAD_MULTIPLE:
            raise _unsupported(name, f"its heads have {shape.head_dim} dimensions, not 16, 32 …")
        if _rope_type(rope) not in FREQUENCIES:
            raise _unsupported(name, f"its positions are scaled by '{_rope_type(rope)}'")
        return shape

    def rotations(self, num_tokens: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return cosines and sines, [num_tokens, head_dim / 2] each, float32."""
        frequencies = FREQUENCIES[_rope_type(self.rope)](self)
        angles = np.arange(num_tokens)[:, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _default_frequencies(shape: LlamaShape) -> np.ndarray[Any, Any]:
    """Return the angle per position of each pair of a head's dimensions, [head_dim / 2]."""
    exponents = np.arange(0, shape.head_dim, 2) / shape.head_dim
    frequencies: np.ndarray[Any, Any] = float(shape.rope["rope_theta"]) ** -exponents
    return frequencies


def _linear_frequencies(shape: LlamaShape) -> np.ndarray[Any, Any]:
    return _default_frequencies(shape) / float(shape.rope["factor"])


def _llama3_frequencies(shape: LlamaShape) -> np.ndarray[Any, Any]:
    """Return Llama 3.1's: long waves are stretched, short ones kept, those between blended."""
    rope, frequencies = shape.rope, _default_frequencies(shape)
    waves = float(rope["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    share_kept = np.clip((waves - low) / (high - low), 0, 1)
    return frequencies * (share_kept + (1 - share_kept) / float(rope["factor"]))


FREQUENCIES = {
    "default": _default_frequencies,
    "linear": _linear_frequencies,
    "llama3": _llama3_frequencies,
}


def _unsupported(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the onnxruntime back end cannot run '{name}': {reason}; use the transformers back end"
    )
