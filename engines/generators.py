"""A generator's result, for callers who need none of what it yields on the way."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

Result = TypeVar("Result")


def finished(generator: Generator[Any, None, Result]) -> Result:
    """Run a generator to its end and return what it returns."""
    while True:
        try:
            next(generator)
        except StopIteration as ended:
            result: Result = ended.value
            return result
