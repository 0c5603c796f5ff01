"""The handlers without a page: what each click shows, keeps and ends."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any, TypeAlias

import gradio as gr
import pytest

from engines import (
    LOADING,
    WAITING,
    BuildProgress,
    Engine,
    EngineConfig,
    EngineSlot,
    GenerationEvent,
    GenerationRequest,
    Prefill,
    RunEvent,
    RunRecord,
    Side,
    Step,
    Token,
    WarmUp,
    read_recording,
)
from engines.errors import EngineBuildError, GenerationError, ModelLoadError, ModelNotBuiltError
from specdec_ui import handlers
from specdec_ui.handlers import (
    LOG_INTERVAL_S,
    STOP_TIMEOUT_S,
    UNEXPECTED,
    forget,
    logged,
    on_build,
    on_fault,
    on_run,
    on_stop,
    on_stopped,
    on_wait,
    stream_run,
    throttled,
)
from specdec_ui.state import BuildLog, RunForm, RunState, Session
from specdec_ui.views import MAX_LOG_LINES, View, progress_text, running_text
from tests.engines.conftest import largest_file
from tests.specdec_ui.conftest import (
    TOKENS_PER_STEP,
    WAIT_S,
    ScriptedBackend,
    ScriptedEngine,
    values_of,
)
from tests.specdec_ui.test_highlight import HOSTILE

Shown: TypeAlias = dict[str, Any]  # an answer's values by the names of the outputs

FORM = RunForm(
    backend="scripted",
    target="a target",
    draft_kind="prompt_lookup",
    draft="",
    prompt="some words",
    chat_template=True,
    num_draft_tokens=4,
    max_new_tokens=8,
    temperature=0,
    top_k=0,
    top_p=1,
    seed=0,
    baseline=False,
    repeats=1,
)
STAYS = gr.skip()
ENABLED, DISABLED = gr.update(interactive=True), gr.update(interactive=False)


@dataclass
class Clock:
    """Stands in for the module `time`, and goes on only when told to."""

    now: float = 0.0
    while_asleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.while_asleep()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(handlers, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder under which a tab's recordings are written."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def backend(engine: ScriptedEngine) -> ScriptedBackend:
    return ScriptedBackend(engine)


@pytest.fixture
def slot(backend: ScriptedBackend) -> EngineSlot:
    return EngineSlot(lambda name: backend)


class FailingEngine(ScriptedEngine):
    """Fails behind its second step."""

    def generate(self, request: GenerationRequest) -> Generator[GenerationEvent, None, None]:
        events = super().generate(request)
        for _ in range(3):
            yield next(events)
        raise GenerationError("the device is gone")


class HeldEngine(ScriptedEngine):
    """Stays in its first step until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_in_step, self.is_let_go = Event(), Event()

    def _step(self, request: GenerationRequest, num_left: int, elapsed_s: float) -> Step:
        self.is_in_step.set()
        assert self.is_let_go.wait(WAIT_S)
        return super()._step(request, num_left, elapsed_s)


class UnbuiltBackend(ScriptedBackend):
    """Has to build first, and says much meanwhile."""

    messages: tuple[str, ...] = ("fetching", "converting")
    is_built = False

    def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
        for message in self.messages:
            yield BuildProgress(1, 2, "convert", 1.5, message=message)
        self.is_built = True

    def load(self, config: EngineConfig) -> Engine:
        if not self.is_built:
            raise ModelNotBuiltError("build it first")
        return super().load(config)


def shown(values: tuple[Any, ...]) -> Shown:
    return dict(zip(View.names(), values, strict=True))


def changed(view: Shown) -> set[str]:
    return {name for name, value in view.items() if value != STAYS}


def click_run(slot: EngineSlot, session: Session, **changes: Any) -> Generator[Shown, None, None]:
    """Yield what a click on Run shows, from its first answer to its last."""
    yield shown(on_wait(session))
    for values in on_run(slot, session, *values_of(replace(FORM, **changes))):
        yield shown(values)


