"""Whether samples follow a distribution: within four standard errors, cell by cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from math import sqrt
from typing import TypeVar

Cell = TypeVar("Cell", bound=Hashable)


def assert_share(count: int, num_samples: int, expected: float) -> None:
    """Assert that something of probability `expected` was counted about as often as it should."""
    standard_error = sqrt(expected * (1 - expected) / num_samples)
    share = count / num_samples
    assert abs(share - expected) <= 4 * standard_error + 1e-9, (
        f"{share:.4f} instead of {expected:.4f} is more than four standard errors off"
    )


def assert_follows(counts: Counter[Cell], expected: Mapping[Cell, float]) -> None:
    """Assert that counted samples follow a distribution; what it leaves out must not occur."""
    num_samples = counts.total()
    for cell in counts.keys() | expected.keys():
        assert_share(counts[cell], num_samples, expected.get(cell, 0.0))
