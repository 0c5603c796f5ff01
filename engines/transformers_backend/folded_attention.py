"""Grouped-query attention over a static KV cache that does not expand the heads of its groups."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

FOLDED_ATTENTION = "specdec_folded"


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
    output = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(query.shape).transpose(1, 2).contiguous(), None


def register_folded_attention() -> None:
    """Make it known to transformers under `FOLDED_ATTENTION`."""
    AttentionInterface.register(FOLDED_ATTENTION, folded_attention)