def click_build(slot: EngineSlot, session: Session, **changes: Any) -> Generator[Shown, None, None]:
    """Yield what a click on Build shows."""
    yield shown(on_wait(session))
    for values in on_build(slot, session, *values_of(replace(FORM, **changes))):
        yield shown(values)


def last(views: Iterable[Shown]) -> Shown:
    *_, view = views
    return view


def stop_after(slot: EngineSlot, session: Session, num_steps: int) -> Shown:
    """Return what is shown in the end of a run that was stopped some steps far."""
    running = click_run(slot, session, max_new_tokens=400)
    with closing(running):
        while (
            session.run is None
            or (session.run.lanes["speculative"].stats.num_steps or 0) < num_steps
        ):
            next(running)
        on_stop(session)
    return shown(on_stopped(session))


def buttons(view: Shown) -> tuple[Any, ...]:
    return tuple(view[name] for name in BUTTONS)


BUTTONS = ("run", "build", "tune", "stop")
BUSY = (DISABLED, DISABLED, DISABLED, ENABLED)
IDLE = (ENABLED, ENABLED, ENABLED, DISABLED)


# -- views


def test_the_values_of_a_view_are_in_the_order_of_its_names():
    assert View(**{name: name for name in View.names()}).values() == View.names()


def test_what_a_view_leaves_out_stays():
    assert set(changed(shown(View(status="done").values()))) == {"status"}


# -- running


def test_a_click_is_answered_before_the_engine_is_free():
    session = Session(is_stopped=True)
    view = shown(on_wait(session))
    assert changed(view) == {"status", *BUTTONS}
    assert "Waiting for the engine" in view["status"]
    assert buttons(view) == BUSY
    assert session == Session()


def test_a_run_streams_its_lane_step_by_step(slot, monkeypatch):
    monkeypatch.setattr(handlers, "UPDATE_INTERVAL_S", 0)
    views = list(click_run(slot, Session(), max_new_tokens=20))
    lanes = [view["speculative"] for view in views if view["speculative"] != STAYS]
    assert len(set(lanes)) == 1 + 20 // TOKENS_PER_STEP  # empty, then a step more each time
    for before, after in pairwise(lanes):
        assert after.startswith(before)


def test_a_comparison_ends_with_everything_it_has_to_show(slot):
    session = Session()
    view = last(click_run(slot, session, baseline=True))
    assert session.run is not None
    assert view["speculative"] == session.run.lanes["speculative"].html != ""
    assert view["baseline"] == session.run.lanes["baseline"].html != ""
    assert "output identical" in view["verdict"]
    assert "your run" in view["verdict"]
    assert "Acceptance rate" in view["figures"]
    assert len(view["latency"].data) == 6
    assert "Done." in view["status"]
    assert buttons(view) == IDLE


def test_a_run_without_a_baseline_leaves_that_lane_empty(slot):
    view = last(click_run(slot, Session()))
    assert view["baseline"] == ""
    assert "no speedup is claimed" in view["verdict"]
    assert len(view["latency"].data) == 3


def test_what_belongs_to_the_run_before_goes_as_the_next_begins(slot):
    session = Session()
    last(click_run(slot, session))
    first = session.run
    started = next(view for view in click_run(slot, session) if view["verdict"] != STAYS)
    assert "Running" in started["verdict"]
    assert (started["speculative"], started["baseline"]) == ("", "")
    assert (started["figures"], started["latency"]) == ("", None)
    assert started["export"] == DISABLED
    assert session.run is not first


def test_a_second_run_counts_from_zero(slot):
    session = Session()
    last(click_run(slot, session, max_new_tokens=40))
    last(click_run(slot, session, max_new_tokens=4))
    assert session.run is not None
    assert [stats.num_output_tokens for stats in session.run.record.stats("speculative")] == [4]


def test_the_engine_stays_loaded_for_the_next_run(slot):
    session = Session()
    statuses = [view["status"] for view in click_run(slot, session)]
    assert any("Loading the models" in status for status in statuses)
    statuses = [view["status"] for view in click_run(slot, session)]
    assert not any("Loading the models" in status for status in statuses)


