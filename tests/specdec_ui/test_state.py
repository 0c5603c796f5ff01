"""The form to what an engine is asked for, and events to what the lanes show."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines import (
    MAX_REPEATS,
    SIDES,
    EngineConfig,
    Finish,
    GenerationRequest,
    Parted,
    Prefill,
    RunEvent,
    RunItem,
    RunRecord,
    SamplingParams,
    Side,
    Step,
    Token,
    TokenOrigin,
    WarmUp,
    run,
)
from engines.distill import DistillSpec
from specdec_ui.highlight import step_html
from specdec_ui.state import DRAFTS, Lane, RunForm, RunState, TuneForm, new_draft_folder
from tests.specdec_ui.conftest import ScriptedEngine, values_of

FORM = RunForm(
    backend="transformers",
    target="org/target",
    draft_kind="model",
    draft="org/draft",
    prompt="a prompt",
    chat_template=True,
    num_draft_tokens=4,
    max_new_tokens=64,
    temperature=0.5,
    top_k=40,
    top_p=0.9,
    seed=7,
    baseline=True,
    repeats=3,
)


def form_with(**changes: Any) -> RunForm:
    return replace(FORM, **changes)


def step(text: str, origin: TokenOrigin = "target", *, elapsed_s: float = 1.0) -> Step:
    return Step((Token(5, text, origin),), (), int(origin == "accepted"), 0.0, 0.1, elapsed_s)


def state_after(*items: RunItem) -> RunState:
    state = RunState(RunRecord("a prompt", {}, {}))
    for item in items:
        state.apply(item)
    return state


def test_the_names_are_those_of_the_fields_in_their_order():
    values = values_of(FORM)
    assert RunForm.read(*values) == FORM
    assert values[:4] == [FORM.backend, FORM.target, FORM.draft_kind, FORM.draft]


def test_a_form_becomes_the_engine_to_load():
    assert FORM.config() == EngineConfig("transformers", "org/target", "org/draft")


@pytest.mark.parametrize("draft_kind", ["prompt_lookup", "none"])
@pytest.mark.parametrize("draft", ["org/draft", "", " ", None])
def test_the_draft_counts_only_where_a_model_drafts(draft_kind: str, draft: str | None):
    config = form_with(draft_kind=draft_kind, draft=draft).config()
    assert config == EngineConfig("transformers", "org/target", draft=None)


def test_space_around_a_name_is_dropped():
    config = form_with(target=" org/target\n", draft="\torg/draft ").config()
    assert config == FORM.config()


def test_a_form_becomes_the_generation_to_run():
    assert FORM.request((1, 2)) == GenerationRequest(
        prompt_token_ids=(1, 2),
        draft_kind="model",
        num_draft_tokens=4,
        max_new_tokens=64,
        sampling=SamplingParams(temperature=0.5, top_k=40, top_p=0.9, seed=7),
    )


def test_a_form_without_drafting_drafts_nothing_whatever_the_number_says():
    request = form_with(draft_kind="none", num_draft_tokens=4).request((1,))
    assert request == FORM.request((1,)).plain()


WHOLE = ("num_draft_tokens", "max_new_tokens", "top_k", "seed")


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_number_may_come_as_a_float(name: str):
    request = form_with(**{name: 4.0}).request((1,))
    value = getattr(request.sampling if name in ("top_k", "seed") else request, name)
    assert value == 4
    assert type(value) is int


def test_the_repeats_may_come_as_a_float():
    assert type(form_with(repeats=3.0).num_runs()) is int


@pytest.mark.parametrize("value", [4.5, None, "x", math.nan, math.inf, -1, True])
@pytest.mark.parametrize("name", [*WHOLE, "repeats"])
def test_what_is_no_whole_number_is_refused_by_name(name: str, value: Any):
    with pytest.raises(ValueError, match=f"^{name} is {value!r}: use ") as raised:
        form_with(**{name: value}).check()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "expected"), [("", None), (" ", None), (None, None), ("0.3", 0.3), ("0", 0.0), (1, 1)]
)
def test_where_drafts_end_may_be_left_to_the_engine(value: Any, expected: float | None):
    assert form_with(min_draft_prob=value).request((1,)).min_draft_prob == expected


@pytest.mark.parametrize("value", ["x", "nan", "1.5", -1, [0.3]])
def test_where_drafts_end_is_a_number_from_0_to_1(value: Any):
    with pytest.raises(ValueError, match=r"^min_draft_prob is .*: use "):
        form_with(min_draft_prob=value).check()


@pytest.mark.parametrize("value", [None, "x", math.nan, math.inf, -1, True, 100])
@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_what_is_no_number_in_range_is_refused_by_name(name: str, value: Any):
    with pytest.raises(ValueError, match=f"^{name} is {value!r}: use "):
        form_with(**{name: value}).check()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": " \n\t"}, "the prompt is empty"),
        ({"prompt": None}, "the prompt is empty"),
        ({"prompt": "a \ud800 surrogate"}, "the prompt is not valid text at character 2"),
        ({"prompt": 5}, "prompt is 5"),
        ({"target": ""}, "target is ''"),
        ({"target": None}, "target is ''"),
        ({"target": ["org/target"]}, "target is ['org/target']"),
        ({"draft": ""}, "the draft is empty"),
        ({"draft": " "}, "the draft is empty"),
        ({"draft": None}, "the draft is empty"),
        ({"draft": 5}, "draft is 5"),
        ({"draft_kind": "magic"}, "draft_kind is 'magic'"),
        ({"draft_kind": None}, "draft_kind is None"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
        ({"num_draft_tokens": 33}, "num_draft_tokens is 33"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"repeats": MAX_REPEATS + 1}, f"repeats is {MAX_REPEATS + 1}"),
    ],
)
def test_a_form_is_refused_before_anything_is_loaded(changes: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}: ") as raised:
        form_with(**changes).check()
    assert "\n" not in str(raised.value)


def test_a_good_form_passes_its_check():
    assert FORM.check() is FORM


def test_a_run_begins_with_two_empty_lanes():
    state = state_after()
    assert state.lanes == {"speculative": Lane(), "baseline": Lane()}
    assert state.current is None


def test_each_side_writes_its_own_lane():
    ours, theirs = step("ours", "accepted"), step("theirs")
    state = state_after(
        RunEvent("speculative", 0, Prefill(3, 2, 0.5)),
        RunEvent("speculative", 0, ours),
        RunEvent("baseline", 0, theirs),
    )
    assert state.lanes["speculative"].html == step_html(ours)
    assert state.lanes["baseline"].html == step_html(theirs)
    assert state.lanes["speculative"].stats.num_accepted_tokens == 1
    assert state.lanes["baseline"].stats.text == "theirs"
    assert state.current == "baseline"


def test_the_figures_of_a_lane_follow_its_events():
    state = state_after(
        RunEvent("baseline", 0, Prefill(3, 2, 0.5)),
        RunEvent("baseline", 0, step("a", elapsed_s=1.0)),
        RunEvent("baseline", 0, Finish("length", 1.5)),
    )
    stats = state.lanes["baseline"].stats
    assert (stats.prefill_s, stats.elapsed_s, stats.finish_reason) == (0.5, 1.5, "length")
    assert stats == state.record.stats("baseline")[0]


def test_a_new_repeat_starts_its_lane_anew_and_leaves_the_other():
    first, second, theirs = step("first"), step("second"), step("theirs")
    state = state_after(
        RunEvent("speculative", 0, first),
        RunEvent("baseline", 0, theirs),
        RunEvent("speculative", 1, second),
    )
    assert state.lanes["speculative"].html == step_html(second)
    assert state.lanes["speculative"].stats.num_output_tokens == 1
    assert state.lanes["speculative"].repeat == 1
    assert state.lanes["baseline"].html == step_html(theirs)
    assert state.record.runs["speculative"] == [[first], [second]]


@pytest.mark.parametrize("side", SIDES)
def test_warming_up_leaves_no_trace_but_that_it_goes_on(side: Side):
    state = state_after(WarmUp(side), WarmUp(side))
    assert state.warming_up == side
    state.warming_up = None
    assert state == state_after()


def test_warming_up_is_over_with_the_first_event():
    state = state_after(WarmUp("baseline"), RunEvent("speculative", 0, Prefill(3, 2, 0.5)))
    assert state.warming_up is None


def test_where_the_outputs_part_is_kept_and_shown_in_no_lane():
    state = state_after(Parted(0.25))
    assert state.record.logit_gap == 0.25
    assert state.lanes == state_after().lanes
    assert RunState.replayed(state.record).record == state.record


def test_two_runs_share_nothing():
    one, other = state_after(), state_after()
    one.apply(RunEvent("speculative", 0, step("word")))
    assert other == state_after()


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_a_replayed_record_looks_as_its_run_did(repeats: int, baseline: bool):
    request = GenerationRequest((1, 2), "prompt_lookup", 4, max_new_tokens=9)
    streamed = RunState(RunRecord("a prompt", {"repeats": repeats}))
    for item in run(ScriptedEngine(), request, baseline=baseline, repeats=repeats):
        streamed.apply(item)
    replayed = RunState.replayed(streamed.record)
    assert replayed.lanes == streamed.lanes
    assert replayed.record == streamed.record
    assert replayed.record is not streamed.record


def test_a_stopped_record_is_replayed_as_far_as_it_came():
    sides: list[Side] = ["speculative", "baseline"]
    state = state_after(*(RunEvent(side, 0, Prefill(3, 2, 0.5)) for side in sides))
    assert RunState.replayed(state.record).lanes == state.lanes


# -- a tuning's form

TUNE_FORM = TuneForm(
    target=" org/target ",
    num_layers=4,
    minutes=2.5,
    output="a folder",
    prompts="",
    seed=3,
    resume=False,
)


def test_a_tuning_form_becomes_what_is_distilled():
    spec = TUNE_FORM.spec()
    assert spec == DistillSpec("a folder", "org/target", num_layers=4, minutes=2.5, seed=3)
    assert replace(TUNE_FORM, prompts=" a file ", resume=True).spec() == replace(
        spec, prompts="a file", resume=True
    )


def test_whole_numbers_of_a_tuning_may_come_with_a_point():
    values: dict[str, Any] = {"num_layers": 4.0, "seed": 3.0}
    assert replace(TUNE_FORM, **values).spec() == TUNE_FORM.spec()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target": ""}, "target is empty"),
        ({"target": None, "output": ""}, "target is"),
        ({"num_layers": 0}, "num_layers is 0: use"),
        ({"num_layers": None}, "num_layers is None: use"),
        ({"num_layers": 2.5}, "num_layers is 2.5: use"),
        ({"minutes": 0}, "minutes is 0: use more than 0"),
        ({"minutes": None}, "minutes is None: use more than 0"),
        ({"seed": -1}, "seed is -1: use"),
        ({"output": 7}, "output is 7: type some text"),
        ({"output": " ", "resume": True}, "output is empty: name the folder of the tuning"),
    ],
)
def test_a_tuning_form_that_is_unusable_names_the_field(changes: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        replace(TUNE_FORM, **changes).spec()


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("bundled", "bundled"),
        ("org/Name-1.5B", "Name-1.5B"),
        ("org/name@main", "name-main"),
        ("/models/a model.Q4_1.gguf", "a-model.Q4_1"),
        ("/models/tiny/", "tiny"),
        ("..", "draft"),
        ("é/😀", "draft"),
    ],
)
def test_a_folder_that_nobody_named_is_named_after_the_target(monkeypatch, tmp_path, target, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert replace(TUNE_FORM, target=target, output="").spec().output == f"{DRAFTS}/{name}"


def test_a_folder_that_nobody_named_is_a_new_one(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for expected in ("bundled", "bundled-2", "bundled-3"):
        folder = Path(new_draft_folder("bundled")).expanduser()
        assert folder == tmp_path / "specdec-drafts" / expected
        folder.mkdir(parents=True)
