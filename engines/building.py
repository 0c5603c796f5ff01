"""Builds as numbered stages: each yields log lines, the whole yields progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from engines.base import BuildProgress


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a build."""

    name: str
    run: Callable[[], Iterator[str | None]]  # log lines; None is a sign of life


def run_stages(stages: Sequence[Stage]) -> Iterator[BuildProgress]:
    """Run stages one after the other, yielding as each begins and whenever it says something."""
    started = perf_counter()
    for number, stage in enumerate(stages, start=1):
        yield BuildProgress(number, len(stages), stage.name, perf_counter() - started)
        for message in stage.run():
            yield BuildProgress(
                number, len(stages), stage.name, perf_counter() - started, message=message
            )