def test_a_run_builds_first_where_it_must_and_keeps_the_log(engine):
    backend = UnbuiltBackend(engine)
    views = list(click_run(EngineSlot(lambda name: backend), Session()))
    logs = [view["build_log"] for view in views if view["build_log"] != STAYS]
    assert "<pre class='sd-log'>fetching\nconverting</pre>" in logs
    assert "Done." in views[-1]["status"]


@pytest.mark.parametrize(
    ("events", "repeats", "text"),
    [
        ([], 1, "Starting …"),
        ([("baseline", 0, "warm-up")], 1, "Warming up, baseline …"),
        (
            [("baseline", 0, "step"), ("speculative", 0, "warm-up")],
            1,
            "Warming up, speculative …",
        ),
        (
            [("speculative", 0, "warm-up"), ("speculative", 0, "prefill")],
            1,
            "Speculative: reading the prompt …",
        ),
        ([("speculative", 0, "prefill")], 1, "Speculative: reading the prompt …"),
        ([("speculative", 0, "step")], 1, "Speculative: 2 tokens in 1 step, 4.0 tokens/s"),
        (
            [("speculative", 0, "step"), ("baseline", 0, "prefill")],
            1,
            "Baseline: reading the prompt …",
        ),
        ([("baseline", 1, "step")], 3, "Baseline, run 2 of 3: 2 tokens in 1 step, 4.0 tokens/s"),
    ],
)
def test_the_status_says_what_a_run_is_doing(
    events: list[tuple[Side, int, str]], repeats: int, text: str
):
    kinds: dict[str, GenerationEvent] = {
        "prefill": Prefill(3, 2, 0.5),
        "step": Step((Token(5, "a", "accepted"), Token(6, "b", "bonus")), (), 1, 0.1, 0.2, 1.0),
    }
    state = RunState(RunRecord("a prompt", {"repeats": repeats}, {}))
    for side, repeat, kind in events:
        if kind == "warm-up":
            state.apply(WarmUp(side))
            continue
        if kind == "step":
            state.apply(RunEvent(side, repeat, kinds["prefill"]))
        state.apply(RunEvent(side, repeat, kinds[kind]))
    assert running_text(state) == text


def test_the_status_says_for_how_long_a_side_is_warmed_up(monkeypatch):
    clock = Clock(100.0)
    for module in ("state", "views"):
        monkeypatch.setattr(f"specdec_ui.{module}.time", clock)
    state = RunState(RunRecord("a prompt", {}, {}))
    for _ in range(3):
        state.apply(WarmUp("baseline"))
        clock.sleep(65 / 3)
    assert running_text(state) == "Warming up, baseline … 1 min 05 s"

    state.apply(WarmUp("baseline", "loading the models"))
    state.apply(WarmUp("baseline"))
    assert running_text(state) == "Warming up, baseline … 1 min 05 s: loading the models"

    state.apply(WarmUp("speculative"))
    assert "loading" not in running_text(state)


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        pytest.param([(LOADING, 0, None)], "Loading the models …", id="loading"),
        pytest.param([(LOADING, 35, None)], "Loading the models … 35 s", id="loading for long"),
        pytest.param(
            [(LOADING, 0, None), (LOADING, 35, "reading weights"), (LOADING, 95, None)],
            "Loading the models … 1 min 35 s: reading weights",
            id="loading aloud",
        ),
        pytest.param(
            [("convert", 9, "built"), (LOADING, 0, None)],
            "Loading the models …",
            id="loading what was built",
        ),
        pytest.param([(WAITING, 3.2, None)], "Waiting for the engine … 3 s", id="waiting"),
        pytest.param(
            [("convert", 3.2, None)],
            "Building, once: convert (stage 2 of 4), 3 s",
            id="building",
        ),
        pytest.param(
            [("convert", 3, "one"), ("convert", 4, "two"), ("convert", 3725, None)],
            "Building, once: convert (stage 2 of 4), 1 h 02 min 05 s: two",
            id="building aloud, then silent",
        ),
        pytest.param(
            [("fetch", 3, "one"), ("convert", 4, None)],
            "Building, once: convert (stage 2 of 4), 4 s",
            id="building the next thing",
        ),
    ],
)
def test_the_status_says_how_the_engine_is_made_ready(
    progress: list[tuple[str, float, str | None]], text: str
):
    log = BuildLog()
    for name, elapsed_s, message in progress:
        log.apply(BuildProgress(2, 4, name, elapsed_s, message=message))
    assert progress_text(log) == text


