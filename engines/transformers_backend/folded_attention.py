"""Grouped-query attention over a static KV cache that does not expand the heads of its groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

FOLDED_ATTENTION = "specdec_folded"
FEW_TOKENS = 64  # two products and a softmax are quicker up to here (on an H200, by measurement)


def folded_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with the query heads of a group as further rows of the head they share.

    Args:
        module: The attention layer, as transformers passes it.
        query: [1, num_heads, num_tokens, head_dim]
        key: [1, num_kv_heads, capacity, head_dim]
        value: As `key`.
        attention_mask: [1, 1, num_tokens, capacity], True where a token may look.
        scaling: What the scores are multiplied by; None: 1 / sqrt(head_dim).

    Returns:
        [1, num_tokens, num_heads, head_dim], and no attention weights.
    """
    batch, num_heads, num_tokens, head_dim = query.shape
    group = num_heads // key.shape[1]
    rows = query.reshape(batch, key.shape[1], group * num_tokens, head_dim)
    mask = attention_mask.repeat(1, 1, group, 1)
    if num_tokens <= FEW_TOKENS:
        scale = head_dim**-0.5 if scaling is None else scaling
        scores = torch.matmul(rows, key.transpose(2, 3)).float() * scale
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(value.dtype)
        output = torch.matmul(weights, value)
    else:
        output = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(query.shape).transpose(1, 2).contiguous(), None


@contextmanager
def folded_attention_in(model: Any) -> Iterator[None]:
    """Let a model attend so meanwhile."""
    AttentionInterface.register(FOLDED_ATTENTION, folded_attention)
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = FOLDED_ATTENTION
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
