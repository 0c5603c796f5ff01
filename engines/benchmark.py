"""The comparison: one request with and without drafting, on the same engine, really run.

Both sides get the same prompt ids, sampling, seed and stop rule; each is warmed up with the passes
it will make; the order alternates from repeat to repeat; prefill is kept apart from decoding.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias, assert_never

from engines.base import Engine
from engines.config import GenerationRequest
from engines.environment import environment
from engines.events import GenerationEvent, Step
from engines.stats import (
    FirstDifference,
    GenerationStats,
    Spread,
    first_difference,
    spread_of,
    stats_of,
    typical,
)

Side: TypeAlias = Literal["speculative", "baseline"]
SIDES: tuple[Side, Side] = ("speculative", "baseline")
MAX_REPEATS = 9


@dataclass(frozen=True, slots=True)
class WarmUp:
    """A side is being made ready or warmed up. Nothing of it is kept."""

    side: Side
    message: str | None = None  # a log line


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One event of one run of one side."""

    side: Side
    repeat: int  # from 0
    event: GenerationEvent


@dataclass(frozen=True, slots=True)
class Parted:
    """Greedy outputs differ: by how much the target preferred the baseline's token there."""

    logit_gap: float | None  # None where the back end cannot say


RunItem: TypeAlias = WarmUp | RunEvent | Parted


@dataclass(slots=True)
class RunRecord:
    """Every event of a plain, a speculative or a compared run, as far as it has come."""

    prompt: str
    settings: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=environment)
    runs: dict[Side, list[list[GenerationEvent]]] = field(default_factory=dict)
    logit_gap: float | None = None  # where greedy outputs part, see `Parted`

    def apply(self, item: RunItem) -> None:
        """Take in one more item of a run."""
        match item:
            case WarmUp():
                pass
            case RunEvent():
                repeats = self.runs.setdefault(item.side, [])
                while len(repeats) <= item.repeat:
                    repeats.append([])
                repeats[item.repeat].append(item.event)
            case Parted():
                self.logit_gap = item.logit_gap
            case _:
                assert_never(item)

    def stats(self, side: Side) -> list[GenerationStats]:
        """Return the statistics of each repeat of a side, [] where it was not run."""
        return [stats_of(events) for events in self.runs.get(side, [])]

    def to_dict(self) -> dict[str, Any]:
        """Return the run under its JSON names; a compared run where both sides were run."""
        shared = {
            "prompt": self.prompt,
            "effective_settings": self.settings,
            "environment": self.environment,
        }
        if all(self.runs.get(side) for side in SIDES):
            return {**comparison_of(self).to_dict(), **shared}
        side = next((side for side in SIDES if self.runs.get(side)), None)
        return {**(typical(self.stats(side)).to_dict() if side else {}), **shared}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of a compared run."""

    speculative: GenerationStats  # of the repeat whose speed is the median
    baseline: GenerationStats
    speculative_tokens_per_second: Spread | None
    baseline_tokens_per_second: Spread | None
    speedup: Spread | None  # ratio of tokens per second; the range is that of the repeats' ratios
    is_finished: bool  # both sides ran to their end in every repeat
    identical: bool | None  # None above temperature 0, where two runs draw different numbers
    difference: FirstDifference | None
    logit_gap: float | None = None  # at the difference, see `Parted`

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison under its JSON names."""
        return {
            "speculative": self.speculative.to_dict(),
            "baseline": self.baseline.to_dict(),
            "speedup": None if self.speedup is None else self.speedup.median,
            "speedup_range": _range(self.speedup),
            "tokens_per_second_range": {
                "speculative": _range(self.speculative_tokens_per_second),
                "baseline": _range(self.baseline_tokens_per_second),
            },
            "identical": self.identical,
            "first_difference": None
            if self.difference is None
            else {**asdict(self.difference), "logit_gap": self.logit_gap},
            "is_finished": self.is_finished,
        }