# -- throttling


def ticking(
    clock: Clock, items: Iterable[BuildProgress | RunState], *, every_s: float
) -> Iterator[BuildProgress | RunState]:
    for item in items:
        yield item
        clock.now += every_s


def states(count: int) -> list[RunState]:
    return [RunState(RunRecord(f"state {number}", {}, {})) for number in range(count)]


@pytest.mark.parametrize("every_s", [0.001, 0.007, 0.0499])
def test_a_fast_run_is_shown_at_most_twenty_times_a_second(clock, every_s: float):
    seconds = 2
    items = states(int(seconds / every_s))
    passed = list(throttled(ticking(clock, items, every_s=every_s)))
    assert 10 * seconds <= len(passed) <= 20 * seconds + 1
    assert passed[0] is items[0]
    assert passed[-1] is items[-1]


def test_a_slow_run_is_shown_step_by_step(clock):
    items = states(10)
    assert list(throttled(ticking(clock, items, every_s=0.06))) == items


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_last_state_is_shown_once_whatever_the_time(clock, count: int):
    items = states(count)
    passed = list(throttled(iter(items)))
    assert passed == [items[0], items[-1]][:count]


def test_a_build_is_shown_whole(clock):
    progress = [BuildProgress(1, 1, "convert", 0.0, message=str(line)) for line in range(50)]
    assert list(throttled(iter(progress))) == progress


def test_nothing_is_lost_where_a_run_follows_a_build_at_once(clock):
    items: list[BuildProgress | RunState] = [BuildProgress(1, 1, LOADING, 0.0), *states(2)]
    assert list(throttled(iter(items))) == items


def test_a_run_that_outpaces_the_page_still_shows_its_end(slot, clock):
    session = Session()
    views = list(click_run(slot, session, max_new_tokens=4000))
    assert len(views) < 10
    assert session.run is not None
    assert views[-1]["speculative"] == session.run.lanes["speculative"].html
    assert session.run.lanes["speculative"].stats.num_output_tokens == 4000


# -- logs


def chatter(
    clock: Clock, messages: Iterable[str | None], *, every_s: float, name: str = "compile"
) -> Iterator[BuildProgress]:
    for message in messages:
        clock.now += every_s
        yield BuildProgress(1, 2, name, clock.now, message=message)


def test_a_library_that_says_much_is_shown_a_few_times_a_second_and_whole_in_the_end(clock):
    lines = [f"line {number}" for number in range(1000)]
    log, shown_lines = BuildLog(), []
    for item in logged(chatter(clock, lines, every_s=0.002), log):
        assert item is log
        shown_lines.append(len(log.lines))
    assert len(shown_lines) <= 2 + 2 / LOG_INTERVAL_S
    assert shown_lines[-1] == 1000
    assert log.lines == lines


def test_a_download_is_shown_in_bytes():
    log = BuildLog()
    log.apply(BuildProgress(1, 3, "fetch org/x", 2.0, message="org/x: 98 MB to download"))
    log.apply(
        BuildProgress(1, 3, "fetch org/x", 9.0, done_bytes=12 * 10**6, total_bytes=98 * 10**6)
    )
    assert progress_text(log) == "Building, once: fetch org/x (stage 1 of 3), 9 s: 12 of 98 MB"
    assert log.lines == ["org/x: 98 MB to download"]


def test_the_time_goes_on_while_a_stage_is_silent(clock):
    log = BuildLog()
    texts = []
    for item in logged(chatter(clock, ["a line", *[None] * 20], every_s=0.25), log):
        assert item is log
        texts.append(progress_text(log))
    assert texts[0] == "Building, once: compile (stage 1 of 2), 0 s: a line"
    assert texts[-1] == "Building, once: compile (stage 1 of 2), 5 s: a line"
    assert len(dict.fromkeys(texts)) == 6


