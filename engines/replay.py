"""The replay back end: plays a recorded run as if an engine ran it. For a page without a model.

Its target is the path of a recording. Events come at their recorded times, or at once where the
speed is `None`, which makes it the free back end of tests.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from pathlib import Path

from engines.base import Backend, BackendStatus, BuildProgress, Engine, EngineInfo
from engines.benchmark import RunRecord, Side
from engines.config import DRAFT_KINDS, DraftKind, EngineConfig, GenerationRequest, check_prompt
from engines.errors import ModelLoadError
from engines.events import GenerationEvent
from engines.recording import read_recording
from engines.store import EngineStore

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

    def warm_up(self, request: GenerationRequest) -> None:
        """A recording has nothing to warm up."""

    def close(self) -> None:
        """It holds nothing."""

    def _side(self, kind: DraftKind) -> Side:
        is_plain_run = self._record.settings.get("draft_kind") == "none"  # nothing to compare with
        return "baseline" if kind == "none" and not is_plain_run else "speculative"


class ReplayBackend(Backend):
    """Loads recordings. There is nothing to build."""

    def __init__(self, store: EngineStore | None = None) -> None:
        """Make the back end; it keeps nothing in the store."""

    def probe(self) -> BackendStatus:
        return BackendStatus("replay", usable=True, detail="plays recorded runs, without a model")

    def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
        yield BuildProgress(1, 1, "read the recording", 0.0)
        read_recording(Path(config.target))

    def load(self, config: EngineConfig) -> Engine:
        return ReplayEngine(read_recording(Path(config.target)))
