"""The pair of models: next-token logits are a fixed function of the last two token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]

SCALE = 2.0  # how far apart the logits lie
DRAFT_NOISE = 0.22  # with it the best token is the target's about two times in three
PADDING_LOGIT = -1e9  # no token has these rows


@dataclass(frozen=True)
class TableModel:
    """Every process computes the same table; a draft's differs by noise of its own."""

    num_token_ids: int
    vocab_size_padded: int
    is_draft: bool

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Return the logits of the token that follows, [vocab_size_padded]."""
        last, before = token_ids[-1], token_ids[-2] if len(token_ids) > 1 else 0
        return _row(self.num_token_ids, self.vocab_size_padded, self.is_draft, last, before)


@lru_cache(maxsize=4096)
def _row(num_token_ids: int, size: int, is_draft: bool, last: int, before: int) -> Logits:
    row = np.full(size, PADDING_LOGIT, dtype=np.float32)
    row[:num_token_ids] = SCALE * _normal(num_token_ids, 0, last, before)
    if is_draft:
        row[:num_token_ids] += SCALE * DRAFT_NOISE * _normal(num_token_ids, 1, last, before)
    row.setflags(write=False)
    return row


def _normal(count: int, stream: int, last: int, before: int) -> NDArray[np.float64]:
    key = np.array([(count << 1) | stream, (last << 32) | before], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(count)


def count_token_ids(folder: Path, vocab_size: int) -> int:
    """Return how many ids a checkpoint's tokenizer has; rows beyond them are padding."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return vocab_size
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]  # {token: id}, or a list in the order of ids
    ids = set(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))
    ids |= {token["id"] for token in tokenizer.get("added_tokens", ())}
    return min(len(ids), vocab_size)
