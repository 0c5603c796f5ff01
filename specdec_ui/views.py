"""Which outputs of the page change, and to what: states and reports in, component values out."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from engines import (
    LOADING,
    WAITING,
    EngineError,
    RunRecord,
    bytes_text,
    distill,
    take_away,
    write_recording,
)
from specdec_ui.charts import latency_figure, tuning_figure
from specdec_ui.state import BuildLog, RunForm, RunState, Session, TuneState
from specdec_ui.summary import (
    PHASES,
    clock,
    commands_markdown,
    duration,
    figures_html,
    markdown_text,
    number,
    percent,
    phases_html,
    published_html,
    status_html,
    verdict_html,
)
from specdec_ui.theme import SIDE_NAMES

MAX_LOG_LINES = 200
USER_ERRORS = (EngineError, ValueError)


@dataclass(slots=True)
class View:
    """New values of the page's outputs, in the order of `names`; what is left out stays."""

    verdict: Any = field(default_factory=gr.skip)
    status: Any = field(default_factory=gr.skip)
    speculative: Any = field(default_factory=gr.skip)
    baseline: Any = field(default_factory=gr.skip)
    latency: Any = field(default_factory=gr.skip)
    figures: Any = field(default_factory=gr.skip)
    commands: Any = field(default_factory=gr.skip)
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


def progress_view(log: BuildLog) -> View:
    """Return where a build or a load stands, its log included."""
    return View(
        status=status_html(progress_text(log)),
        build_log=log_html(log.lines) if log.lines else gr.skip(),
    )


def log_html(log: Sequence[str]) -> str:
    """Return the latest lines of a log."""
    lines = "\n".join(log[-MAX_LOG_LINES:])
    return f"<pre class='sd-log'>{escape(lines)}</pre>"


def progress_text(log: BuildLog) -> str:
    """Return where a build or a load stands in one line, with the last thing it said."""
    progress = log.latest
    assert progress is not None
    elapsed = clock(progress.elapsed_s)
    if progress.name == WAITING:
        return f"Waiting for the engine … {elapsed}"
    said = f": {log.said}" if log.said else ""
    if progress.name == LOADING:
        return "Loading the models …" + (f" {elapsed}{said}" if progress.elapsed_s >= 1 else said)
    if progress.total_bytes:
        said = f": {bytes_text(progress)}"
    stage = f"stage {progress.stage} of {progress.num_stages}"
    return f"Building, once: {progress.name} ({stage}), {elapsed}{said}"


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
    if state.warming_up is not None:
        seconds = time.monotonic() - state.warming_since
        elapsed = f" {clock(seconds)}" if seconds >= 1 else ""
        said = f": {state.warming_line}" if state.warming_line else ""
        return f"Warming up, {SIDE_NAMES[state.warming_up].lower()} …{elapsed}{said}"
    if state.current is None:
        return "Starting …"
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
    view.figures = figures_html(state.record) + published_html(state.record)
    view.latency = latency_figure(state.record)
    if state.record.runs:
        try:
            view.export = gr.update(value=export_file(session, state.record), interactive=True)
        except (EngineError, OSError) as exc:  # a full disk takes the file, not the page
            view.export = gr.update(interactive=False)
            view.status = status_html(f"The run cannot be exported: {exc}", is_error=True)
    return view


def commands_view(form: RunForm) -> View:
    """Return the commands for what was built or run. Where there are none, the page says why."""
    try:
        num_draft_tokens = form.request((0,)).num_draft_tokens
        snippets = take_away(form.config(), form.draft_kind, num_draft_tokens)
    except USER_ERRORS as exc:
        return View(commands=f"They cannot be written: {markdown_text(str(exc))}")
    return View(commands=commands_markdown(snippets, form.draft_kind, num_draft_tokens))


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
