"""How many weights a model has, by its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Decoders with a gated MLP, by what they have beside a Llama's weights
LIKE_LLAMA = frozenset({"llama", "mistral", "ministral", "phi3", "smollm3", "granite"})
QUERY_BIASES = frozenset({"qwen2"})  # of queries, keys and values, and of nothing else
HEAD_NORMS = frozenset({"qwen3", "gemma3_text"})  # of the queries and keys of a head
FOUR_NORMS = frozenset({"gemma2", "gemma3_text"})  # of each layer, where others have two
KNOWN = LIKE_LLAMA | QUERY_BIASES | HEAD_NORMS | FOUR_NORMS
UNTOLD = (KeyError, TypeError, ZeroDivisionError)  # of a size that is missing, or is none
TIED_BY_DEFAULT = frozenset({"gemma2", "gemma3_text"})


def num_params(config: Mapping[str, Any]) -> int | None:
    """Return the number of weights, tied ones once; None where the configuration does not tell.

    Args:
        config: Of the language model: `text_config` where a configuration has one.
    """
    try:
        return _num_params(config) if config.get("model_type") in KNOWN else None
    except UNTOLD:
        return None


def _num_params(config: Mapping[str, Any]) -> int:
    kind = config["model_type"]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    inner = config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // heads
    queries = heads * head_dim
    keys = (config.get("num_key_value_heads") or heads) * head_dim

    attention = hidden * (2 * queries + 2 * keys)
    if kind in QUERY_BIASES:
        attention += queries + 2 * keys
    elif config.get("attention_bias"):
        attention += queries + 2 * keys + hidden
    if kind in HEAD_NORMS:
        attention += 2 * head_dim
    mlp = 3 * hidden * inner + (2 * inner + hidden if config.get("mlp_bias") else 0)
    norms = (4 if kind in FOUR_NORMS else 2) * hidden
    is_tied = config.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)
    embeddings = config["vocab_size"] * hidden * (1 if is_tied else 2)
    return int(config["num_hidden_layers"] * (attention + mlp + norms) + hidden + embeddings)


def kv_values_per_token(config: Mapping[str, Any]) -> int | None:
    """Return how many numbers a cached token takes; None where the configuration does not say.

    Layers that attend to a window keep no more than it; that is not counted here.
    """
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        keys = (config.get("num_key_value_heads") or heads) * head_dim
        return int(2 * keys * config["num_hidden_layers"])
    except UNTOLD:
        return None
