"""Alternating measurements, their medians, and a table with one JSON line behind it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

from engines.environment import environment

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity."""

    name: str
    median: float
    low: float
    high: float
    unit: str

    @classmethod
    def of(cls, name: str, values: list[float], unit: str) -> Figure:
        return cls(name, median(values), min(values), max(values), unit)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two medians, with what it is to hold to. It is met on the side of `at_most`."""

    name: str
    value: float
    hold: float | None = None
    aim: float | None = None
    at_most: bool = True

    @property
    def verdict(self) -> str:
        """Return which of its marks the value meets."""
        if self.hold is None or self.aim is None:
            return "shown"
        sign = 1 if self.at_most else -1
        if sign * self.value <= sign * self.aim:
            return "meets the aim"
        return "holds" if sign * self.value <= sign * self.hold else "does not hold"


def alternate(ways: Mapping[str, Callable[[], Value]], repeats: int) -> dict[str, list[Value]]:
    """Return what each way returned in each repeat, after one round that warms up.

    The first way is another one in each repeat, so that none always follows the same neighbour.
    """
    values: dict[str, list[Value]] = {name: [] for name in ways}
    names = list(ways)
    for repeat in range(-1, repeats):
        turn = repeat % len(names) if repeat >= 0 else 0
        for name in (*names[turn:], *names[:turn]):
            value = ways[name]()
            if repeat >= 0:
                values[name].append(value)
    return values


def report(figures: list[Figure], ratios: list[Ratio], settings: Mapping[str, Any]) -> None:
    """Print both tables, and then one line of JSON."""
    out = sys.stdout.write
    out(f"{'':52}{'median':>9}{'low':>9}{'high':>9}\n")
    for figure in figures:
        numbers = "".join(f"{value:9.2f}" for value in (figure.median, figure.low, figure.high))
        out(f"{figure.name:52}{numbers}  {figure.unit}\n")
    out(f"\n{'ratio':62}{'value':>8}{'hold to':>9}{'aim':>7}\n")
    for ratio in ratios:
        marks = "".join(
            f"{'–' if mark is None else f'{mark:.2f}':>{width}}"
            for mark, width in ((ratio.hold, 9), (ratio.aim, 7))
        )
        out(f"{ratio.name:62}{ratio.value:8.3f}{marks}  {ratio.verdict}\n")
    result = {
        **settings,
        "figures": [asdict(figure) for figure in figures],
        "ratios": [{**asdict(ratio), "verdict": ratio.verdict} for ratio in ratios],
        "environment": environment(),
    }
    out(json.dumps(result) + "\n")