def run(
    engine: Engine, request: GenerationRequest, *, baseline: bool, repeats: int = 1
) -> Generator[RunItem, None, None]:
    """Yield a run, and its baseline where asked for, with the warming up before.

    Closing the generator cancels what runs before its next pass.

    Raises:
        ValueError: `repeats` is out of range, or the request does not suit the engine.
        GenerationError: The back end failed.
    """
    if not 1 <= repeats <= MAX_REPEATS:
        raise ValueError(f"repeats is {repeats}: use 1 to {MAX_REPEATS}")
    requests: dict[Side, GenerationRequest] = {"speculative": request}
    if baseline:
        requests["baseline"] = request.plain()
        for side, side_request in requests.items():
            with closing(engine.warm_up(side_request)) as passes:
                for message in passes:
                    yield WarmUp(side, message)
    has_parted = False
    for repeat in range(repeats):
        outputs: dict[Side, list[int]] = {}
        for side in requests if repeat % 2 == 0 else reversed(requests):
            outputs[side] = []
            with closing(engine.prepare(requests[side])) as preparing:
                for message in preparing:
                    yield WarmUp(side, message)
            with closing(engine.generate(requests[side])) as events:
                for event in events:
                    if isinstance(event, Step):
                        outputs[side] += [token.id for token in event.tokens]
                    yield RunEvent(side, repeat, event)
        if baseline and request.sampling.is_greedy and not has_parted:
            difference = first_difference(outputs["speculative"], outputs["baseline"])
            if difference is not None:
                has_parted = True
                yield Parted(_logit_gap(engine, request, outputs["baseline"], difference))


def _logit_gap(
    engine: Engine,
    request: GenerationRequest,
    baseline_token_ids: list[int],
    difference: FirstDifference,
) -> float | None:
    theirs, ours = difference.baseline_token_id, difference.speculative_token_id
    if theirs is None or ours is None:
        return None
    before = (*request.prompt_token_ids, *baseline_token_ids[: difference.position])
    return engine.logit_gap(before, theirs, ours)


def comparison_of(record: RunRecord) -> Comparison:
    """Compare the two sides of a record. Both have at least one event."""
    speculative, baseline = record.stats("speculative"), record.stats("baseline")
    pairs = list(zip(speculative, baseline, strict=False))
    repeats = record.settings.get("repeats", 1)
    is_finished = len(speculative) == len(baseline) == repeats and all(
        stats.finish_reason != "cancelled" for stats in (*speculative, *baseline)
    )
    ours = spread_of(stats.tokens_per_second for stats in speculative)
    theirs = spread_of(stats.tokens_per_second for stats in baseline)
    ratios = spread_of(
        a.tokens_per_second / b.tokens_per_second
        for a, b in pairs
        if a.tokens_per_second and b.tokens_per_second
    )
    speedup = None
    if is_finished and ours and theirs and ratios:
        speedup = replace(ratios, median=ours.median / theirs.median)
    is_greedy = record.settings.get("temperature") == 0
    difference = None
    if is_greedy and is_finished:
        found = (first_difference(a.output_token_ids, b.output_token_ids) for a, b in pairs)
        difference = next(filter(None, found), None)
    return Comparison(
        speculative=typical(speculative),
        baseline=typical(baseline),
        speculative_tokens_per_second=ours,
        baseline_tokens_per_second=theirs,
        speedup=speedup,
        is_finished=is_finished,
        identical=difference is None if is_greedy and is_finished else None,
        difference=difference,
        logit_gap=None if difference is None else record.logit_gap,
    )


def settings_of(
    engine: Engine, request: GenerationRequest, *, chat_template: bool, repeats: int = 1
) -> dict[str, Any]:
    """Return everything that a run's outcome depends on, for its record."""
    info = engine.info
    return {
        "backend": info.backend,
        "target": info.target,
        "draft": info.draft if request.draft_kind == "model" else None,
        "draft_kind": request.draft_kind,
        "num_draft_tokens": request.num_draft_tokens,
        "min_draft_prob": engine.min_draft_prob(request),
        "max_new_tokens": request.max_new_tokens,
        **asdict(request.sampling),
        "verification": "exact match" if request.sampling.is_greedy else "rejection sampling",
        "chat_template": chat_template,
        "repeats": repeats,
        "dtype": info.dtype,
        "draft_dtype": info.draft_dtype if request.draft_kind == "model" else None,
        "device": info.device,
        "context_length": info.context_length,
        "versions": info.versions,
        "commits": info.commits,
        **info.settings,
        "notes": list(info.notes),
    }


def _range(spread: Spread | None) -> list[float] | None:
    return None if spread is None else [spread.low, spread.high]
