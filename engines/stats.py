"""Acceptance, speed and speedup, from events. Plain arithmetic; imports no tensor library.

Names and definitions follow vLLM's speculative-decoding metrics: `acceptance_rate` is accepted
tokens per drafted token, `mean_acceptance_length` counts the bonus or recovered token.

A sum is None where the back end does not report one of its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median_low
from typing import Any, assert_never

from engines.events import Finish, GenerationEvent, Prefill, Step, Totals


@dataclass(slots=True)
class GenerationStats:
    """The counts and times of one generation, as far as it has come."""

    num_prompt_tokens: int = 0
    num_steps: int | None = 0
    num_drafts: int | None = 0  # steps that drafted something
    num_draft_tokens: int | None = 0  # drafted in all
    num_accepted_tokens: int | None = 0
    # As far as drafts are known to have gone: where num_draft_tokens is None, the longest may have
    # gone further.
    num_accepted_tokens_per_pos: list[int] | None = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of the output tokens
    draft_s: float | None = 0.0
    target_s: float = 0.0  # of whole steps, drafting included, where draft_s is None
    prefill_s: float = 0.0  # until the prompt was read
    time_to_first_token_s: float | None = None
    elapsed_s: float = 0.0
    finish_reason: str = "cancelled"  # until a Finish says otherwise

    def apply(self, event: GenerationEvent) -> None:
        """Take in one more event."""
        self.elapsed_s = event.elapsed_s
        match event:
            case Prefill():
                self.num_prompt_tokens = event.num_prompt_tokens
                self.prefill_s = event.elapsed_s
            case Step():
                self._apply_step(event)
            case Finish():
                self.finish_reason = event.reason
                self._apply_totals(event.totals)
            case _:
                assert_never(event)

    def _apply_step(self, step: Step) -> None:
        self.num_steps = _sum(self.num_steps, step.num_passes)
        self.num_drafts = _sum(self.num_drafts, step.num_drafts)
        self.num_draft_tokens = _sum(self.num_draft_tokens, step.num_draft_tokens)
        self.num_accepted_tokens = _sum(self.num_accepted_tokens, step.num_accepted_tokens)
        self._apply_positions(step)
        self.output_token_ids += [token.id for token in step.tokens]
        self.texts += [token.text for token in step.tokens]
        self._apply_times(step)
        if self.time_to_first_token_s is None and step.tokens:
            self.time_to_first_token_s = step.elapsed_s

    def _apply_positions(self, step: Step) -> None:
        counts, num_accepted = self.num_accepted_tokens_per_pos, step.num_accepted_tokens
        if counts is None or num_accepted is None:
            self.num_accepted_tokens_per_pos = None
            return
        num_positions = max(step.num_draft_tokens or 0, num_accepted)
        counts += [0] * (num_positions - len(counts))
        for position in range(num_accepted):
            counts[position] += 1

    def _apply_times(self, step: Step) -> None:
        if self.draft_s is not None and step.draft_s is not None:
            self.draft_s += step.draft_s
            self.target_s += step.target_s
        else:  # whole steps from here on, and so those before
            self.target_s += step.target_s + (self.draft_s or 0.0) + (step.draft_s or 0.0)
            self.draft_s = None

    def _apply_totals(self, totals: Totals) -> None:
        if self.num_drafts is None:
            self.num_drafts = totals.num_drafts
        if self.num_draft_tokens is None:
            self.num_draft_tokens = totals.num_draft_tokens
        if self.draft_s is None and totals.draft_s is not None:
            self.draft_s = min(totals.draft_s, self.target_s)  # two clocks may differ a little
            self.target_s -= self.draft_s

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ÷ drafted tokens, 0-1; None where nothing was drafted or not reported."""
        if self.num_accepted_tokens is None or not self.num_draft_tokens:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted ÷ drafts: output tokens per drafted step; None as for the rate."""
        if self.num_accepted_tokens is None or not self.num_drafts:
            return None
        return 1 + self.num_accepted_tokens / self.num_drafts

    @property
    def decode_s(self) -> float:
        return self.elapsed_s - self.prefill_s

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens ÷ decode time, prefill apart; None before the first step."""
        return self.num_output_tokens / self.decode_s if self.decode_s > 0 else None

    @property
    def time_per_token_s(self) -> float | None:
        """Decode time ÷ output tokens; None before the first step."""
        return self.decode_s / self.num_output_tokens if self.num_output_tokens else None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under their JSON names; null where the back end reports none."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_steps": self.num_steps,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": copy(self.num_accepted_tokens_per_pos),
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "time_to_first_token_s": self.time_to_first_token_s,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "elapsed_s": self.elapsed_s,
            "tokens_per_second": self.tokens_per_second,
            "draft_s": self.draft_s,
            "target_s": self.target_s,
            "finish_reason": self.finish_reason,
            "text": self.text,
            "output_token_ids": list(self.output_token_ids),
        }


def _sum(total: int | None, part: int | None) -> int | None:
    return None if total is None or part is None else total + part


def stats_of(events: Iterable[GenerationEvent]) -> GenerationStats:
    """Return the statistics of a whole or partial event stream."""
    stats = GenerationStats()
    for event in events:
        stats.apply(event)
    return stats


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two greedy outputs part."""

    position: int  # in the output, from 0
    speculative_token_id: int | None  # None: this side had already ended
    baseline_token_id: int | None


def first_difference(speculative: Sequence[int], baseline: Sequence[int]) -> FirstDifference | None:
    """Return where two outputs part, or None where they are equal."""
    for position, (ours, theirs) in enumerate(zip_longest(speculative, baseline)):
        if ours != theirs:
            return FirstDifference(position, ours, theirs)
    return None


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its range over the repeats of a measurement."""

    median: float  # of an even number, the lower of the two in the middle: a value that occurred
    low: float
    high: float


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """Return median and range of the values that were measured, or None without any."""
    measured = [value for value in values if value is not None]
    if not measured:
        return None
    return Spread(median_low(measured), min(measured), max(measured))


def typical(repeats: Sequence[GenerationStats]) -> GenerationStats:
    """Return the repeat whose speed is the median: the one that stands for all of them.

    A repeat that was stopped counts only where there is no other.
    """
    whole = [stats for stats in repeats if stats.finish_reason != "cancelled"] or list(repeats)
    by_speed = sorted(whole, key=lambda stats: stats.tokens_per_second or 0.0)
    return by_speed[(len(by_speed) - 1) // 2]
