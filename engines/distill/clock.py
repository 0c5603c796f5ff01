"""The time that a phase has taken, over every run of it, and how fast it is now."""

from __future__ import annotations

import time
from typing import Any

REPORT_S = 0.5  # between two reports


class Clock:
    """Times one phase. What earlier runs took is read from its state and kept there."""

    def __init__(self, phase: dict[str, Any]) -> None:
        self._phase = phase
        self._before = float(phase.get("elapsed_s", 0.0))
        self._started = self._reported = time.monotonic()
        self._rated: tuple[float, int] | None = None

    @property
    def elapsed_s(self) -> float:
        return self._before + time.monotonic() - self._started

    def store(self) -> None:
        """Keep the time so far in the phase's state."""
        self._phase["elapsed_s"] = self.elapsed_s

    def is_time_to_report(self) -> bool:
        """Return whether the last report, or the start, is long enough ago; then it counts anew."""
        now = time.monotonic()
        if now - self._reported < REPORT_S:
            return False
        self._reported = now
        return True

    def rate(self, num_tokens: int) -> float | None:
        """Return tokens a second since the last call, None at the first."""
        now, before = time.monotonic(), self._rated
        self._rated = (now, num_tokens)
        return None if before is None else (num_tokens - before[1]) / (now - before[0])
