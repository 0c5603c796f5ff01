"""Token ids to text, piece by piece; a character may span tokens, and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Self

Decode = Callable[[Sequence[int]], str]
INCOMPLETE = "\ufffd"  # what a decoder returns for the bytes of an unfinished character


class Detokenizer:
    """Decodes a growing sequence so that the pieces joined equal the whole decoded at once.

    A tokenizer may write a token differently behind another one (a leading space that the first
    token loses, a character of several tokens), so each piece is the difference between the last
    complete stretch decoded with and without the new tokens.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._token_ids: list[int] = []  # the stretch that is decoded again
        self._num_written = 0  # tokens of it whose text has been returned

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, "" while a character is unfinished."""
        self._token_ids.append(token_id)
        text = self._unwritten()
        # A token without text is kept with the next: alone it would not show that text precedes.
        if not text or text.endswith(INCOMPLETE):
            return ""
        self._token_ids = self._token_ids[self._num_written :]
        self._num_written = len(self._token_ids)
        return text

    def flush(self) -> str:
        """Return what is left of a character that no further token will complete."""
        text = self._unwritten()
        self._num_written = len(self._token_ids)
        return text

    def fork(self) -> Self:
        """Return a copy that goes on from here on its own, for text that may be dropped."""
        other = copy(self)
        other._token_ids = list(self._token_ids)
        return other

    def _unwritten(self) -> str:
        written = self._decode(self._token_ids[: self._num_written])
        return self._decode(self._token_ids)[len(written) :]