def test_a_stage_is_shown_as_it_begins_however_short_the_one_before_was(clock):
    progress = [
        item
        for name in ("one", "two", "three")
        for item in chatter(clock, [None, "a line"], every_s=0.001, name=name)
    ]
    log = BuildLog()
    names = [log.latest.name for _ in logged(iter(progress), log) if log.latest is not None]
    assert names == ["one", "two", "three", "three"]


def test_the_last_lines_before_an_error_are_shown_with_it(clock):
    def failing() -> Iterator[BuildProgress]:
        yield from chatter(clock, ["one", "two", "why"], every_s=0.001)
        raise EngineBuildError("it failed")

    log = BuildLog()
    items = logged(failing(), log)
    assert [next(items) for _ in range(2)] == [log, log]
    assert log.lines == ["one", "two", "why"]
    with pytest.raises(EngineBuildError):
        next(items)


# -- stopping


def test_closing_a_run_ends_its_steps_and_keeps_what_came(slot, engine, monkeypatch):
    monkeypatch.setattr(handlers, "UPDATE_INTERVAL_S", 0)
    session = Session()
    with closing(click_run(slot, session, max_new_tokens=400)) as running:
        while engine.num_steps < 5:
            next(running)
    assert engine.num_closed == engine.num_generations == 1
    assert engine.num_steps == 5
    assert session.run is not None
    assert session.run.lanes["speculative"].stats.num_steps == 5


def test_closing_the_stream_of_a_run_closes_the_generation(slot, engine):
    with closing(stream_run(slot, replace(FORM, max_new_tokens=400))) as items:
        while engine.num_steps < 2:
            next(items)
    assert engine.num_closed == 1


def test_stop_shows_the_run_as_far_as_it_came(slot, engine, monkeypatch):
    monkeypatch.setattr(handlers, "UPDATE_INTERVAL_S", 0)
    session = Session()
    view = stop_after(slot, session, 3)
    assert session.run is not None
    assert view["speculative"] == session.run.lanes["speculative"].html != ""
    assert "<h2>Ended early</h2>" in view["verdict"]
    assert "What came so far is kept" in view["status"]
    assert "cancelled" in view["figures"]
    assert len(read_recording(Path(view["export"]["value"])).runs["speculative"][0]) >= 3
    assert buttons(view) == IDLE


def test_stop_is_answered_at_once_and_cannot_be_pressed_twice(slot, monkeypatch):
    monkeypatch.setattr(handlers, "UPDATE_INTERVAL_S", 0)
    session = Session()
    with closing(click_run(slot, session)) as running:
        while session.run is None:
            next(running)
        view = shown(on_stop(session))
    assert changed(view) == {"status", "stop"}
    assert "Stopping after this step …" in view["status"]
    assert view["stop"] == DISABLED


def test_the_end_of_a_stop_waits_for_the_step_that_is_going_on(slot, clock):
    session = Session()
    running = click_run(slot, session, max_new_tokens=400)
    while session.run is None or not session.run.record.runs:
        next(running)
        clock.now += 1

    def end_the_step() -> None:
        if clock.now > stopped_at + 3:
            running.close()

    stopped_at = clock.now
    clock.while_asleep = end_the_step
    on_stop(session)
    view = shown(on_stopped(session))
    assert stopped_at + 3 < clock.now < stopped_at + 4
    assert not session.is_working
    assert view["speculative"] == session.run.lanes["speculative"].html
    assert buttons(view) == IDLE


def test_a_step_that_never_ends_does_not_keep_the_page_for_ever(clock):
    session = Session(is_working=True)
    on_stop(session)
    assert buttons(shown(on_stopped(session))) == IDLE
    assert clock.now == pytest.approx(STOP_TIMEOUT_S, abs=1)


