"""The latency chart: one bar for each side and measure, light, and at home in both themes."""

from __future__ import annotations

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
from specdec_ui.charts import latency_figure
from specdec_ui.presets import FIRST_RECORDING
from specdec_ui.theme import SIDE_COLOURS, SIDE_NAMES

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
    reading = record_of(speculative=[[Prefill(3, 2, 1.0)]])
    assert list(bars(latency_figure(reading))) == [("Speculative", TOTAL)]


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
