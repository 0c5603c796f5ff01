"""The page as it is built: controls, events, endpoints, and what it starts with."""

from __future__ import annotations

from typing import Any

import gradio as gr
import pytest

from engines import (
    BACKEND_CHOICES,
    DRAFT_KINDS,
    MAX_NUM_DRAFT_TOKENS,
    MAX_REPEATS,
    SIDES,
    Backend,
    DraftKind,
    EngineSlot,
    comparison_of,
    read_recording,
)
from engines.distill import DistillSpec
from specdec_ui.api import CONCURRENCY_ID
from specdec_ui.handlers import on_stopped
from specdec_ui.layout import PageDefaults, build_app, launch_options
from specdec_ui.presets import EXAMPLES, FIRST_RECORDING
from specdec_ui.state import RunForm, RunState, TuneForm
from specdec_ui.summary import expectation_html
from specdec_ui.theme import SIDE_NAMES
from specdec_ui.views import View
from tests.test_imports import HEAVY, modules_after

ENDPOINTS = {"run", "compare", "build", "check", "doctor"}
DEVICELESS = {"check", "doctor"}  # they need no engine
WORK = ("sd-run", "sd-build", "sd-tune")  # what begins something long


def load_nothing(name: str) -> Backend:
    raise AssertionError(f"the page asked for the back end {name}")


def build_page(defaults: PageDefaults | None = None) -> gr.Blocks:
    return build_app(EngineSlot(load_nothing), defaults)


@pytest.fixture(scope="module")
def page() -> gr.Blocks:
    return build_page()


def by_id(page: gr.Blocks, element_id: str) -> Any:
    (found,) = (block for block in page.blocks.values() if block.elem_id == element_id)
    return found


def work_after(page: gr.Blocks, element_id: str) -> Any:
    """Return the queued event that follows the first answer to a click."""
    button = by_id(page, element_id)
    (clicked,) = (
        function
        for function in page.fns.values()
        if (button._id, "click") in function.targets and function.fn is not None
    )
    (work,) = (
        function
        for function in page.fns.values()
        if function.trigger_after == clicked._id and not function.trigger_only_on_failure
    )
    return work


def controls(page: gr.Blocks) -> dict[str, Any]:
    """Return the controls of a run by the names of the form."""
    _, *inputs = work_after(page, "sd-run").inputs
    return dict(zip(RunForm.names(), inputs, strict=True))


def tune_controls(page: gr.Blocks) -> dict[str, Any]:
    """Return the controls of a tuning by the names of its form."""
    _, *inputs = work_after(page, "sd-tune").inputs
    return dict(zip(TuneForm.names(), inputs, strict=True))


# -- controls


@pytest.mark.parametrize("name", RunForm.names())
def test_a_control_has_a_label(page: gr.Blocks, name: str):
    assert controls(page)[name].label


@pytest.mark.parametrize("name", RunForm.names())
def test_a_control_says_what_it_does(page: gr.Blocks, name: str):
    info = controls(page)[name].info
    assert info
    assert info.endswith(".")


def test_no_two_controls_look_the_same(page: gr.Blocks):
    labels = [control.label for control in controls(page).values()]
    assert len(set(labels)) == len(labels)


def test_a_control_has_the_label_that_its_errors_name(page: gr.Blocks):
    for name in ("num_draft_tokens", "max_new_tokens", "temperature", "top_k", "top_p", "seed"):
        assert controls(page)[name].label == name


def test_the_page_starts_with_a_form_that_can_be_run(page: gr.Blocks):
    values = {name: control.value for name, control in controls(page).items()}
    form = RunForm.read(*values.values()).check()
    assert form.prompt == EXAMPLES[0].prompt
    assert form.baseline
    assert form.request((1,)).sampling.is_greedy


@pytest.mark.parametrize("name", TuneForm.names())
def test_a_control_of_a_tuning_says_what_it_is_and_looks_like_no_other(page: gr.Blocks, name: str):
    control = tune_controls(page)[name]
    assert control.info.endswith(".")
    others = {**controls(page), **tune_controls(page)}.values()
    assert [
        other for other in others if other.label == control.label and other is not control
    ] == []


def test_what_is_tuned_is_the_target_of_the_pair(page: gr.Blocks):
    assert tune_controls(page)["target"] is controls(page)["target"]


def test_the_page_starts_with_a_tuning_that_can_be_done(page: gr.Blocks):
    values = {name: control.value for name, control in tune_controls(page).items()}
    spec = TuneForm(**values).spec()
    assert spec == DistillSpec(output=spec.output)


