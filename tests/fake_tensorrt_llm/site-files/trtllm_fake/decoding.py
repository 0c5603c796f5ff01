"""Decodes with the pair of tables: token by token, or by verifying a draft in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trtllm_fake.table import Logits, TableModel

Probs: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        asked = (self.temperature, self.top_k, self.top_p)
        return self.top_k == 1 or self.temperature == 0 or asked == (None, None, None)

    def generator(self) -> np.random.Generator:
        """Return the random numbers of one request: the same for the same seed."""
        return np.random.default_rng(self.seed or 0)

    def probs(self, logits: Logits) -> Probs:
        """Return probabilities after temperature, top-k and top-p, [vocab_size]."""
        if self.is_greedy:
            return np.asarray(np.arange(len(logits)) == logits.argmax(), dtype=np.float64)
        probs = softmax(logits / (self.temperature or 1.0))
        order = np.argsort(-probs, kind="stable")
        if self.top_k:
            probs[order[self.top_k :]] = 0
        if self.top_p:
            before = np.cumsum(probs[order]) - probs[order]
            probs[order[before >= self.top_p * probs.sum()]] = 0
        return np.asarray(probs / probs.sum())

    def choose(self, logits: Logits, generator: np.random.Generator) -> int:
        if self.is_greedy:
            return int(logits.argmax())
        return draw(self.probs(logits), generator)


def softmax(logits: NDArray[np.floating]) -> Probs:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(weights / weights.sum())


def draw(probs: Probs, generator: np.random.Generator) -> int:
    return int(generator.choice(len(probs), p=probs))


@dataclass(frozen=True)
class Ending:
    """What ends a plain request before its limit."""

    end_id: int | None = None  # left out of the output
    stop_words: Sequence[Sequence[int]] = ()  # kept in the output

    def stops_at(self, token_ids: Sequence[int]) -> bool:
        return any(list(token_ids[-len(word) :]) == list(word) for word in self.stop_words)


def decode(
    model: TableModel, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, end: Ending
) -> Iterator[tuple[int, Logits]]:
    """Yield new ids one by one, each with the logits that it was chosen from."""
    token_ids = list(prompt)
    generator = sampling.generator()
    for _ in range(max_new_tokens):
        logits = model.logits(token_ids)
        token_id = sampling.choose(logits, generator)
        if token_id == end.end_id:
            return
        token_ids.append(token_id)
        yield token_id, logits
        if end.stops_at(token_ids[len(prompt) :]):
            return


def verify(
    model: TableModel,
    prompt: Sequence[int],
    draft_ids: Sequence[int],
    draft_logits: Logits | None,
    sampling: Sampling,
    generator: np.random.Generator,
    end_id: int | None,
) -> tuple[list[int], list[Logits]]:
    """Return what one pass makes of a draft: the accepted ids, and one id of the target's own.

    Args:
        draft_logits: [num_draft_tokens, vocab_size], or None to accept equal ids only.
        end_id: Where an accepted draft id is this one, the output ends before it.
    """
    token_ids = list(prompt)
    rows: list[Logits] = []
    for position, draft_id in enumerate(draft_ids):
        logits = model.logits(token_ids)
        rows.append(logits)
        if draft_logits is None or sampling.is_greedy:
            choice = sampling.choose(logits, generator)
        else:
            draft_probs = softmax(draft_logits[position])
            choice = _accept_or_recover(draft_id, draft_probs, sampling.probs(logits), generator)
        if choice == draft_id == end_id:
            return token_ids[len(prompt) :], rows
        token_ids.append(choice)
        if choice != draft_id:
            return token_ids[len(prompt) :], rows
    logits = model.logits(token_ids)
    token_ids.append(sampling.choose(logits, generator))
    return token_ids[len(prompt) :], [*rows, logits]


def _accept_or_recover(
    draft_id: int, draft_probs: Probs, target_probs: Probs, generator: np.random.Generator
) -> int:
    if target_probs[draft_id] > generator.random() * draft_probs[draft_id]:
        return draft_id
    left = np.clip(target_probs - draft_probs, 0, None)
    return draw(left / left.sum() if left.sum() > 0 else target_probs, generator)
