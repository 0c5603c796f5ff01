"""What the page's events do: component values in, component values out, errors as sentences.

Work is a plain generator: closing it, by Stop, by a client that cancels or by a closed tab, closes
the engine's stream before its next step.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, fields
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from engines import (
    LOADING,
    WAITING,
    BuildProgress,
    EngineError,
    EngineSlot,
    RunRecord,
    run,
    settings_of,
    write_recording,
)
from specdec_ui.charts import latency_figure
from specdec_ui.state import RunForm, RunState, Session
from specdec_ui.summary import figures_html, number, status_html, verdict_html
from specdec_ui.theme import SIDE_NAMES

UPDATE_INTERVAL_S = 0.05  # at most 20 updates a second
MAX_LOG_LINES = 200
STOP_TIMEOUT_S = 600.0  # the longest pass or load that Stop waits for
USER_ERRORS = (EngineError, ValueError)
UNEXPECTED = EngineError("something unexpected failed; the log on the terminal says what")


@dataclass(slots=True)
class View:
    """New values of the page's outputs, in the order of `names`; what is left out stays."""

    verdict: Any = field(default_factory=gr.skip)
    status: Any = field(default_factory=gr.skip)
    speculative: Any = field(default_factory=gr.skip)
    baseline: Any = field(default_factory=gr.skip)
    latency: Any = field(default_factory=gr.skip)
    figures: Any = field(default_factory=gr.skip)
    build_log: Any = field(default_factory=gr.skip)
    export: Any = field(default_factory=gr.skip)
    run: Any = field(default_factory=gr.skip)
    build: Any = field(default_factory=gr.skip)
    stop: Any = field(default_factory=gr.skip)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(item.name for item in fields(cls))

    def values(self) -> tuple[Any, ...]:
        """Return the values as Gradio takes them."""
        return tuple(getattr(self, name) for name in self.names())


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


def on_wait(session: Session) -> tuple[Any, ...]:
    """Answer a click at once: the engine may be busy with somebody else's run."""
    session.run, session.is_stopped = None, False
    return busy_view("Waiting for the engine …").values()


