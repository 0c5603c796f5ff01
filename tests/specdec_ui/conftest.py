"""A scripted back end whose passes can be counted, and the served page over it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from threading import Condition, Event
from typing import Any

import pytest

from engines import (
    Backend,
    BackendStatus,
    BuildProgress,
    DraftKind,
    Engine,
    EngineConfig,
    EngineInfo,
    EngineSlot,
    Finish,
    GenerationEvent,
    GenerationRequest,
    Prefill,
    Step,
    TensorRTOptions,
    Token,
)
from specdec_ui.layout import PageDefaults, build_app, launch_options
from specdec_ui.state import TENSORRT_FIELDS, RunForm

TOKENS_PER_STEP = 4
WAIT_S = 30.0  # for what must happen; nothing waits that long when all is well


def values_of(form: RunForm) -> list[Any]:
    """Return the values of the controls of a form, as a handler gets them."""
    usual = TensorRTOptions()
    options = {name: getattr(usual, name) for name in TENSORRT_FIELDS}
    options |= {"devices": "", "draft_devices": "", "python": "", **form.tensorrt_llm}
    return [
        options[name] if name in TENSORRT_FIELDS else getattr(form, name)
        for name in RunForm.names()
    ]


class ScriptedEngine(Engine):
    """Yields as many steps as asked for, each of four tokens where it drafts, and counts them.

    `step_s` stands for the time that a device takes over a step.
    """

    def __init__(self, *, step_s: float = 0.0, text: str = " word") -> None:
        self.step_s = step_s
        self.text = text
        self.num_steps = 0
        self.num_generations = 0
        self.num_closed = 0
        self.log: list[str] = []  # which generations began and were closed, in order
        self.changed = Condition()
        self._device = Event()  # never set: waiting on it takes the time of a step

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("scripted", "scripted target", None, "float32", "x86_64 CPU", 10**6)

    @property
    def draft_kinds(self) -> tuple[DraftKind, ...]:
        return ("prompt_lookup", "none")

    def encode(self, prompt: str, *, chat_template: bool) -> tuple[int, ...]:
        return tuple(range(len(prompt.split())))

    def generate(self, request: GenerationRequest) -> Generator[GenerationEvent, None, None]:
        with self.changed:
            self.num_generations += 1
            number = self.num_generations
            self.log.append(f"{number} begins")
            self.changed.notify_all()
        try:
            yield Prefill(len(request.prompt_token_ids), len(request.prompt_token_ids) - 1, 0.01)
            num_tokens, elapsed_s = 0, 0.01
            while num_tokens < request.max_new_tokens:
                if self.step_s:
                    self._device.wait(self.step_s)
                elapsed_s += self.step_s or 0.001
                step = self._step(request, request.max_new_tokens - num_tokens, elapsed_s)
                num_tokens += len(step.tokens)
                with self.changed:
                    self.num_steps += 1
                    self.changed.notify_all()
                yield step
            yield Finish("length", elapsed_s)
        finally:
            with self.changed:
                self.num_closed += 1
                self.log.append(f"{number} is closed")
                self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something that the engine counts has come true."""
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), "it did not happen in time"

    def close(self) -> None:
        """It holds nothing."""

    def _step(self, request: GenerationRequest, num_left: int, elapsed_s: float) -> Step:
        if request.draft_kind == "none":
            return Step((Token(5, self.text, "target"),), (), 0, 0.0, self.step_s, elapsed_s)
        num_tokens = min(TOKENS_PER_STEP, num_left)
        accepted = tuple(
            Token(5, self.text, "accepted", target_prob=0.9, draft_prob=0.8)
            for _ in range(num_tokens - 1)
        )
        following = Token(5, self.text, "recovered", target_prob=0.7)
        rejected = (Token(6, self.text, "rejected", target_prob=0.1, draft_prob=0.5),)
        return Step((*accepted, following), rejected, num_tokens, 0.0, self.step_s, elapsed_s)


class ScriptedBackend(Backend):
    """Hands out one engine, or raises what it is told to."""

    def __init__(self, engine: Engine, error: Exception | None = None) -> None:
        self.engine = engine
        self.error = error

    def probe(self, config: EngineConfig | None = None) -> BackendStatus:
        return BackendStatus("scripted", usable=True, detail="for tests")

    def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
        yield BuildProgress(1, 1, "write the script", 0.0, message="writing")

    def load(self, config: EngineConfig) -> Engine:
        if self.error is not None:
            raise self.error
        return self.engine


@contextmanager
def served(slot: EngineSlot, defaults: PageDefaults | None = None) -> Iterator[str]:
    """Serve the page over a slot and lend its address."""
    app = build_app(slot, defaults)
    _, url, _ = app.queue().launch(
        prevent_thread_lock=True, quiet=True, server_name="127.0.0.1", **launch_options()
    )
    try:
        yield url
    finally:
        app.close()
        slot.close()


@pytest.fixture
def slow_engine() -> ScriptedEngine:
    return ScriptedEngine(step_s=0.05)


@pytest.fixture
def slow_page(slow_engine: ScriptedEngine) -> Iterator[str]:
    with served(EngineSlot(lambda name: ScriptedBackend(slow_engine))) as url:
        yield url
