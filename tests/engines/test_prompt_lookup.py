"""Drafts from the text itself: which occurrence is followed, and how far."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from engines.prompt_lookup import MAX_NGRAM_TOKENS, MIN_NGRAM_TOKENS, NgramIndex


@pytest.mark.parametrize(
    ("text", "num_tokens", "expected"),
    [
        pytest.param([], 4, [], id="no text"),
        pytest.param([1], 4, [], id="one token"),
        pytest.param([1, 2, 3, 4], 4, [], id="nothing repeated"),
        pytest.param([1, 2, 3, 4, 5, 1, 2, 3], 2, [4, 5], id="as many as asked for"),
        pytest.param([1, 2, 3, 4, 1, 2, 3], 9, [4, 1, 2, 3], id="up to the end of the text"),
        pytest.param([1, 2, 7, 1, 2, 8, 1, 2], 1, [8], id="the latest occurrence"),
        pytest.param([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1, [7], id="the longest n-gram"),
        pytest.param([6, 6, 6, 6, 6], 4, [6], id="an occurrence that overlaps the end"),
    ],
)
def test_a_lookup_returns_what_followed_before(text, num_tokens, expected):
    assert NgramIndex().lookup(text, num_tokens) == expected


def lookup_by_search(text: list[int], num_tokens: int) -> list[int]:
    for length in range(MAX_NGRAM_TOKENS, MIN_NGRAM_TOKENS - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            end = start + length
            if text[start:end] == text[-length:]:
                return text[end : end + num_tokens]
    return []


@given(
    parts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12),
    num_tokens=st.integers(1, 8),
)
def test_an_index_of_a_growing_text_finds_what_a_search_finds(parts, num_tokens):
    index = NgramIndex()
    text: list[int] = []
    for part in parts:
        text += part
        assert index.lookup(text, num_tokens) == lookup_by_search(text, num_tokens)
