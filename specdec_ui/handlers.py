"""What the page's events do: component values in, component values out, errors as sentences.

Work is a plain generator: closing it, by Stop, by a client that cancels or by a closed tab, closes
the engine's stream before its next step.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, TypeVar

import gradio as gr

from engines import (
    BuildProgress,
    EngineConfig,
    EngineError,
    EngineSlot,
    RunRecord,
    create_backend,
    distill,
    run,
    settings_of,
)
from specdec_ui.state import (
    TENSORRT_LLM,
    BuildLog,
    RunForm,
    RunState,
    Session,
    TuneForm,
    TuneState,
    tensorrt_options,
)
from specdec_ui.summary import backend_note_html, status_html
from specdec_ui.views import (
    USER_ERRORS,
    View,
    busy_view,
    commands_view,
    curve_update,
    error_view,
    finished_view,
    idle_view,
    progress_view,
    running_view,
    started_view,
    tune_started_view,
    tune_stopped_view,
    tuned_view,
    tuning_view,
)

UPDATE_INTERVAL_S = 0.05  # at most 20 updates a second
LOG_INTERVAL_S = 0.2  # of a log: it is sent whole each time
CURVE_INTERVAL_S = 1.0  # of a tuning's curve: likewise
STOP_TIMEOUT_S = 600.0  # the longest pass or load that Stop waits for
UNEXPECTED = EngineError("something unexpected failed; the log on the terminal says what")

Item = TypeVar("Item")


def stream_run(slot: EngineSlot, form: RunForm) -> Generator[BuildProgress | RunState, None, None]:
    """Yield how the engine is made ready, then the run after each of its events.

    It is always the same `RunState` that comes, one event further on.

    Raises:
        ValueError: A field of the form is unusable.
        EngineError: The engine cannot be built or loaded, or fails.
    """
    form.check()
    yield from slot.acquire()
    try:
        engine = yield from slot.ensure(form.config())
        request = form.request(engine.encode(form.prompt, chat_template=form.chat_template))
        repeats = form.num_runs()
        settings = settings_of(engine, request, chat_template=form.chat_template, repeats=repeats)
        state = RunState(RunRecord(form.prompt, settings))
        yield state
        with closing(run(engine, request, baseline=form.baseline, repeats=repeats)) as items:
            for item in items:
                state.apply(item)
                yield state
    finally:
        slot.release()


def stream_tune(
    slot: EngineSlot, spec: distill.DistillSpec
) -> Generator[BuildProgress | distill.DistillProgress | None, None, None]:
    """Yield how the target is built, then the reports of the tuning, and None while it is silent.

    Raises:
        EngineError: The target cannot be built, or the tuning failed.
    """
    distill.check_output(spec.folder, resume=spec.resume)
    with closing(slot.build(EngineConfig("transformers", spec.target))) as progress:
        yield from progress
    yield from slot.acquire()
    try:
        slot.close()  # the tuning needs the memory
        with closing(distill.distill(spec)) as reports:
            yield from reports
    finally:
        slot.release()


def throttled(
    items: Iterator[BuildProgress | RunState],
) -> Generator[BuildProgress | RunState, None, None]:
    """Yield a run's states at most 20 times a second, first and last always, and all of a build.

    A state supersedes the one before, so those that come too soon are passed over. Nothing waits.
    """
    shown_at, pending = float("-inf"), None
    for item in items:
        if isinstance(item, RunState):
            if time.monotonic() - shown_at < UPDATE_INTERVAL_S:
                pending = item
                continue
            shown_at, pending = time.monotonic(), None
        yield item
    if pending is not None:
        yield pending


def logged(
    items: Iterator[BuildProgress | Item], log: BuildLog
) -> Generator[BuildLog | Item, None, None]:
    """Yield the log in place of a build's reports: a few times a second and with each new stage.

    A library may say thousands of lines. None is lost: the last of them come with the end or the
    error.
    """
    shown_at, is_pending = float("-inf"), False
    try:
        for item in items:
            if isinstance(item, BuildProgress):
                is_new = log.apply(item)
                is_pending = not is_new and time.monotonic() - shown_at < LOG_INTERVAL_S
                if not is_pending:
                    shown_at = time.monotonic()
                    yield log
                continue
            if is_pending:
                is_pending = False
                yield log
            yield item
    except USER_ERRORS:
        if is_pending:
            yield log
        raise
    if is_pending:
        yield log


def on_wait(session: Session) -> tuple[Any, ...]:
    """Answer a click at once: the engine may be busy with somebody else's run."""
    session.run, session.tuning, session.is_stopped = None, None, False
    return busy_view("Waiting for the engine …").values()


