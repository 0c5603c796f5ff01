"""Recorded runs played again: their events in time, and an engine that answers with them.

The engine needs no model, and yields everything at once where its speed is `None`.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable

from engines.base import Engine, EngineInfo
from engines.benchmark import RunRecord, Side
from engines.config import DRAFT_KINDS, DraftKind, GenerationRequest, check_prompt
from engines.errors import ModelLoadError
from engines.events import GenerationEvent

MIN_SPEED, MAX_SPEED = 0.01, 1000.0


def replay_events(
    events: Iterable[GenerationEvent], *, speed: float | None
) -> Generator[GenerationEvent, None, None]:
    """Yield events at their recorded times, `speed` times as fast, or at once for None.

    A speed is a number from `MIN_SPEED` to `MAX_SPEED`.
    """
    started = time.perf_counter()
    for event in events:
        if speed is not None:
            time.sleep(max(0.0, event.elapsed_s / speed - (time.perf_counter() - started)))
        yield event


class ReplayEngine(Engine):
    """Answers any prompt with the recorded run."""

    def __init__(self, record: RunRecord, *, speed: float | None = 1.0) -> None:
        if not record.runs:
            raise ModelLoadError("the recording holds no events: record a run first")
        self._record = record
        self._speed = speed

    @property
    def info(self) -> EngineInfo:
        settings = self._record.settings
        return EngineInfo(
            backend="replay",
            target=f"{settings.get('target', 'unknown')} (recorded)",
            draft=settings.get("draft"),
            dtype=str(settings.get("dtype", "unknown")),
            device=str(settings.get("device", "unknown")),
            context_length=2**20,
            draft_dtype=settings.get("draft_dtype"),
            notes=("a recorded run: the prompt and the settings given now have no effect",),
        )

    @property
    def draft_kinds(self) -> tuple[DraftKind, ...]:
        return tuple(kind for kind in DRAFT_KINDS if self._side(kind) in self._record.runs)

    def encode(self, prompt: str, *, chat_template: bool) -> tuple[int, ...]:
        check_prompt(prompt)
        return (0,)

    def generate(self, request: GenerationRequest) -> Generator[GenerationEvent, None, None]:
        side = self._side(request.draft_kind)
        if side not in self._record.runs:
            raise ValueError(
                f"draft_kind is '{request.draft_kind}', and the recording holds no {side} run: "
                f"use one of {', '.join(self.draft_kinds)}"
            )
        return replay_events(self._record.runs[side][0], speed=self._speed)

    def warm_up(self, request: GenerationRequest) -> Generator[None, None, None]:
        yield from ()

    def close(self) -> None:
        """It holds nothing."""

    def _side(self, kind: DraftKind) -> Side:
        is_plain_run = self._record.settings.get("draft_kind") == "none"  # nothing to compare with
        return "baseline" if kind == "none" and not is_plain_run else "speculative"
