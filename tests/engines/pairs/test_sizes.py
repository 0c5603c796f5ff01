"""Sizes by configurations: the totals that the makers publish."""

from __future__ import annotations

from typing import Any

import pytest

from engines.pairs.sizes import kv_values_per_token, num_params


def config(
    kind: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    keys: int,
    head_dim: int,
    vocab: int,
    is_tied: bool,
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": is_tied,
    }


@pytest.mark.parametrize(
    ("sizes", "params", "kv_values"),
    [
        (config("llama", 2048, 8192, 16, 32, 8, 64, 128256, True), 1235814400, 16384),
        (config("llama", 4096, 14336, 32, 32, 8, 128, 128256, False), 8030261248, 65536),
        (config("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True), 494032768, 6144),
        (config("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True), 596049920, 57344),
        (config("gemma2", 2304, 9216, 26, 8, 4, 256, 256000, True), 2614341888, 53248),
        (config("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, True), 999885952, 13312),
    ],
    ids=["Llama 3.2 1B", "Llama 3.1 8B", "Qwen2.5 0.5B", "Qwen3 0.6B", "Gemma 2 2B", "Gemma 3 1B"],
)
def test_sizes_are_those_that_are_published(sizes: dict[str, Any], params: int, kv_values: int):
    assert num_params(sizes) == params
    assert kv_values_per_token(sizes) == kv_values


def test_biases_count():
    sizes = config("llama", 32, 48, 1, 4, 2, 8, 10, True)
    biased = {**sizes, "attention_bias": True, "mlp_bias": True}
    assert num_params(biased) - num_params(sizes) == 32 + 2 * 16 + 32 + 2 * 48 + 32  # type: ignore[operator]


def test_what_is_not_known_is_not_guessed():
    assert num_params({"model_type": "brand_new"}) is None
    assert kv_values_per_token({"model_type": "brand_new"}) is None
