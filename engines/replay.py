"""The replay back end: plays a recorded run as if an engine ran it. For a page without a model.

Its target is the path of a recording. Events come at their recorded times, or at once where the
speed is `None`, which makes it the free back end of tests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from engines.base import Backend, BackendStatus, BuildProgress, Engine, EngineInfo
from engines.benchmark import RunRecord, Side
from engines.config import DraftKind, EngineConfig, GenerationRequest, check_prompt
from engines.errors import ModelLoadError
from engines.events import GenerationEvent
from engines.recording import read_recording
from engines.store import EngineStore


def replay_events(
    events: Iterator[GenerationEvent], *, speed: float | None
) -> Iterator[GenerationEvent]:
    """Yield events at their recorded times, `speed` times as fast, or at once for None."""
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
        return ("model", "prompt_lookup", "none")

    def encode(self, prompt: str, *, chat_template: bool) -> tuple[int, ...]:
        check_prompt(prompt)
        return (0,)

    def generate(self, request: GenerationRequest) -> Iterator[GenerationEvent]:
        side: Side = "baseline" if request.draft_kind == "none" else "speculative"
        repeats = self._record.runs.get(side) or [[]]
        return replay_events(iter(repeats[0]), speed=self._speed)

    def close(self) -> None:
        """It holds nothing."""


class ReplayBackend(Backend):
    """Loads recordings. There is nothing to build."""

    def __init__(self, store: EngineStore | None = None) -> None:
        """Make the back end; it keeps nothing in the store."""

    def probe(self) -> BackendStatus:
        return BackendStatus("replay", usable=True, detail="plays recorded runs, without a model")

    def build(self, config: EngineConfig) -> Iterator[BuildProgress]:
        yield BuildProgress(1, 1, "read the recording", 0.0)
        read_recording(Path(config.target))

    def load(self, config: EngineConfig) -> Engine:
        return ReplayEngine(read_recording(Path(config.target)))
