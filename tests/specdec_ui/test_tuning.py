"""Tuning without a page: what a click on Tune shows, keeps and ends, on a tiny target."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines import BuildProgress, EngineConfig, EngineSlot
from engines.distill import RECORD, DistillProgress, DistillSpec
from engines.errors import EngineBuildError
from specdec_ui.handlers import on_run, on_stop, on_stopped, on_tune, on_wait
from specdec_ui.state import Session, TuneForm, TuneState
from specdec_ui.summary import PHASES
from specdec_ui.views import error_view, tuning_text
from tests.conftest import write_tiny_model
from tests.specdec_ui import test_handlers
from tests.specdec_ui.conftest import ScriptedBackend, ScriptedEngine, values_of
from tests.specdec_ui.test_handlers import BUSY, IDLE, STAYS, Shown, buttons, last, shown


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuning") / "tiny-target"
    return write_tiny_model(folder, seed=1, num_layers=4)


@pytest.fixture(scope="module", autouse=True)
def few_threads_of_children() -> Iterator[None]:
    """Let a child run its tiny models on one thread too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def form_of(target: Path, output: Path, **changes: Any) -> TuneForm:
    form = TuneForm(
        target=str(target),
        num_layers=2,
        minutes=0.1,
        output=str(output),
        prompts="",
        seed=0,
        resume=False,
    )
    return replace(form, **changes)


def click_tune(slot: EngineSlot, session: Session, form: TuneForm) -> Generator[Shown, None, None]:
    """Yield what a click on Tune shows, from its first answer to its last."""
    yield shown(on_wait(session))
    for values in on_tune(slot, session, *astuple(form)):
        yield shown(values)


def stop_when(
    slot: EngineSlot, form: TuneForm, is_far_enough: Callable[[TuneState], bool]
) -> Shown:
    """Return what is shown in the end of a tuning that was stopped on its way."""
    session = Session()
    with closing(click_tune(slot, session, form)) as tuning:
        while session.tuning is None or not is_far_enough(session.tuning):
            next(tuning)
        on_stop(session)
    return shown(on_stopped(session))


def run_with(slot: EngineSlot, session: Session, target: Path, draft: Path) -> Shown:
    """Return what is shown in the end of a run of a target with a draft model."""
    form = replace(
        test_handlers.FORM,
        backend="transformers",
        target=str(target),
        draft_kind="model",
        draft=str(draft),
    )
    return last(map(shown, on_run(slot, session, *values_of(form))))


def workers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "engines.distill.worker" in " ".join(child.cmdline())
    ]


@dataclass(frozen=True)
class Finished:
    """A tuning that ran to its end."""

    views: list[Shown]
    session: Session
    slot: EngineSlot
    folder: Path

    def changes(self, name: str) -> list[Any]:
        return [view[name] for view in self.views if view[name] != STAYS]


@pytest.fixture(scope="module")
def finished(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("drafts") / "draft"
    slot, session = EngineSlot(), Session()
    slot.load(EngineConfig(target=str(target)))
    views = list(click_tune(slot, session, form_of(target, folder)))
    return Finished(views, session, slot, folder)


# -- a tuning that runs to its end


def test_a_click_on_tune_is_answered_before_the_engine_is_free(finished):
    assert "Waiting for the engine" in finished.views[0]["status"]
    assert buttons(finished.views[0]) == BUSY


def test_the_phases_come_one_after_the_other(finished):
    current = [
        re.findall(r"<li aria-current='step'><b>(\w+)<", v) for v in finished.changes("phases")
    ]
    seen = [names[0] for names in current if names]
    assert list(dict.fromkeys(seen)) == list(PHASES)
    assert finished.views[-1]["phases"].count("sd-past") == len(PHASES)


def test_the_status_says_how_far_each_phase_is(finished):
    statuses = "\n".join(finished.changes("status"))
    assert re.search(
        r"phase 2 of 5, the target writes text: \d+%, [\d,]+ tokens, [\d,]+ tokens/s, "
        r"about \d+ s left",
        statuses,
    )
    assert re.search(r"phase 3 of 5, the draft learns from it: \d+%, .*, loss \d\.\d\d", statuses)


def test_the_log_grows_line_by_line(finished):
    empty, *logs = finished.changes("tune_log")
    assert empty == ""
    assert "prepare: target tiny-target" in logs[0]
    for before, after in pairwise(logs):
        assert after.startswith(before.removesuffix("</pre>"))
    assert "train: greedy agreement" in logs[-1]
    assert "save: saved in" in logs[-1]


def test_the_curve_grows_while_the_draft_learns(finished):
    hidden, *curves = finished.changes("curve")
    assert (hidden["visible"], hidden["value"]) == (False, None)
    assert all(curve["visible"] for curve in curves)
    lengths = [len(curve["value"].data[0].x) for curve in curves]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] == len(finished.session.tuning.validations)
    assert len(curves[-1]["value"].data[2].x) > 2
    # Once a second at most of about four seconds of training, and once when it has ended.
    assert 2 < len(curves) < 12