def on_run(slot: EngineSlot, session: Session, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Run what the form says, streaming both lanes, then show what came out."""
    log: list[str] = []
    session.is_working = True
    try:
        with (
            closing(stream_run(slot, RunForm(*values))) as items,
            closing(throttled(items)) as shown,
        ):
            for item in shown:
                if isinstance(item, BuildProgress):
                    yield progress_view(item, log).values()
                elif session.run is None:
                    session.run = item
                    yield started_view(item).values()
                else:
                    yield running_view(item).values()
        assert session.run is not None
        yield finished_view(session, session.run, is_stopped=False).values()
    except USER_ERRORS as exc:
        yield error_view(exc, session).values()
    finally:
        session.is_working = False


def on_build(slot: EngineSlot, session: Session, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Build the pair into the store, streaming the log."""
    log: list[str] = []
    session.is_working = True
    try:
        with closing(slot.build(RunForm(*values).config())) as progress:
            for item in progress:
                yield progress_view(item, log).values()
        done = idle_view()
        done.status = status_html("The pair is built. Run starts it.")
        yield done.values()
    except USER_ERRORS as exc:
        yield error_view(exc, session).values()
    finally:
        session.is_working = False


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
    if session.run is None:
        view = idle_view()
        view.status = status_html("Stopped.")
        return view.values()
    return finished_view(session, session.run, is_stopped=True).values()


def on_fault(session: Session) -> tuple[Any, ...]:
    """Give the page back after a fault of this program, which stands in its log.

    Gradio reports a handler that Stop has closed as failed, too; that one is not answered here.
    """
    return (View() if session.is_stopped else error_view(UNEXPECTED, session)).values()


def forget(session: Session) -> None:
    """Delete what a closed tab leaves on disk."""
    if session.export_folder is not None:
        shutil.rmtree(session.export_folder, ignore_errors=True)


# -- views: which outputs change, and to what


def idle_view() -> View:
    """Return the buttons as they are while nothing runs."""
    return View(
        run=gr.update(interactive=True),
        build=gr.update(interactive=True),
        stop=gr.update(interactive=False),
    )


def busy_view(text: str) -> View:
    """Return the page as something begins. What was shown stays until there is something new."""
    return View(
        status=status_html(text),
        run=gr.update(interactive=False),
        build=gr.update(interactive=False),
        stop=gr.update(interactive=True),
    )


def progress_view(progress: BuildProgress, log: list[str]) -> View:
    """Return where a build stands, its log included."""
    if progress.message:
        log.append(progress.message)
    lines = "\n".join(log[-MAX_LOG_LINES:])
    return View(
        status=status_html(progress_text(progress, log)),
        build_log=f"<pre class='sd-log'>{escape(lines)}</pre>" if log else gr.skip(),
    )


def progress_text(progress: BuildProgress, log: list[str]) -> str:
    """Return where a build stands in one line, with the last thing it said."""
    if progress.name == LOADING:
        return "Loading the models …"
    if progress.name == WAITING:
        return f"Waiting for the engine … {progress.elapsed_s:.0f} s"
    stage = f"stage {progress.stage} of {progress.num_stages}"
    said = f": {log[-1]}" if log else ""
    return f"Building, once: {progress.name} ({stage}), {progress.elapsed_s:.0f} s{said}"


def started_view(state: RunState) -> View:
    """Return the page as a run begins: what belongs to the run before goes."""
    view = running_view(state)
    view.verdict = verdict_html(state.record, whose="your run")
    view.figures = ""
    view.latency = None
    view.export = gr.update(interactive=False)
    return view


def running_view(state: RunState) -> View:
    """Return the lanes of a run and a line about it."""
    return View(
        status=status_html(running_text(state)),
        speculative=state.lanes["speculative"].html,
        baseline=state.lanes["baseline"].html,
    )


def running_text(state: RunState) -> str:
    """Return what a run is doing right now."""
    if state.current is None:
        return "Warming up …"
    stats = state.lanes[state.current].stats
    if not stats.num_steps:
        return f"{SIDE_NAMES[state.current]}: reading the prompt …"
    repeats = state.record.settings.get("repeats", 1)
    turn = f", run {state.lanes[state.current].repeat + 1} of {repeats}" if repeats > 1 else ""
    steps = "1 step" if stats.num_steps == 1 else f"{stats.num_steps} steps"
    return (
        f"{SIDE_NAMES[state.current]}{turn}: {stats.num_output_tokens} tokens in {steps}, "
        f"{number(stats.tokens_per_second, 1)} tokens/s"
    )


def finished_view(session: Session, state: RunState, *, is_stopped: bool) -> View:
    """Return everything that a run shows in the end, also where it was stopped before."""
    view = idle_view()
    view.status = status_html("Stopped. What came so far is kept." if is_stopped else "Done.")
    view.speculative = state.lanes["speculative"].html
    view.baseline = state.lanes["baseline"].html
    view.verdict = verdict_html(state.record, whose="your run", is_stopped=is_stopped)
    view.figures = figures_html(state.record)
    view.latency = latency_figure(state.record)
    if state.record.runs:
        try:
            view.export = gr.update(value=export_file(session, state.record), interactive=True)
        except (EngineError, OSError) as exc:  # a full disk takes the file, not the page
            view.export = gr.update(interactive=False)
            view.status = status_html(f"The run cannot be exported: {exc}", is_error=True)
    return view


def error_view(exc: Exception, session: Session) -> View:
    """Return what went wrong; whatever was produced before stays."""
    if session.run is None:
        view = idle_view()
    else:
        view = finished_view(session, session.run, is_stopped=True)
    view.status = status_html(str(exc), is_error=True)
    return view


def export_file(session: Session, record: RunRecord) -> str:
    """Write a run as a recording, over the tab's last one, and return its path."""
    if session.export_folder is None or not Path(session.export_folder).is_dir():
        session.export_folder = tempfile.mkdtemp(prefix="specdec-")
    path = Path(session.export_folder) / "specdec-run.jsonl"
    write_recording(record, path)
    return str(path)
