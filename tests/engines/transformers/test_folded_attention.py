"""Folded attention is attention over expanded heads."""

from __future__ import annotations

import pytest
import torch

from engines.transformers_backend.folded_attention import folded_attention


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_equals_attention_over_expanded_heads(num_kv_heads, num_tokens):
    torch.manual_seed(0)
    query = torch.randn(1, 4, num_tokens, 8)
    key, value = torch.randn(2, 1, num_kv_heads, 80, 8)
    mask = (torch.arange(80)[None] <= 6 + torch.arange(num_tokens)[:, None])[None, None]

    output, _ = folded_attention(None, query, key, value, mask)

    scores = query @ key.repeat_interleave(4 // num_kv_heads, 1).transpose(2, 3) / 8**0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    expected = weights @ value.repeat_interleave(4 // num_kv_heads, 1)
    torch.testing.assert_close(output, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_rows_past_the_current_length_do_not_count():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)
    mask = (torch.arange(16) < 7)[None, None, None]
    before, _ = folded_attention(None, query, key, value, mask)
    key[:, :, 7:] = 1e4
    value[:, :, 7:] = 1e4
    after, _ = folded_attention(None, query, key, value, mask)
    assert torch.equal(before, after)
