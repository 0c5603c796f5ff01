"""What the page's events do: component values in, component values out, errors as sentences.

Work is a plain generator: closing it, by Stop, by a client that cancels or by a closed tab, closes
the engine's stream before its next step.
"""

from __future__ import annotations

import json
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
    EngineConfig,
    EngineError,
    EngineSlot,
    RunRecord,
    distill,
    run,
    settings_of,
    write_recording,
)
from specdec_ui.charts import latency_figure, tuning_figure
from specdec_ui.state import RunForm, RunState, Session, TuneForm, TuneState
from specdec_ui.summary import (
    PHASES,
    duration,
    figures_html,
    number,
    percent,
    phases_html,
    status_html,
    verdict_html,
)
from specdec_ui.theme import SIDE_NAMES

UPDATE_INTERVAL_S = 0.05  # at most 20 updates a second
CURVE_INTERVAL_S = 1.0  # of a tuning's curve: it is sent whole each time
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
    phases: Any = field(default_factory=gr.skip)
    tune_log: Any = field(default_factory=gr.skip)
    curve: Any = field(default_factory=gr.skip)
    export: Any = field(default_factory=gr.skip)
    run: Any = field(default_factory=gr.skip)
    build: Any = field(default_factory=gr.skip)
    tune: Any = field(default_factory=gr.skip)
    stop: Any = field(default_factory=gr.skip)
    # Controls that a tuning fills in
    draft_kind: Any = field(default_factory=gr.skip)
    draft: Any = field(default_factory=gr.skip)
    output: Any = field(default_factory=gr.skip)
    resume: Any = field(default_factory=gr.skip)

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


def stream_tune(
    slot: EngineSlot, spec: distill.DistillSpec
) -> Generator[BuildProgress | distill.DistillProgress | None, None, None]:
    """Yield how the target is built, then the reports of the tuning, and None while it is silent.

    Raises:
        EngineError: The target cannot be built, or the tuning failed.
    """
    distill.check_output(spec.folder, resume=spec.resume)
    with closing(slot.build(EngineConfig(target=spec.target))) as progress:
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


def on_wait(session: Session) -> tuple[Any, ...]:
    """Answer a click at once: the engine may be busy with somebody else's run."""
    session.run, session.tuning, session.is_stopped = None, None, False
    return busy_view("Waiting for the engine …").values()


def on_run(slot: EngineSlot, session: Session, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Run what the form says, streaming both lanes, then show what came out."""
    yield from at_work(session, run_views(slot, session, RunForm(*values)))


def on_build(slot: EngineSlot, session: Session, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Build the pair into the store, streaming the log."""
    yield from at_work(session, build_views(slot, RunForm(*values)))


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
    log: list[str] = []
    with closing(stream_run(slot, form)) as items, closing(throttled(items)) as shown:
        for item in shown:
            if isinstance(item, BuildProgress):
                yield progress_view(item, log)
            elif session.run is None:
                session.run = item
                yield started_view(item)
            else:
                yield running_view(item)
    assert session.run is not None
    yield finished_view(session, session.run, is_stopped=False)


def build_views(slot: EngineSlot, form: RunForm) -> Generator[View, None, None]:
    """Yield what a build shows, line by line."""
    log: list[str] = []
    with closing(slot.build(form.config())) as progress:
        for item in progress:
            yield progress_view(item, log)
    done = idle_view()
    done.status = status_html("The pair is built. Run starts it.")
    yield done


def tune_views(slot: EngineSlot, session: Session, form: TuneForm) -> Generator[View, None, None]:
    """Yield what a tuning shows, report by report. Its silence is an empty view."""
    log: list[str] = []
    state = session.tuning = TuneState(form.spec())
    drawn_at, num_drawn = float("-inf"), 0
    yield tune_started_view(state)
    with closing(stream_tune(slot, state.spec)) as items:
        for item in items:
            if isinstance(item, BuildProgress):
                yield progress_view(item, log)
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
        tune=gr.update(interactive=True),
        stop=gr.update(interactive=False),
    )


def busy_view(text: str) -> View:
    """Return the page as something begins. What was shown stays until there is something new."""
    return View(
        status=status_html(text),
        run=gr.update(interactive=False),
        build=gr.update(interactive=False),
        tune=gr.update(interactive=False),
        stop=gr.update(interactive=True),
    )


def progress_view(progress: BuildProgress, log: list[str]) -> View:
    """Return where a build stands, its log included."""
    if progress.message:
        log.append(progress.message)
    return View(
        status=status_html(progress_text(progress, log)),
        build_log=log_html(log) if log else gr.skip(),
    )


