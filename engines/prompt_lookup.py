"""Drafts without a model: the text that followed the latest n-gram the last time it occurred.

Prompt lookup decoding (Saxena 2023). Works on token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_NGRAM_TOKENS = 3
MIN_NGRAM_TOKENS = 2  # a single repeated token seldom leads to the same next one


class NgramIndex:
    """The latest two occurrences of every n-gram of a growing text.

    Each token is read once, so a lookup costs the same at any length.
    """

    def __init__(self) -> None:
        self._num_indexed = 0
        # n-gram -> the position behind its latest occurrence, and behind the one before that
        self._ends: dict[tuple[int, ...], tuple[int, int | None]] = {}

    def lookup(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return up to `num_tokens` ids that followed the longest repeated n-gram at the end.

        Args:
            token_ids: The text so far. Between calls it may only grow at its end.
            num_tokens: The most to return; fewer where the text ends first, none where nothing at
                its end occurred before.
        """
        self.read(token_ids)
        longest = min(MAX_NGRAM_TOKENS, len(token_ids))
        for length in range(longest, MIN_NGRAM_TOKENS - 1, -1):
            _, earlier = self._ends[tuple(token_ids[-length:])]
            if earlier is not None:
                return list(token_ids[earlier : earlier + num_tokens])
        return []

    def read(self, token_ids: Sequence[int]) -> None:
        """Index what is new at the end of the text."""
        for end in range(self._num_indexed + 1, len(token_ids) + 1):
            for length in range(MIN_NGRAM_TOKENS, min(MAX_NGRAM_TOKENS, end) + 1):
                ngram = tuple(token_ids[end - length : end])
                latest = self._ends.get(ngram)
                self._ends[ngram] = (end, None if latest is None else latest[0])
        self._num_indexed = len(token_ids)