def test_a_run_after_a_stop_waits_for_the_step_that_is_going_on():
    engine = HeldEngine()
    slot = EngineSlot(lambda name: ScriptedBackend(engine))
    stopped = Session()

    def run_until_stopped() -> None:
        with closing(click_run(slot, stopped)) as running:
            while not stopped.is_stopped:
                next(running)

    with ThreadPoolExecutor() as threads:
        first = threads.submit(run_until_stopped)
        try:
            assert engine.is_in_step.wait(WAIT_S)
            on_stop(stopped)
            second = click_run(slot, Session())
            waiting = [next(second) for _ in range(3)]
            assert all("Waiting for the engine" in view["status"] for view in waiting)
            assert engine.num_generations == 1
        finally:
            engine.is_let_go.set()
        first.result(WAIT_S)
        assert "Done." in last(second)["status"]
    assert engine.log == ["1 begins", "1 is closed", "2 begins", "2 is closed"]


def test_a_handler_is_at_work_from_its_start_to_its_end(slot):
    session = Session()
    with closing(click_run(slot, session)) as running:
        next(running)
        assert not session.is_working  # answered, still in the queue
        next(running)
        assert session.is_working
    assert not session.is_working


@pytest.mark.parametrize("click", [click_run, click_build])
@pytest.mark.parametrize("error", [None, ModelLoadError("no weights"), RuntimeError("a bug")])
def test_a_handler_that_ended_is_at_work_no_more_and_frees_the_engine(
    backend, slot, click: Callable[..., Iterator[Shown]], error: Exception | None
):
    backend.error = error
    session = Session()
    with suppress(RuntimeError):
        last(click(slot, session))
    assert not session.is_working
    assert list(slot.acquire()) == []


def test_a_stopped_run_frees_the_engine(slot, monkeypatch):
    monkeypatch.setattr(handlers, "UPDATE_INTERVAL_S", 0)
    stop_after(slot, Session(), 3)
    assert list(slot.acquire()) == []


def test_stop_before_the_first_step_keeps_what_was_shown():
    session = Session()
    on_wait(session)
    on_stop(session)
    view = shown(on_stopped(session))
    assert changed(view) == {"status", *BUTTONS}
    assert "Stopped." in view["status"]
    assert buttons(view) == IDLE


def test_a_run_stopped_while_it_warms_up_has_nothing_to_export(slot):
    view = stop_after(slot, Session(), 0)
    assert "<h2>Ended early</h2>" in view["verdict"]
    assert (view["figures"], view["latency"]) == ("", None)
    assert view["export"] == STAYS


def test_a_run_after_a_stop_is_no_stopped_one(slot, monkeypatch):
    monkeypatch.setattr(handlers, "UPDATE_INTERVAL_S", 0)
    session = Session()
    stop_after(slot, session, 3)
    view = last(click_run(slot, session, baseline=True))
    assert "Stopped" not in view["verdict"]
    assert not session.is_stopped


# -- errors


BAD_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": " "}, "the prompt is empty: type some text"),
    ({"target": None}, "target is &#x27;&#x27;: name a model"),
    ({"max_new_tokens": None}, "max_new_tokens is None: use a whole number from 1"),
    ({"repeats": "x"}, "repeats is &#x27;x&#x27;: use 1 to 9"),
    ({"repeats": 10}, "repeats is 10: use 1 to 9"),
    *(
        ({"num_draft_tokens": value}, f"num_draft_tokens is {escape(repr(value))}: use 1 to 32")
        for value in (0, -1, 1000, "x", None, 2.5)
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), BAD_FORMS)
def test_a_bad_form_is_answered_before_anything_is_loaded(changes, sentence):
    def load_nothing(name: str) -> ScriptedBackend:
        raise AssertionError("a back end was asked for")

    view = last(click_run(EngineSlot(load_nothing), Session(), **changes))
    assert f"role='alert'>{sentence}" in view["status"]
    assert buttons(view) == IDLE


def fail_to_load(backend: ScriptedBackend) -> None:
    backend.error = ModelLoadError("the model has no weights")


def refuse_the_prompt(backend: ScriptedBackend) -> None:
    backend.error = ValueError("the prompt is too long")