def test_the_end_says_how_good_the_draft_is_and_where(finished):
    status = finished.views[-1]["status"]
    assert re.search(
        r"greedy agreement \d+%, mean acceptance length 1\.\d\d at 4 draft tokens", status
    )
    assert str(finished.folder) in status
    assert buttons(finished.views[-1]) == IDLE
    assert (finished.folder / RECORD).is_file()


def test_the_pair_gets_the_draft_and_run_uses_it(finished, target):
    view = finished.views[-1]
    assert (view["draft_kind"], view["draft"]["visible"]) == ("model", True)
    assert view["draft"]["value"] == str(finished.folder)
    session = Session()
    ran = run_with(finished.slot, session, target, view["draft"]["value"])
    assert "Done." in ran["status"]
    assert session.run is not None
    assert session.run.record.settings["draft"] == finished.folder.name


def test_the_next_tuning_gets_a_folder_of_its_own(finished):
    assert (finished.views[-1]["output"], finished.views[-1]["resume"]) == ("", False)


def test_the_folder_is_named_as_soon_as_something_is_in_it(finished):
    first, _ = finished.changes("output")
    assert first == str(finished.folder)


def test_a_stop_that_comes_too_late_still_shows_the_draft(finished):
    view = shown(on_stopped(finished.session))
    assert "The draft is made" in view["status"]
    assert view["draft"]["value"] == str(finished.folder)


def test_a_finished_tuning_frees_the_engine(finished):
    assert not finished.session.is_working
    assert list(finished.slot.acquire()) == []
    finished.slot.release()
    assert workers() == []


# -- stopping


def test_a_tuning_holds_the_engine_frees_its_memory_and_can_be_stopped_and_resumed(
    target, tmp_path
):
    class ClosingEngine(ScriptedEngine):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    engine = ClosingEngine()
    slot = EngineSlot(lambda name: ScriptedBackend(engine))
    slot.load(EngineConfig())
    form = form_of(target, tmp_path / "draft")
    seen: list[bool] = []

    def is_far_enough(state: TuneState) -> bool:
        if state.has_begun and not seen:
            waiting = next(slot.acquire())
            seen.append(isinstance(waiting, BuildProgress) and engine.is_closed)
        return bool(state.validations)

    view = stop_when(slot, form, is_far_enough)
    assert seen == [True]
    assert workers() == []
    assert list(slot.acquire()) == []
    slot.release()
    assert "Stopped. What is done so far is kept in" in view["status"]
    assert f"{tmp_path / 'draft'}: tick Resume and press Tune" in view["status"]
    assert "choose the draft kind &#x27;model&#x27; and name that folder" in view["status"]
    assert "sd-past" in view["phases"]
    assert len(view["curve"]["value"].data[0].x) == 1
    assert (view["draft"], view["draft_kind"]) == (STAYS, STAYS)
    assert buttons(view) == IDLE

    # The draft that was kept runs.
    assert "Done." in run_with(EngineSlot(), Session(), target, tmp_path / "draft")["status"]

    refused = last(click_tune(slot, Session(), form))
    assert "role='alert'" in refused["status"]
    assert "holds an interrupted run" in refused["status"]
    assert buttons(refused) == IDLE

    resumed = last(click_tune(slot, Session(), replace(form, resume=True)))
    assert "The draft is made" in resumed["status"]