def log_html(log: list[str]) -> str:
    """Return the latest lines of a log."""
    lines = "\n".join(log[-MAX_LOG_LINES:])
    return f"<pre class='sd-log'>{escape(lines)}</pre>"


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
    if stats.num_steps == 0:
        return f"{SIDE_NAMES[state.current]}: reading the prompt …"
    repeats = state.record.settings.get("repeats", 1)
    turn = f", run {state.lanes[state.current].repeat + 1} of {repeats}" if repeats > 1 else ""
    steps = " in 1 step" if stats.num_steps == 1 else f" in {stats.num_steps} steps"
    if stats.num_steps is None:  # not reported
        steps = ""
    return (
        f"{SIDE_NAMES[state.current]}{turn}: {stats.num_output_tokens} tokens{steps}, "
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
    text = str(exc)
    if session.run is not None:
        view = finished_view(session, session.run, is_stopped=True)
    elif session.tuning is not None and session.tuning.has_begun:
        view = tune_stopped_view(session.tuning)
        text = f"{text}. {kept_text(session.tuning)}"
    else:
        view = idle_view()
    view.status = status_html(text, is_error=True)
    return view


def tune_started_view(state: TuneState) -> View:
    """Return the page as a tuning begins: what belongs to the one before goes."""
    return View(
        status=status_html(tuning_text(state)),
        phases=phases_html(state.phase),
        tune_log="",
        curve=gr.update(value=None, visible=False),
    )


def tuning_view(state: TuneState, report: distill.DistillProgress) -> View:
    """Take in a report and return what it changes, the curve left out."""
    is_first = not state.has_begun
    state.apply(report)
    view = View(
        status=status_html(tuning_text(state)), phases=phases_html(state.phase, report_text(report))
    )
    if report.message:
        view.tune_log = log_html(state.log)
    if is_first:
        view.output = state.spec.output  # where it was left empty, Resume needs it
    return view


def tuning_text(state: TuneState) -> str:
    """Return where a tuning stands in one line."""
    phase = f"phase {list(PHASES).index(state.phase) + 1} of {len(PHASES)}"
    how_far = "…" if state.latest is None else report_text(state.latest)
    return f"Tuning, {phase}, {PHASES[state.phase]}: {how_far}"


def report_text(report: distill.DistillProgress) -> str:
    """Return how far a phase of a tuning is."""
    parts = []
    if report.fraction is not None:
        parts.append(percent(report.fraction))
    if report.num_tokens:
        parts.append(f"{report.num_tokens:,} tokens")
    if report.tokens_per_second is not None:
        parts.append(f"{number(report.tokens_per_second, 0)} tokens/s")
    if report.loss is not None:
        parts.append(f"loss {number(report.loss, 2)}")
    if report.remaining_s:
        parts.append(f"about {duration(report.remaining_s)} left")
    return ", ".join(parts) or "…"


def tuned_view(state: TuneState) -> View:
    """Return the page after a tuning that ran to its end: the pair has the new draft."""
    record = json.loads((state.spec.folder / distill.RECORD).read_text(encoding="utf-8"))
    result = record["evaluate"]["results"]["greedy"]["all"]
    length = result["num_draft_tokens"]["4"]["mean_acceptance_length"]
    folder = str(state.spec.folder.resolve())
    view = tune_ended_view(state)
    view.status = status_html(
        f"The draft is made: greedy agreement {percent(result['agreement'])}, mean acceptance "
        f"length {number(length, 2)} at 4 draft tokens. It is in {folder}, and the pair above has "
        "it now: Run uses it."
    )
    view.draft_kind = "model"
    view.draft = gr.update(value=folder, visible=True)
    view.output, view.resume = "", False  # the next one gets a folder of its own
    return view


def tune_stopped_view(state: TuneState) -> View:
    """Return the page after a tuning that ended early."""
    view = tune_ended_view(state)
    if state.has_begun:
        view.status = status_html(f"Stopped. {kept_text(state)}")
    else:
        view.status = status_html("Stopped before the tuning began. Nothing was changed.")
    return view


def tune_ended_view(state: TuneState) -> View:
    """Return what a tuning shows in the end, however it ended."""
    view = idle_view()
    if state.has_begun:
        view.phases = phases_html("" if state.is_done else state.phase)
        view.tune_log = log_html(state.log)
    if state.num_points:
        view.curve = curve_update(state)
    return view


def kept_text(state: TuneState) -> str:
    """Return what an interrupted tuning leaves, and how to go on."""
    folder = state.spec.folder.resolve()
    text = f"What is done so far is kept in {folder}: tick Resume and press Tune to go on."
    if (folder / "model.safetensors").is_file():
        text += (
            " The best draft so far is there, too: choose the draft kind 'model' and name that "
            "folder as the draft model to run it."
        )
    return text


def curve_update(state: TuneState) -> Any:
    """Return the curve as it is now, put into view."""
    return gr.update(value=tuning_figure(state), visible=True)


def export_file(session: Session, record: RunRecord) -> str:
    """Write a run as a recording, over the tab's last one, and return its path."""
    if session.export_folder is None or not Path(session.export_folder).is_dir():
        session.export_folder = tempfile.mkdtemp(prefix="specdec-")
    path = Path(session.export_folder) / "specdec-run.jsonl"
    write_recording(record, path)
    return str(path)
