"""The loop: draft, verify in one target pass, keep, roll back.

Works on token ids only; `engines.generation` gives its rounds text and times. Plain decoding is
the same loop with nothing drafted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isnan
from random import Random
from time import perf_counter
from typing import Protocol

from array_api_compat import array_namespace, device

from engines.config import GenerationRequest
from engines.drafting import CachedModel, Draft, DraftRequest, Proposer, prefill_chunks
from engines.errors import GenerationError
from engines.rejection import Verdict, verify_draft, verify_greedy
from engines.sampling import (
    NOT_NUMBERS,
    Array,
    greedy_token_ids,
    one_hot,
    softmax,
    to_probs,
    top_entries,
)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The target has read the prompt this far. The last one comes when the draft has, too."""

    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Verification:
    """What one target pass says about a draft.

    The sequences have one entry for each draft token and one more for the token that follows. The
    entries of tokens behind the first rejected one were never compared.
    """

    verdict: Verdict
    target_probs: tuple[float | None, ...]  # None, here and below: not reported
    uniforms: tuple[float | None, ...]
    top_target: tuple[list[tuple[int, float]], ...]

    @classmethod
    def of(
        cls,
        verdict: Verdict,
        draft: Draft,
        probs: Sequence[float],
        uniforms: tuple[float, ...],
        top_target: tuple[list[tuple[int, float]], ...],
    ) -> Verification:
        """Return it with nothing said of what was never compared.

        Args:
            verdict: Of the draft.
            draft: What was verified.
            probs: The target's for the draft tokens, as many as were compared or more, and last
                for the token that follows.
            uniforms: num_draft_tokens + 1 of them.
            top_target: Of the compared rows; empty where they are not reported.

        Raises:
            GenerationError: The probability of the token that follows is not a number, which a
                greedy choice would hide.
        """
        if isnan(probs[-1]):
            raise GenerationError(NOT_NUMBERS)
        num_draft_tokens = len(draft.token_ids)
        num_judged = min(verdict.num_accepted_tokens + 1, num_draft_tokens)
        unjudged = (None,) * (num_draft_tokens - num_judged)
        return cls(verdict, (*probs[:num_judged], *unjudged, probs[-1]), uniforms, top_target)


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """A draft, what one target pass says about it, and what both took."""

    draft: Draft
    verification: Verification
    draft_s: float
    target_s: float


class RoundMaker(Protocol):
    """Drafts and verifies, for one sequence."""

    def prefill(self, token_ids: Sequence[int]) -> Iterator[PrefillChunk]:
        """Read the prompt in chunks, yielding behind each: the target, then what drafts."""
        ...

    def make(self, context_token_ids: Sequence[int], num_wanted: int) -> VerifiedDraft:
        """Draft up to `num_wanted` tokens behind the context, and verify them in one target pass.

        Nothing has read the context's last token yet.

        Raises:
            GenerationError: A model's logits are not numbers.
        """
        ...

    def keep(self, num_tokens: int) -> None:
        """Forget whatever was read beyond the first `num_tokens`."""
        ...


@dataclass(frozen=True, slots=True)
class Round:
    """One target pass, with the draft it verified."""

    draft: Draft
    verification: Verification
    output_token_ids: tuple[int, ...]  # what joins the output, cut behind a stop token
    is_last: bool
    draft_s: float
    target_s: float


@dataclass(frozen=True, slots=True)
class Pass:
    """What a library tells that runs the loop itself: the outcome of a target pass.

    Where several passes arrive as one, none of the counts is known.
    """

    output_token_ids: tuple[int, ...]
    num_accepted_tokens: int | None  # None: not reported
    num_draft_tokens: int | None  # 0: nothing was drafted; None: not reported
    is_last: bool
    step_s: float  # since the pass before, drafting included, by the library's own clock


