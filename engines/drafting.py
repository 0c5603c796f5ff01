"""How drafts are made: the proposer contract, and the three kinds behind it.

Works on token ids only, over any model that offers the `CachedModel` protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from engines.config import SamplingParams
from engines.prompt_lookup import NgramIndex
from engines.sampling import (
    Array,
    draw,
    greedy_token_ids,
    softmax,
    to_probs,
    top_entries,
)

PREFILL_CHUNK_TOKENS = 256  # read between two chances to stop


class CachedModel(Protocol):
    """A causal language model that remembers what it has read, for one sequence."""

    @property
    def num_cached_tokens(self) -> int:
        """Return how many tokens the KV cache holds."""
        ...

    def forward(self, token_ids: Sequence[int], *, num_logits: int) -> Array:
        """Read further tokens.

        Returns:
            [num_logits, vocab_size], float32 or better: the logits behind the last `num_logits`
            of `token_ids`. The vocabulary is that of the tokenizer, without padding. The next
            pass may write over them.
        """
        ...

    def token_probs(self, rows: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Return what `sampling.token_probs` does of the logits that the last pass returned."""
        ...

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` cached tokens."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all it was asked to, so that a clock can be read."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, and what each was drawn from."""

    token_ids: tuple[int, ...] = ()
    probs: tuple[Array, ...] | None = None  # [vocab_size] each; None: chosen with certainty
    reported_probs: tuple[float | None, ...] = ()
    top: tuple[list[tuple[int, float]], ...] = ()


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a proposer is asked for."""

    context_token_ids: Sequence[int]
    num_tokens: int  # at most; at least 1
    sampling: SamplingParams
    random: Random
    num_top_tokens: int = 0
    min_prob: float = 0.0  # behind a token with less than this, a model drafts no further


class Proposer(Protocol):
    """Proposes what the target may say next, for one sequence."""

    def prefill(self, token_ids: Sequence[int]) -> Iterator[None]:
        """Read the prompt in chunks, yielding between them."""
        ...

    def propose(self, request: DraftRequest) -> Draft:
        """Return a draft that continues the context."""
        ...

    def keep(self, num_tokens: int) -> None:
        """Forget whatever was read beyond the first `num_tokens` of the context."""
        ...


def prefill_chunks(model: CachedModel, token_ids: Sequence[int]) -> Iterator[None]:
    """Read a prompt into a model's cache, yielding between chunks."""
    for start in range(0, len(token_ids), PREFILL_CHUNK_TOKENS):
        if start > 0:
            yield
        model.forward(token_ids[start : start + PREFILL_CHUNK_TOKENS], num_logits=1)
    model.synchronize()


@dataclass(slots=True)
class ModelProposer:
    """The draft kind `model`: a smaller model writes ahead."""

    model: CachedModel

    def prefill(self, token_ids: Sequence[int]) -> Iterator[None]:
        return prefill_chunks(self.model, token_ids)

    def propose(self, request: DraftRequest) -> Draft:
        token_ids: list[int] = []
        probs: list[Array] = []
        reported_probs: list[float] = []
        top: list[list[tuple[int, float]]] = []
        # After a draft that was kept whole, its last token is still unread, beside the bonus token.
        unread = list(request.context_token_ids[self.model.num_cached_tokens :])
        sampling = request.sampling
        while len(token_ids) < request.num_tokens:
            logits = self.model.forward(unread, num_logits=1)
            if sampling.is_greedy:
                token_id = greedy_token_ids(logits)[0]
                reported_probs += self.model.token_probs([0], [token_id])
            else:
                step_probs = to_probs(logits, sampling)[0]
                token_id = draw(step_probs, request.random.random())
                probs.append(step_probs)
                reported_probs.append(float(step_probs[token_id]))
            token_ids.append(token_id)
            if request.num_top_tokens:
                row = softmax(logits)[0] if sampling.is_greedy else step_probs
                top.append(top_entries(row, request.num_top_tokens))
            if reported_probs[-1] < request.min_prob:
                # Behind the token, not before it: whether a drawn token is judged must not depend
                # on which it is, or the output would not follow the target's distribution.
                break
            unread = [token_id]
        drawn_from = None if sampling.is_greedy else tuple(probs)
        return Draft(tuple(token_ids), drawn_from, tuple(reported_probs), tuple(top))

    def keep(self, num_tokens: int) -> None:
        self.model.truncate(min(num_tokens, self.model.num_cached_tokens))


@dataclass(slots=True)
class PromptLookupProposer:
    """The draft kind `prompt_lookup`: what followed the same words before."""

    index: NgramIndex = field(default_factory=NgramIndex)

    def prefill(self, token_ids: Sequence[int]) -> Iterator[None]:
        self.index.read(token_ids)
        return iter(())

    def propose(self, request: DraftRequest) -> Draft:
        found = self.index.lookup(request.context_token_ids, request.num_tokens)
        return Draft(tuple(found), None, (1.0,) * len(found))

    def keep(self, num_tokens: int) -> None:
        """Only the context is ever indexed, so there is nothing to forget."""


@dataclass(slots=True)
class NoProposer:
    """The draft kind `none`: plain decoding is the loop with nothing drafted."""

    def prefill(self, token_ids: Sequence[int]) -> Iterator[None]:
        return iter(())

    def propose(self, request: DraftRequest) -> Draft:
        return Draft()

    def keep(self, num_tokens: int) -> None:
        """It reads nothing."""


@dataclass(slots=True)
class EchoProposer(NoProposer):
    """Proposes the end of the context again: any draft, so that a warm-up has one to verify.

    A context that is shorter than the draft is said over and over.
    """

    def propose(self, request: DraftRequest) -> Draft:
        end = tuple(request.context_token_ids[-request.num_tokens :])
        token_ids = (end * request.num_tokens)[-request.num_tokens :]
        return Draft(token_ids, None, (1.0,) * len(token_ids))
