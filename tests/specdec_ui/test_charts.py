"""The latency chart: one bar for each side and measure, light, and at home in both themes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from engines import (
    MAX_REPEATS,
    SIDES,
    Finish,
    GenerationEvent,
    Prefill,
    RunEvent,
    RunRecord,
    Side,
    Step,
    Token,
    read_recording,
)
from engines.distill import DistillProgress, DistillSpec
from specdec_ui.charts import latency_figure, tuning_figure
from specdec_ui.presets import FIRST_RECORDING
from specdec_ui.state import TuneState
from specdec_ui.summary import figures_html, verdict_html
from specdec_ui.theme import SIDE_COLOURS, SIDE_NAMES
from tests.engines.test_stats import PARTIAL, ROUNDS
from tests.specdec_ui.test_summary import cells

FIRST_TOKEN, PER_TOKEN, TOTAL = "y", "y2", "y3"  # the axes of the three measures
KILOBYTE = 1024


def timed_run(step_s: float, *, num_tokens: int = 4) -> list[GenerationEvent]:
    """Return a run that reads its prompt in a second, then gives a token a step."""
    steps = [
        Step((Token(5, "x", "target"),), (), 0, 0.0, step_s, 1.0 + number * step_s)
        for number in range(1, num_tokens + 1)
    ]
    return [Prefill(3, 2, 1.0), *steps, Finish("length", 1.0 + num_tokens * step_s)]


def record_of(**sides: list[list[GenerationEvent]]) -> RunRecord:
    record = RunRecord("a prompt", {}, {})
    for side in SIDES:
        for repeat, events in enumerate(sides.get(side, [])):
            for event in events:
                record.apply(RunEvent(side, repeat, event))
    return record


def bars(figure: Any) -> dict[tuple[str, str], Any]:
    """Return the bars by the name of their side and the axis of their measure."""
    found = {(bar.y[0], bar.yaxis): bar for bar in figure.data}
    assert len(found) == len(figure.data)
    return found


COMPARED = record_of(speculative=[timed_run(0.5)], baseline=[timed_run(2.0)])


def test_nothing_run_has_no_chart():
    assert latency_figure(record_of()) is None


@pytest.mark.parametrize(
    ("axis", "speculative", "baseline"),
    [(FIRST_TOKEN, 1.5, 3.0), (PER_TOKEN, 500.0, 2000.0), (TOTAL, 3.0, 9.0)],
)
def test_a_bar_is_as_long_as_what_was_measured(axis: str, speculative: float, baseline: float):
    shown = bars(latency_figure(COMPARED))
    assert len(shown) == 6
    assert shown["Speculative", axis].x == (pytest.approx(speculative),)
    assert shown["Baseline", axis].x == (pytest.approx(baseline),)


@pytest.mark.parametrize(("axis", "unit"), [(FIRST_TOKEN, " s"), (PER_TOKEN, " ms"), (TOTAL, " s")])
def test_a_bar_states_its_value_with_its_unit(axis: str, unit: str):
    for (_, bar_axis), bar in bars(latency_figure(COMPARED)).items():
        if bar_axis == axis:
            assert bar.texttemplate.endswith(f"f}}{unit}")
            assert bar.texttemplate in bar.hovertemplate


def test_each_measure_has_a_title_that_names_its_unit():
    titles = [note.text for note in latency_figure(COMPARED).layout.annotations]
    assert titles == ["Time to first token, s", "Time per output token, ms", "Total time, s"]


def test_a_side_has_the_colour_that_it_has_elsewhere():
    for (name, _), bar in bars(latency_figure(COMPARED)).items():
        side = next(side for side in SIDES if SIDE_NAMES[side] == name)
        assert bar.marker.color == SIDE_COLOURS[side]


@pytest.mark.parametrize("side", SIDES)
def test_a_side_that_was_not_run_has_no_bar(side: Side):
    shown = bars(latency_figure(record_of(**{side: [timed_run(0.5)]})))
    assert {name for name, _ in shown} == {SIDE_NAMES[side]}
    assert len(shown) == 3


def test_a_measure_that_was_not_reached_has_no_bar():
    silent = record_of(speculative=[[Prefill(3, 2, 1.0), Finish("stop", 1.0)]])
    assert list(bars(latency_figure(silent))) == [("Speculative", TOTAL)]


@PARTIAL
def test_latency_is_the_same_whatever_else_is_not_reported(events: list[GenerationEvent]):
    figure = latency_figure(record_of(speculative=[events], baseline=[timed_run(0.5)]))
    told = latency_figure(record_of(speculative=[ROUNDS], baseline=[timed_run(0.5)]))
    assert figure.to_json() == told.to_json()


STOPPED_AT = [
    pytest.param(1, id="while it read the prompt"),
    pytest.param(3, id="between two steps"),
    pytest.param(-1, id="at the last moment"),
]


@pytest.mark.parametrize("num_events", STOPPED_AT)
@pytest.mark.parametrize("side", SIDES)
def test_a_side_that_was_stopped_has_no_bar_and_nothing_is_claimed(side: Side, num_events: int):
    sides = {name: [timed_run(0.5)] for name in SIDES} | {side: [timed_run(0.1)[:num_events]]}
    record = record_of(**sides)
    shown = bars(latency_figure(record))
    assert {name for name, _ in shown} == {SIDE_NAMES[other] for other in SIDES if other != side}
    verdict = verdict_html(record, whose="your run")
    assert "no speedup is claimed" in verdict
    assert "×" not in verdict


@pytest.mark.parametrize("num_events", STOPPED_AT)
def test_a_run_stopped_on_its_only_side_has_no_chart(num_events: int):
    assert latency_figure(record_of(speculative=[timed_run(0.5)[:num_events]])) is None


def test_a_repeat_that_was_stopped_changes_no_bar():
    whole = bars(latency_figure(record_of(speculative=[timed_run(0.5)])))
    runs = [timed_run(0.5), timed_run(0.1)[:3]]
    shown = bars(latency_figure(record_of(speculative=runs)))
    assert {key: bar.x for key, bar in shown.items()} == {key: bar.x for key, bar in whole.items()}


def test_a_single_run_has_no_whiskers():
    for bar in latency_figure(COMPARED).data:
        assert bar.error_x.array is None


def test_repeats_give_the_median_and_whiskers_to_the_extremes():
    runs = [timed_run(step_s) for step_s in (0.5, 2.0, 1.0)]
    shown = bars(latency_figure(record_of(speculative=runs, baseline=[timed_run(2.0)])))
    bar = shown["Speculative", PER_TOKEN]
    assert bar.x == (pytest.approx(1000.0),)
    assert bar.error_x.array == (pytest.approx(1000.0),)
    assert bar.error_x.arrayminus == (pytest.approx(500.0),)
    assert shown["Baseline", PER_TOKEN].error_x.array is None


@pytest.mark.parametrize("num_repeats", [1, 2, 3, 4])
def test_the_bars_are_as_long_as_the_table_says(num_repeats: int):
    step_s = (0.5, 2.0, 1.0, 0.25)[:num_repeats]
    record = record_of(
        speculative=[timed_run(seconds) for seconds in step_s],
        baseline=[timed_run(seconds * 3) for seconds in reversed(step_s)],
    )
    shown, rows = bars(latency_figure(record)), cells(figures_html(record))
    for axis, name, template in (
        (FIRST_TOKEN, "Time to first token", "{:,.2f} s"),
        (PER_TOKEN, "Time per token", "{:,.1f} ms"),
        (TOTAL, "Total time", "{:,.2f} s"),
    ):
        drawn = [template.format(shown[SIDE_NAMES[side], axis].x[0]) for side in SIDES]
        assert drawn == rows[name]


@pytest.mark.parametrize("axis", ["xaxis", "xaxis2", "xaxis3"])
def test_the_bars_start_at_zero_and_leave_room_for_their_values(axis: str):
    layout = latency_figure(COMPARED).layout
    low, high = layout[axis].range
    longest = max(bar.x[0] for bar in latency_figure(COMPARED).data if bar.xaxis == f"x{axis[5:]}")
    assert low == 0
    assert high > longest * 1.1


def test_the_chart_brings_no_background_of_its_own():
    layout = latency_figure(COMPARED).to_dict()["layout"]
    assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "rgba(0,0,0,0)"
    assert "layout" not in layout["template"]  # the template "none" sets no colour either


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(read_recording(FIRST_RECORDING), id="the first recording"),
        pytest.param(
            record_of(
                speculative=[timed_run(0.1, num_tokens=200)] * MAX_REPEATS,
                baseline=[timed_run(0.3, num_tokens=200)] * MAX_REPEATS,
            ),
            id="as many repeats as can be",
        ),
    ],
)
def test_the_chart_is_light_however_long_the_run(record: RunRecord):
    assert len(latency_figure(record).to_json().encode()) < 10 * KILOBYTE


# -- the curve of a tuning


def tuning_of(*reports: DistillProgress) -> TuneState:
    state = TuneState(DistillSpec(output="a folder"))
    for report in reports:
        state.apply(report)
    return state


def training(elapsed_s: float, **values: float) -> DistillProgress:
    return DistillProgress("train", elapsed_s, **values)  # type: ignore[arg-type]


TUNING = tuning_of(
    training(0, agreement=0.25, overlap=0.2),
    training(30, loss=2.0),
    training(60, loss=1.5, agreement=0.5, overlap=0.45),
)


def test_a_tuning_that_has_not_trained_has_no_curve():
    assert tuning_figure(tuning_of(DistillProgress("generate", 5.0, num_tokens=10))) is None


def test_the_curve_shows_acceptance_in_percent_and_loss_over_minutes():
    lines = {line.name: line for line in tuning_figure(TUNING).data}
    assert list(lines) == ["Greedy agreement", "Acceptance rate at temperature 1", None]
    shown = [(line.x, line.y) for line in lines.values()]
    assert shown == [((0, 1), (25, 50)), ((0, 1), (20, 45)), ((0.5, 1), (2, 1.5))]
    assert [line.yaxis for line in lines.values()] == ["y", "y", "y2"]


def test_the_curve_names_its_axes():
    layout = tuning_figure(TUNING).layout
    titles = [note.text for note in layout.annotations]
    assert titles == [
        "On text not trained on, %",
        "Training loss; from half-way on with the overlap",
    ]
    assert layout.xaxis2.title.text == "Minutes of training"


def test_the_lines_of_the_curve_differ_by_more_than_their_colour():
    agreement, overlap, _ = tuning_figure(TUNING).data
    assert agreement.marker.symbol != overlap.marker.symbol
    assert agreement.line.color != overlap.line.color


def test_the_curve_brings_no_background_of_its_own():
    layout = tuning_figure(TUNING).to_dict()["layout"]
    assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "rgba(0,0,0,0)"


def test_the_curve_is_light_however_long_the_training():
    hours = tuning_of(
        *(training(second / 2, loss=3 - second / 1e5) for second in range(3 * 3600 * 2)),
        *(training(40.0 * n, agreement=0.123456, overlap=0.123456) for n in range(270)),
    )
    assert len(tuning_figure(hours).to_json().encode()) < 20 * KILOBYTE
    losses = tuning_figure(hours).data[2]
    assert losses.x[0] == 0
    assert losses.x[-1] > 175  # of 180 minutes
    gaps = {round(after - before, 1) for before, after in pairwise(losses.x)}
    assert len(gaps) <= 2  # evenly thinned
