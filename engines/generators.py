"""A generator's result, for callers who need none of what it yields on the way."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")


def finished(
    generator: Generator[Any, None, Result], *, on_message: Callable[[str], None] | None = None
) -> Result:
    """Run a generator to its end and return what it returns.

    Args:
        generator: Yields log lines among other things.
        on_message: Gets them.
    """
    while True:
        try:
            item = next(generator)
            if on_message is not None and isinstance(item, str):
                on_message(item)
        except StopIteration as ended:
            result: Result = ended.value
            return result