def test_a_tuning_stopped_before_it_trains_offers_no_draft(target, tmp_path):
    slot = EngineSlot(lambda name: ScriptedBackend(ScriptedEngine()))
    form = form_of(target, tmp_path / "draft")
    view = stop_when(slot, form, lambda state: state.phase == "generate")
    assert "tick Resume and press Tune to go on." in view["status"]
    assert "The best draft" not in view["status"]
    assert view["curve"] == STAYS


def test_a_tuning_stopped_before_it_begins_changes_nothing(target, tmp_path):
    slot = EngineSlot(lambda name: ScriptedBackend(ScriptedEngine()))
    view = stop_when(slot, form_of(target, tmp_path / "draft"), lambda state: True)
    assert "Stopped before the tuning began" in view["status"]
    assert not (tmp_path / "draft").exists()
    assert buttons(view) == IDLE


# -- errors


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_layers": 0}, "num_layers is 0: use"),
        ({"minutes": None}, "minutes is None: use more than 0"),
        ({"target": " "}, "target is empty: name a model"),
        ({"resume": True, "output": ""}, "output is empty: name the folder"),
    ],
)
def test_a_bad_form_is_answered_before_anything_is_closed(target, tmp_path, changes, sentence):
    def load_nothing(name: str) -> ScriptedBackend:
        raise AssertionError("a back end was asked for")

    form = replace(form_of(target, tmp_path), **changes)
    view = last(click_tune(EngineSlot(load_nothing), Session(), form))
    assert f"role='alert'>{sentence}" in view["status"]
    assert buttons(view) == IDLE


def test_a_target_that_is_not_there_is_named(tmp_path):
    form = form_of(tmp_path / "nothing", tmp_path / "draft")
    view = last(click_tune(EngineSlot(), Session(), form))
    assert "role='alert'>there is no model" in view["status"]
    assert buttons(view) == IDLE


def test_more_layers_than_the_target_has_are_refused(target, tmp_path):
    slot = EngineSlot(lambda name: ScriptedBackend(ScriptedEngine()))
    view = last(click_tune(slot, Session(), form_of(target, tmp_path / "draft", num_layers=5)))
    assert "num_layers is 5, and the target has 4: use 1 to 4" in view["status"]
    assert "kept" not in view["status"]
    assert buttons(view) == IDLE
    assert not (tmp_path / "draft").exists()


def test_a_folder_that_holds_something_else_is_refused(target, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    slot, session = EngineSlot(lambda name: ScriptedBackend(ScriptedEngine())), Session()
    view = last(click_tune(slot, session, form_of(target, tmp_path)))
    assert re.search(r"role='alert'>.*is not empty: name a new or an empty one", view["status"])
    assert "kept" not in view["status"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    # The engine is free for the next one.
    assert not session.is_working
    assert list(slot.acquire()) == []


def test_a_failure_on_the_way_says_what_is_kept(tmp_path):
    state = TuneState(DistillSpec(output=str(tmp_path)))
    state.apply(DistillProgress("generate", 1.0, num_tokens=10))
    session = Session(tuning=state)
    view = error_view(EngineBuildError("distilling: the disk is full"), session)
    assert (
        "role='alert'>distilling: the disk is full. What is done so far is kept in" in view.status
    )


# -- words


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (None, "Tuning, phase 1 of 5, load the target: …"),
        (
            DistillProgress("prepare", 0.0, message="a line"),
            "Tuning, phase 1 of 5, load the target: …",
        ),
        (
            DistillProgress(
                "generate",
                3.0,
                fraction=0.25,
                remaining_s=200,
                num_tokens=12345,
                tokens_per_second=678.9,
            ),
            "Tuning, phase 2 of 5, the target writes text: 25%, 12,345 tokens, 679 tokens/s, "
            "about 3 min left",
        ),
        (
            DistillProgress("train", 3.0, fraction=0.5, remaining_s=9000, loss=1.234),
            "Tuning, phase 3 of 5, the draft learns from it: 50%, loss 1.23, about 2.5 h left",
        ),
        (
            DistillProgress("evaluate", 3.0, fraction=0.5, remaining_s=0),
            "Tuning, phase 4 of 5, measure the best draft: 50%",
        ),
    ],
)
def test_the_status_says_where_a_tuning_stands(report: DistillProgress | None, text: str):
    state = TuneState(DistillSpec(output="a folder"))
    if report is not None:
        state.apply(report)
    assert tuning_text(state) == text