@pytest.mark.parametrize(
    ("fail", "sentence"),
    [
        (fail_to_load, "the model has no weights"),
        (refuse_the_prompt, "the prompt is too long"),
    ],
)
def test_an_error_says_what_it_is_and_keeps_what_was_shown(
    backend, slot, fail: Callable[[ScriptedBackend], None], sentence: str
):
    session = Session()
    last(click_run(slot, session))
    fail(backend)
    views = list(click_run(slot, session, target="another target"))
    assert f"role='alert'>{sentence}" in views[-1]["status"]
    assert buttons(views[-1]) == IDLE
    for view in views:
        assert changed(view) <= {"status", *BUTTONS}


def test_the_run_after_an_error_works(backend, slot):
    session = Session()
    fail_to_load(backend)
    last(click_run(slot, session))
    backend.error = None
    assert "Done." in last(click_run(slot, session))["status"]


def test_an_error_on_the_way_keeps_what_came_before_it():
    session = Session()
    engine = FailingEngine()
    view = last(click_run(EngineSlot(lambda name: ScriptedBackend(engine)), session))
    assert "role='alert'>the device is gone" in view["status"]
    assert session.run is not None
    assert session.run.lanes["speculative"].stats.num_steps == 2
    assert view["speculative"] == session.run.lanes["speculative"].html
    assert "no speedup is claimed" in view["verdict"]
    assert len(read_recording(Path(view["export"]["value"])).runs["speculative"][0]) == 3
    assert buttons(view) == IDLE
    assert engine.num_closed == engine.num_generations


@pytest.mark.parametrize("text", HOSTILE)
def test_an_error_that_quotes_markup_stays_text(backend, slot, text: str):
    backend.error = ModelLoadError(text)
    status = last(click_run(slot, Session()))["status"]
    assert status.count("<") == 2  # the line's own tag, opened and closed


def test_a_fault_of_the_program_gives_the_page_back():
    view = shown(on_fault(Session()))
    assert f"role='alert'>{UNEXPECTED}" in view["status"]
    assert changed(view) == {"status", *BUTTONS}
    assert buttons(view) == IDLE


def test_a_fault_in_a_run_keeps_what_came_before_it(slot):
    session = Session()
    last(click_run(slot, session))
    view = shown(on_fault(session))
    assert str(UNEXPECTED) in view["status"]
    assert session.run is not None
    assert view["speculative"] == session.run.lanes["speculative"].html


def test_a_fault_reported_after_a_stop_changes_nothing(slot, monkeypatch):
    monkeypatch.setattr(handlers, "UPDATE_INTERVAL_S", 0)
    session = Session()
    stop_after(slot, session, 2)
    assert changed(shown(on_fault(session))) == set()


# -- building


def test_a_build_streams_its_log_and_loads_nothing(engine, monkeypatch):
    backend = UnbuiltBackend(engine)
    monkeypatch.setattr(handlers, "LOG_INTERVAL_S", 0)
    views = list(click_build(EngineSlot(lambda name: backend), Session()))
    assert [view["build_log"] for view in views[1:-1]] == [
        "<pre class='sd-log'>fetching</pre>",
        "<pre class='sd-log'>fetching\nconverting</pre>",
    ]
    assert "convert (stage 1 of 2), 2 s: fetching" in views[1]["status"]
    assert "The pair is built" in views[-1]["status"]
    assert buttons(views[-1]) == IDLE
    assert engine.num_generations == 0


def test_a_build_needs_no_prompt(slot):
    assert "The pair is built" in last(click_build(slot, Session(), prompt=""))["status"]


def test_a_long_log_shows_its_latest_lines(engine):
    backend = UnbuiltBackend(engine)
    backend.messages = tuple(f"line {number}" for number in range(MAX_LOG_LINES + 50))
    *_, before, _ = click_build(EngineSlot(lambda name: backend), Session())
    lines = before["build_log"].removeprefix("<pre class='sd-log'>").splitlines()
    assert len(lines) == MAX_LOG_LINES
    assert lines[0] == "line 50"