def test_the_advice_names_both_when_a_tuning_pays_and_when_not(page: gr.Blocks):
    (advice,) = (
        block
        for block in page.blocks.values()
        if isinstance(block, gr.Markdown) and block.elem_classes == ["sd-advice"]
    )
    worth, _, not_worth = str(advice.value).partition("**Not worth it**")
    assert "**Worth it** where there is a GPU" in worth
    for reason in ("published", "CPU", "prompt_lookup", "days of two CPU cores"):
        assert reason in not_worth


def test_the_slider_offers_what_the_form_accepts(page: gr.Blocks):
    slider = controls(page)["repeats"]
    assert (slider.minimum, slider.maximum, slider.step) == (1, MAX_REPEATS, 1)


def test_the_number_of_drafted_tokens_says_what_the_form_accepts(page: gr.Blocks):
    assert f"1 to {MAX_NUM_DRAFT_TOKENS}." in controls(page)["num_draft_tokens"].info


@pytest.mark.parametrize("value", [0, -1, 1000, 2.5, None])
def test_a_number_out_of_range_is_left_to_the_form_to_judge(page: gr.Blocks, value: float | None):
    assert controls(page)["num_draft_tokens"].preprocess(value) == value


def test_every_back_end_is_offered(page: gr.Blocks):
    choices = [value for _, value in controls(page)["backend"].choices]
    assert choices == list(BACKEND_CHOICES)


def test_every_draft_kind_is_offered(page: gr.Blocks):
    choices = [value for _, value in controls(page)["draft_kind"].choices]
    assert choices == list(DRAFT_KINDS)


@pytest.mark.parametrize(
    ("draft_kind", "is_visible"), [("model", True), ("prompt_lookup", False), ("none", False)]
)
def test_the_draft_model_is_asked_for_only_where_one_drafts(
    draft_kind: DraftKind, is_visible: bool
):
    backend = BACKEND_CHOICES[-1]
    defaults = PageDefaults(backend, "org/target", "org/draft", draft_kind)
    page_controls = controls(build_page(defaults))
    assert page_controls["draft"].visible == is_visible
    values = {name: page_controls[name].value for name in ("backend", "target", "draft")}
    assert values == {"backend": backend, "target": "org/target", "draft": "org/draft"}


def test_only_stop_waits_for_a_run(page: gr.Blocks):
    for button in WORK:
        assert by_id(page, button).interactive
    assert not by_id(page, "sd-stop").interactive


# -- events


@pytest.mark.parametrize("button", WORK)
def test_the_outputs_are_wired_in_the_order_of_the_view(page: gr.Blocks, button: str):
    outputs = work_after(page, button).outputs
    assert outputs == work_after(page, "sd-run").outputs
    where = dict(zip(View.names(), outputs, strict=True))
    for name in ("run", "build", "tune", "stop"):
        assert where[name] is by_id(page, f"sd-{name}")
    for side in SIDES:
        assert where[side] is by_id(page, f"sd-lane-{side}")
    assert isinstance(where["latency"], gr.Plot)
    assert where["curve"] is by_id(page, "sd-curve")
    for name in ("draft", "draft_kind"):
        assert where[name] is controls(page)[name]
    for name in ("output", "resume"):
        assert where[name] is tune_controls(page)[name]
    assert isinstance(where["export"], gr.DownloadButton)


@pytest.mark.parametrize("button", WORK)
def test_stop_cancels_whatever_can_run(page: gr.Blocks, button: str):
    stop = by_id(page, "sd-stop")
    cancelled = {
        id_
        for function in page.fns.values()
        if (stop._id, "click") in function.targets
        for id_ in function.cancels
    }
    assert work_after(page, button)._id in cancelled


def test_what_stop_shows_in_the_end_follows_its_first_answer(page: gr.Blocks):
    shown = work_after(page, "sd-stop")
    assert shown.fn is on_stopped
    assert shown.outputs == work_after(page, "sd-run").outputs
    assert not shown.queue


def test_typing_a_prompt_clears_what_was_expected_of_the_example(page: gr.Blocks):
    prompt = controls(page)["prompt"]
    (typed,) = (item for item in page.fns.values() if (prompt._id, "input") in item.targets)
    expectation: Any
    (expectation,) = typed.outputs
    assert expectation.value == expectation_html(EXAMPLES[0])
    assert typed.inputs == []
    assert typed.fn is not None
    assert typed.fn() == ""