@dataclass(slots=True)
class StepwiseRounds:
    """Rounds over a cached target and a proposer, one forward pass at a time.

    Every draw comes from one generator, seeded by the request.

    Args:
        target: Its cache is empty, and so is the proposer's.
        proposer: Drafts fewer than is wanted where it is unsure.
        request: The sampling, and what to report.
    """

    target: CachedModel
    proposer: Proposer
    request: GenerationRequest
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.request.sampling.seed)  # noqa: S311 - sampling, not secrets

    def prefill(self, token_ids: Sequence[int]) -> Iterator[PrefillChunk]:
        for _ in chain(prefill_chunks(self.target, token_ids), self.proposer.prefill(token_ids)):
            yield PrefillChunk(self.target.num_cached_tokens)
        yield PrefillChunk(self.target.num_cached_tokens)

    def make(self, context_token_ids: Sequence[int], num_wanted: int) -> VerifiedDraft:
        started = perf_counter()
        request, draft = self.request, Draft()
        if num_wanted > 0:
            draft = self.proposer.propose(
                DraftRequest(
                    context_token_ids,
                    num_wanted,
                    request.sampling,
                    self.random,
                    request.num_top_tokens,
                    request.min_draft_prob or 0.0,
                )
            )
        drafted = perf_counter()
        logits = self.target.forward(
            [*context_token_ids[self.target.num_cached_tokens :], *draft.token_ids],
            num_logits=len(draft.token_ids) + 1,
        )
        verification = self._verify(draft, logits)
        return VerifiedDraft(draft, verification, drafted - started, perf_counter() - drafted)

    def keep(self, num_tokens: int) -> None:
        self.proposer.keep(num_tokens)
        self.target.truncate(num_tokens)

    def _verify(self, draft: Draft, logits: Array) -> Verification:
        """Judge a draft by the target's logits [num_draft_tokens + 1, vocab_size] of this pass.

        Raises:
            GenerationError: The logits are not numbers.
        """
        sampling, num_top_tokens = self.request.sampling, self.request.num_top_tokens
        uniforms = tuple(self.random.random() for _ in range(len(draft.token_ids) + 1))
        if sampling.is_greedy:
            verdict = verify_greedy(draft.token_ids, greedy_token_ids(logits))
        else:
            probs = to_probs(logits, sampling)
            verdict = verify_draft(draft.token_ids, _draft_rows(draft, probs), probs, uniforms)

        num_accepted = verdict.num_accepted_tokens
        judged = draft.token_ids[: num_accepted + 1]
        # The token that follows comes from the row of the first rejected one, if there is one.
        rows, token_ids = [*range(len(judged)), num_accepted], [*judged, verdict.next_token_id]
        if sampling.is_greedy:
            reported = self.target.token_probs(rows, token_ids)
        else:
            reported = [float(probs[row, id_]) for row, id_ in zip(rows, token_ids, strict=True)]
        top: tuple[list[tuple[int, float]], ...] = ()
        if num_top_tokens:
            seen = softmax(logits[: num_accepted + 1]) if sampling.is_greedy else probs
            top = tuple(top_entries(seen[row], num_top_tokens) for row in range(num_accepted + 1))
        return Verification.of(verdict, draft, reported, uniforms, top)


def decode(
    rounds: RoundMaker,
    request: GenerationRequest,
    *,
    stop_token_ids: frozenset[int],
    context_length: int,
) -> Generator[PrefillChunk | Round, None, None]:
    """Yield how the prompt is read, then a round for each target pass, until a stop or the limit.

    After each round the target's cache holds the prompt and all but the last output token, the
    proposer's no more than that.

    Args:
        rounds: Drafts `request.num_draft_tokens` a round; fewer where less is left to say.
        request: The prompt and the limits.
        stop_token_ids: Any of these ends the output, and is its last token.
        context_length: The most tokens that prompt and output may have together.
    """
    context = list(request.prompt_token_ids)
    max_tokens = min(len(context) + request.max_new_tokens, context_length)

    # The last prompt token is read by the first round, as the last output token is by each later.
    yield from rounds.prefill(context[:-1])

    is_stopped = False
    while len(context) < max_tokens and not is_stopped:
        # A round adds one token to those it accepts, so it drafts one fewer than are left.
        num_wanted = min(request.num_draft_tokens, max_tokens - len(context) - 1)
        made = rounds.make(context, num_wanted)
        verdict = made.verification.verdict
        output = [*made.draft.token_ids[: verdict.num_accepted_tokens], verdict.next_token_id]
        for position, token_id in enumerate(output):
            if token_id in stop_token_ids:
                output = output[: position + 1]
                is_stopped = True
                break

        context += output
        rounds.keep(len(context) - 1)
        is_last = is_stopped or len(context) >= max_tokens
        yield Round(
            made.draft, made.verification, tuple(output), is_last, made.draft_s, made.target_s
        )


def _draft_rows(draft: Draft, target_probs: Array) -> Array:
    """Return what each draft token was drawn from, [num_draft_tokens, vocab_size]."""
    xp = array_namespace(target_probs)
    if draft.probs:
        return xp.stack(draft.probs)
    token_ids = xp.asarray(draft.token_ids, dtype=xp.int64, device=device(target_probs))
    return one_hot(token_ids, target_probs.shape[-1], target_probs.dtype)