@pytest.mark.parametrize("text", HOSTILE)
def test_a_log_line_stays_text(engine, text: str):
    backend = UnbuiltBackend(engine)
    backend.messages = (text,)
    _, view, _ = click_build(EngineSlot(lambda name: backend), Session())
    assert view["build_log"].count("<") == 2


def test_a_build_that_fails_says_why_and_keeps_its_log(engine):
    class FailingBackend(UnbuiltBackend):
        def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
            yield from super().build(config)
            raise EngineBuildError("the disk is full")

    backend = FailingBackend(engine)
    *_, view = click_build(EngineSlot(lambda name: backend), Session())
    assert "role='alert'>the disk is full" in view["status"]
    assert view["build_log"] == STAYS
    assert buttons(view) == IDLE


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target": ""}, "target is"),
        ({"target": None}, "target is"),
        ({"draft_kind": "model"}, "the draft is empty"),
    ],
)
def test_a_build_of_nothing_says_what_to_name(slot, changes, sentence: str):
    view = last(click_build(slot, Session(), **changes))
    assert f"role='alert'>{sentence}" in view["status"]


def test_closing_a_build_closes_that_of_the_back_end(engine):
    class EndlessBackend(ScriptedBackend):
        is_closed = False

        def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
            try:
                while True:
                    yield BuildProgress(1, 1, "convert", 0.0)
            finally:
                self.is_closed = True

    backend = EndlessBackend(engine)
    with closing(click_build(EngineSlot(lambda name: backend), Session())) as building:
        assert "convert" in [next(building) for _ in range(2)][-1]["status"]
    assert backend.is_closed


# -- exporting


def export_of(view: Shown) -> Path:
    assert view["export"]["interactive"]
    return Path(view["export"]["value"])


def test_the_export_is_the_run_as_a_recording(slot):
    session = Session()
    path = export_of(last(click_run(slot, session, baseline=True)))
    assert session.run is not None
    assert path.suffix == ".jsonl"
    assert read_recording(path) == session.run.record


def test_the_export_says_what_the_run_was_made_with(slot):
    path = export_of(last(click_run(slot, Session(), seed=7, chat_template=False)))
    settings = read_recording(path).settings
    assert settings["target"] == "scripted target"
    assert (settings["seed"], settings["chat_template"], settings["repeats"]) == (7, False, 1)


def test_a_tab_keeps_one_file_the_latest(slot, exports):
    session = Session()
    first = export_of(last(click_run(slot, session, max_new_tokens=40)))
    second = export_of(last(click_run(slot, session, max_new_tokens=4)))
    assert first == second
    assert [path for path in exports.rglob("*") if path.is_file()] == [second]
    assert read_recording(second).settings["max_new_tokens"] == 4


def test_two_tabs_do_not_share_a_file(slot):
    paths = {export_of(last(click_run(slot, Session()))) for _ in range(2)}
    assert len(paths) == 2


def test_a_closed_tab_leaves_nothing_on_disk(slot, exports):
    session = Session()
    last(click_run(slot, session))
    forget(session)
    assert list(exports.iterdir()) == []


def test_a_tab_that_never_ran_has_nothing_to_forget(exports):
    forget(Session())
    assert list(exports.iterdir()) == []


def test_a_folder_that_was_cleaned_away_is_made_again(slot):
    session = Session()
    last(click_run(slot, session))
    forget(session)
    assert export_of(last(click_run(slot, session))).is_file()


def test_a_full_disk_takes_the_export_and_not_the_run(slot):
    session = Session()
    with largest_file(10):
        view = last(click_run(slot, session, baseline=True))
    assert "role='alert'>The run cannot be exported" in view["status"]
    assert view["export"] == DISABLED
    assert "output identical" in view["verdict"]
    assert buttons(view) == IDLE


def test_a_disk_without_room_for_a_folder_takes_the_export_and_not_the_run(slot, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    view = last(click_run(slot, Session()))
    assert "role='alert'>The run cannot be exported" in view["status"]
    assert buttons(view) == IDLE