def on_run(slot: EngineSlot, session: Session, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Run what the form says, streaming both lanes, then show what came out."""
    yield from at_work(session, run_views(slot, session, RunForm.read(*values)))


def on_build(slot: EngineSlot, session: Session, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Build the pair into the store, streaming the log."""
    yield from at_work(session, build_views(slot, RunForm.read(*values)))


def on_tune(slot: EngineSlot, session: Session, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Make a draft for the target, streaming the log and the curve, and put it into the pair."""
    yield from at_work(session, tune_views(slot, session, TuneForm(*values)))


def at_work(session: Session, views: Generator[View, None, None]) -> Iterator[tuple[Any, ...]]:
    """Yield the values of a handler's views; an error for the user becomes the last of them."""
    session.is_working = True
    try:
        with closing(views):
            for view in views:
                yield view.values()
    except USER_ERRORS as exc:
        yield error_view(exc, session).values()
    finally:
        session.is_working = False


def run_views(slot: EngineSlot, session: Session, form: RunForm) -> Generator[View, None, None]:
    """Yield what a run shows, step by step."""
    with (
        closing(stream_run(slot, form)) as items,
        closing(throttled(items)) as passed,
        closing(logged(passed, BuildLog())) as shown,
    ):
        for item in shown:
            if isinstance(item, BuildLog):
                yield progress_view(item)
            elif session.run is None:
                session.run = item
                yield started_view(item)
            else:
                yield running_view(item)
    assert session.run is not None
    yield finished_view(session, session.run, is_stopped=False)
    if form.backend == TENSORRT_LLM:
        yield commands_view(form)


def build_views(slot: EngineSlot, form: RunForm) -> Generator[View, None, None]:
    """Yield what a build shows, line by line."""
    with (
        closing(slot.build(form.config())) as progress,
        closing(logged(progress, BuildLog())) as shown,
    ):
        for log in shown:
            assert isinstance(log, BuildLog)
            yield progress_view(log)
    done = idle_view()
    done.status = status_html("The pair is built. Run starts it.")
    yield done
    if form.backend == TENSORRT_LLM:
        yield commands_view(form)


def tune_views(slot: EngineSlot, session: Session, form: TuneForm) -> Generator[View, None, None]:
    """Yield what a tuning shows, report by report. Its silence is an empty view."""
    state = session.tuning = TuneState(form.spec())
    drawn_at, num_drawn = float("-inf"), 0
    yield tune_started_view(state)
    with (
        closing(stream_tune(slot, state.spec)) as items,
        closing(logged(items, BuildLog())) as shown,
    ):
        for item in shown:
            if isinstance(item, BuildLog):
                yield progress_view(item)
                continue
            view = View() if item is None else tuning_view(state, item)
            if state.num_points > num_drawn and time.monotonic() - drawn_at >= CURVE_INTERVAL_S:
                drawn_at, num_drawn = time.monotonic(), state.num_points
                view.curve = curve_update(state)
            yield view
    yield tuned_view(state)


def on_stop(session: Session) -> tuple[Any, ...]:
    """Answer Stop at once. Gradio closes the handler at work beside this."""
    session.is_stopped = True
    return View(
        status=status_html("Stopping after this step …"), stop=gr.update(interactive=False)
    ).values()


def on_stopped(session: Session) -> tuple[Any, ...]:
    """Show the run as far as it came, once its handler has really ended."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while session.is_working and time.monotonic() < deadline:
        time.sleep(UPDATE_INTERVAL_S)
    if session.tuning is not None:
        state = session.tuning
        return (tuned_view(state) if state.is_done else tune_stopped_view(state)).values()
    if session.run is not None:
        return finished_view(session, session.run, is_stopped=True).values()
    view = idle_view()
    view.status = status_html("Stopped.")
    return view.values()


def on_fault(session: Session) -> tuple[Any, ...]:
    """Give the page back after a fault of this program, which stands in its log.

    Gradio reports a handler that Stop has closed as failed, too; that one is not answered here.
    """
    return (View() if session.is_stopped else error_view(UNEXPECTED, session)).values()


def on_probe(backend: str, python: str) -> str:
    """Say whether a back end can be used here. This may start a child process and take long."""
    options = tensorrt_options({"python": python} if backend == TENSORRT_LLM else {})
    found = create_backend(backend).probe(EngineConfig(backend=backend, tensorrt_llm=options))
    if not found.usable:
        return backend_note_html(f"Not usable here: {found.detail}.", is_error=True)
    return backend_note_html(f"Usable here: {found.detail}; {', '.join(found.devices)}.")


def forget(session: Session) -> None:
    """Delete what a closed tab leaves on disk."""
    if session.export_folder is not None:
        shutil.rmtree(session.export_folder, ignore_errors=True)