@pytest.mark.parametrize("button", WORK)
def test_a_fault_gives_the_page_back(page: gr.Blocks, button: str):
    work = work_after(page, button)
    (on_failure,) = (
        function
        for function in page.fns.values()
        if function.trigger_after == work._id and function.trigger_only_on_failure
    )
    assert on_failure.outputs == work.outputs


def test_whatever_touches_the_device_waits_in_one_queue(page: gr.Blocks):
    queued = [
        function
        for function in page.fns.values()
        if function.concurrency_id not in ("probe", "check") and function.queue and function.fn
        if function.api_name not in DEVICELESS
    ]
    assert len(queued) == len({*WORK} | ENDPOINTS - DEVICELESS)
    for function in queued:
        assert (function.concurrency_id, function.concurrency_limit) == (CONCURRENCY_ID, 1)


def test_no_event_that_writes_the_view_lays_a_progress_bar_over_it(page: gr.Blocks):
    view = work_after(page, "sd-run").outputs
    for function in page.fns.values():
        if function.queue or function.outputs == view:
            assert function.show_progress == "hidden"


def test_stop_and_the_first_answers_do_not_wait_in_the_queue(page: gr.Blocks):
    for button in (*WORK, "sd-stop"):
        id_ = by_id(page, button)._id
        for function in page.fns.values():
            if (id_, "click") in function.targets:
                assert not function.queue


def test_the_public_endpoints_are_those_that_are_documented(page: gr.Blocks):
    public = {
        function.api_name for function in page.fns.values() if function.api_visibility == "public"
    }
    assert public == ENDPOINTS
    assert set(page.get_api_info()["named_endpoints"]) == {f"/{name}" for name in ENDPOINTS}


@pytest.mark.parametrize("name", sorted(ENDPOINTS))
def test_an_endpoint_says_what_it_does(page: gr.Blocks, name: str):
    (function,) = (item for item in page.fns.values() if item.api_name == name)
    assert function.api_description


# -- what the page starts with


def test_building_the_page_loads_no_model_and_no_torch():
    script = (
        "from engines import EngineSlot; from specdec_ui.layout import build_app; "
        "build_app(EngineSlot(lambda name: 1 / 0))"
    )
    assert modules_after(script).isdisjoint(HEAVY)


def test_two_pages_share_nothing():
    one, other = build_page(), build_page()
    assert controls(one)["prompt"] is not controls(other)["prompt"]


def test_nothing_is_shared_kept_or_reported_by_default():
    options = launch_options()
    assert options["share"] is False
    assert options["run_history"] is False
    assert options["footer_links"] == ["api", "settings"]


def test_no_analytics_are_sent_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "True")
    assert build_page().analytics_enabled is False


def test_the_page_loads_nothing_from_elsewhere():
    options = launch_options()
    assert "http" not in options["head"] + options["css"]


def test_the_page_opens_with_the_recorded_run(page: gr.Blocks):
    state = RunState.replayed(read_recording(FIRST_RECORDING))
    for side in SIDES:
        assert by_id(page, f"sd-lane-{side}").value == state.lanes[side].html != ""


@pytest.mark.parametrize("side", SIDES)
def test_a_lane_can_be_reached_by_keyboard_and_has_a_name(page: gr.Blocks, side):
    template = by_id(page, f"sd-lane-{side}").html_template
    assert "tabindex='0'" in template
    assert f"aria-label='{SIDE_NAMES[side]} output'" in template


def test_a_lane_keeps_its_text_out_of_the_template(page: gr.Blocks):
    for side in SIDES:
        assert by_id(page, f"sd-lane-{side}").html_template.count("${value}") == 1


def test_the_first_recording_is_a_comparison_with_one_output():
    comparison = comparison_of(read_recording(FIRST_RECORDING))
    assert comparison.is_finished
    assert comparison.identical is True
    assert comparison.speedup is not None


def test_the_first_recording_is_of_the_first_example():
    record = read_recording(FIRST_RECORDING)
    assert record.prompt == EXAMPLES[0].prompt
    assert record.settings["draft_kind"] == PageDefaults().draft_kind


@pytest.mark.parametrize("field", ["kind", "expectation", "prompt"])
def test_the_examples_differ_and_none_is_empty(field: str):
    values = [getattr(example, field) for example in EXAMPLES]
    assert all(value.strip() == value != "" for value in values)
    assert len(set(values)) == len(values)
