"""Builds as numbered stages: each yields log lines, the whole yields progress."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter

from engines.base import BuildProgress


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a build."""

    name: str
    run: Callable[[], Generator[str | None, None, None]]  # log lines; None is a sign of life


def run_stages(stages: Sequence[Stage]) -> Generator[BuildProgress, None, None]:
    """Run stages one after the other, yielding as each begins and whenever it says something."""
    started = perf_counter()
    for number, stage in enumerate(stages, start=1):
        yield BuildProgress(number, len(stages), stage.name, perf_counter() - started)
        with closing(stage.run()) as messages:
            for message in messages:
                yield BuildProgress(
                    number, len(stages), stage.name, perf_counter() - started, message=message
                )
