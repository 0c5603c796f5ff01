"""The words and numbers of the verdict, the figures and the status line."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest

from engines import (
    SIDES,
    Comparison,
    Finish,
    FirstDifference,
    GenerationEvent,
    Prefill,
    RunEvent,
    RunRecord,
    Side,
    Spread,
    Step,
    Token,
    comparison_of,
    read_recording,
    stats_of,
)
from engines.distill import spec as distill_spec
from specdec_ui.presets import EXAMPLES, FIRST_RECORDING
from specdec_ui.summary import (
    FIGURES,
    MISSING,
    NOT_REPORTED,
    PHASES,
    duration,
    expectation_html,
    figures_html,
    headline_of,
    number,
    percent,
    phases_html,
    reason_of,
    reported,
    status_html,
    verdict_html,
)
from tests.engines.test_stats import MERGED, PARTIAL, ROUNDS, UNCOUNTED, UNTOLD
from tests.specdec_ui.test_highlight import HOSTILE

PREFILL = Prefill(num_prompt_tokens=7, num_cached_tokens=6, elapsed_s=1.0)
SETTINGS: dict[str, Any] = {
    "target": "org/target",
    "draft_kind": "prompt_lookup",
    "num_draft_tokens": 4,
    "temperature": 0.0,
    "repeats": 1,
    "dtype": "float32",
    "device": "x86_64 CPU, 2 threads",
}
MACHINE = {"cpu": "a processor", "date": "2026-11-30T15:59:06+00:00"}


def plain_run(step_s: float) -> list[GenerationEvent]:
    """Return a baseline whose output is that of `ROUNDS`."""
    token_ids = stats_of(ROUNDS).output_token_ids
    steps = [
        Step((Token(id_, "x", "target"),), (), 0, 0.0, step_s, 1.0 + count * step_s)
        for count, id_ in enumerate(token_ids, start=1)
    ]
    return [PREFILL, *steps, Finish("length", 1.0 + len(token_ids) * step_s)]


def record_of(
    *repeats: tuple[Side, list[GenerationEvent]], settings: dict[str, Any] | None = None
) -> RunRecord:
    record = RunRecord("a prompt", SETTINGS | (settings or {}), MACHINE)
    for side, events in repeats:
        repeat = len(record.runs.get(side, []))
        for event in events:
            record.apply(RunEvent(side, repeat, event))
    return record


# 8 tokens in 3 steps and 4 s, against 8 tokens in 8 steps and 8 s.
COMPARED = record_of(("speculative", ROUNDS), ("baseline", plain_run(step_s=1.0)))


def outcome(
    speedup: Spread | None,
    *,
    identical: bool | None = True,
    difference: FirstDifference | None = None,
    logit_gap: float | None = None,
) -> Comparison:
    """Return a finished comparison with a given outcome."""
    stats = stats_of(ROUNDS)
    return Comparison(stats, stats, None, None, speedup, True, identical, difference, logit_gap)


def once(speedup: float) -> Spread:
    """Return the speedup of one run of each side."""
    return Spread(speedup, speedup, speedup)


def cells(html: str) -> dict[str, list[str]]:
    """Return the cells of each row of the table, by the name of the row."""
    rows = re.findall(r"<tr><th scope='row'>(.*?)<small>.*?</small></th>(.*?)</tr>", html)
    return {name: re.findall(r"<td>(.*?)</td>", row) for name, row in rows}


def text_of(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", " ", html))


@pytest.mark.parametrize(
    ("value", "digits", "unit", "expected"),
    [
        (None, 2, " s", MISSING),
        (0.0, 2, " s", "0.00 s"),
        (1234.56, 1, "", "1,234.6"),
        (0.125, 2, " ms", "0.12 ms"),
    ],
)
def test_a_number_is_rounded_and_carries_its_unit(
    value: float | None, digits: int, unit: str, expected: str
):
    assert number(value, digits, unit) == expected


def test_what_is_not_reported_is_called_so_and_no_zero():
    assert reported(None, 2, " s") == "not reported by this back end"
    assert (reported(0), reported(1234), reported(0.0, 2, " s")) == ("0", "1,234", "0.00 s")


@pytest.mark.parametrize(("value", "expected"), [(None, MISSING), (0.0, "0%"), (5 / 12, "42%")])
def test_a_share_is_a_percentage(value: float | None, expected: str):
    assert percent(value) == expected


@pytest.mark.parametrize(
    ("speedup", "words"),
    [
        pytest.param(once(1.474), "1.47× faster", id="faster"),
        pytest.param(once(1.06), "1.06× faster", id="just faster"),
        pytest.param(once(1.04), "1.04× as fast: no clear difference", id="hardly faster"),
        pytest.param(once(1.0), "1.00× as fast: no clear difference", id="equal"),
        pytest.param(once(0.96), "0.96× as fast: no clear difference", id="hardly slower"),
        pytest.param(once(0.94), "0.94× as fast: slower", id="just slower"),
        pytest.param(once(0.82), "0.82× as fast: slower", id="slower"),
        pytest.param(Spread(1.04, 1.03, 1.05), "1.04× faster", id="always faster"),
        pytest.param(Spread(1.3, 1.0, 1.4), "1.30× faster", id="never slower"),
        pytest.param(
            Spread(1.01, 1.005, 1.03), "1.01× as fast: no clear difference", id="always hardly"
        ),
        pytest.param(
            Spread(1.2, 0.98, 1.4), "1.20× as fast: no clear difference", id="mostly faster"
        ),
        pytest.param(
            Spread(0.8, 0.7, 1.01), "0.80× as fast: no clear difference", id="mostly slower"
        ),
        pytest.param(Spread(0.96, 0.95, 0.97), "0.96× as fast: slower", id="always slower"),
    ],
)
def test_the_headline_says_how_much_faster_or_slower(speedup: Spread, words: str):
    assert headline_of(outcome(speedup)) == f"{words}, output identical"


def test_the_headline_says_where_the_outputs_part_and_how_close_it_was():
    parted = outcome(
        once(1.5), identical=False, difference=FirstDifference(16, 5, 6), logit_gap=0.00123
    )
    assert headline_of(parted) == (
        "1.50× faster, but output differs from token 17, "
        "where the two tokens are 0.0012 apart in logit"
    )


def test_the_headline_makes_no_gap_up():
    difference = FirstDifference(0, 5, None)
    headline = headline_of(outcome(once(1.5), identical=False, difference=difference))
    assert headline == "1.50× faster, but output differs from token 1"


def test_the_headline_of_a_sampled_run_does_not_promise_equal_texts():
    headline = headline_of(outcome(once(1.5), identical=None))
    assert headline == ("1.50× faster, same distribution (sampled, so the texts may differ)")


def test_the_headline_of_a_run_without_a_speed_claims_none():
    assert headline_of(outcome(None)) == "Too short to compare"


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        pytest.param(1.0, "sd-faster", id="faster"),
        pytest.param(0.503, "sd-open", id="no difference"),
        pytest.param(0.25, "sd-slower", id="slower"),
    ],
)
def test_the_bar_takes_the_colour_of_the_headline(step_s: float, expected: str):
    record = record_of(("speculative", ROUNDS), ("baseline", plain_run(step_s)))
    assert f"class='sd-verdict {expected}'" in verdict_html(record, whose="your run")


def test_the_reason_weighs_what_a_step_gave_against_what_it_cost():
    # A step gave 8 ÷ 3 tokens in 4 ÷ 3 s, 0.25 s of them drafting; a plain step took 1 s.
    assert reason_of(comparison_of(COMPARED)) == (
        "A speculative step gave 2.67 tokens and took as long as 1.33 plain steps (drafting: 0.25)."
    )


@pytest.mark.parametrize("record", [COMPARED, read_recording(FIRST_RECORDING)])
def test_the_two_sides_of_the_reason_give_the_speedup(record: RunRecord):
    comparison = comparison_of(record)
    numbers = re.findall(r"\d+\.\d+", reason_of(comparison))
    gained, cost, _ = map(float, numbers)
    assert comparison.speedup is not None
    assert gained / cost == pytest.approx(comparison.speedup.median, rel=0.01)


@pytest.mark.parametrize("events", [UNTOLD, UNCOUNTED])
def test_the_reason_leaves_out_the_share_of_drafting_where_it_is_not_reported(
    events: list[GenerationEvent],
):
    record = record_of(("speculative", events), ("baseline", plain_run(step_s=1.0)))
    assert reason_of(comparison_of(record)) == (
        "A speculative step gave 2.67 tokens and took as long as 1.33 plain steps."
    )


def test_the_reason_counts_no_steps_that_are_not_reported():
    record = record_of(("speculative", MERGED), ("baseline", plain_run(step_s=1.0)))
    assert reason_of(comparison_of(record)) == (
        "What a step gave and cost is not reported by this back end."
    )


def test_the_reason_counts_plain_passes_that_came_as_one():
    events = plain_run(step_s=1.0)
    merged = Step((Token(0, "x", "target"),) * 2, (), 0, 0.0, 2.0, 3.0)
    record = record_of(("speculative", ROUNDS), ("baseline", [PREFILL, merged, *events[3:]]))
    assert reason_of(comparison_of(record)) == reason_of(comparison_of(COMPARED))


@PARTIAL
def test_the_verdict_stands_whatever_is_not_reported(events: list[GenerationEvent]):
    record = record_of(("speculative", events), ("baseline", plain_run(step_s=1.0)))
    verdict = verdict_html(record, whose="your run")
    assert headline_of(comparison_of(record)) == headline_of(comparison_of(COMPARED))
    assert fact(verdict, "Tokens/s") == "2.0 against 1.0"
    assert "None" not in verdict


def test_acceptance_that_is_not_reported_is_a_fact_of_the_verdict():
    verdict = verdict_html(record_of(("speculative", UNCOUNTED)), whose="your run")
    assert fact(verdict, "Acceptance rate") == NOT_REPORTED
    assert fact(verdict, "Mean acceptance length") == NOT_REPORTED


def test_a_run_without_a_step_has_no_reason():
    empty = stats_of([])
    comparison = Comparison(empty, empty, None, None, None, True, True, None)
    assert reason_of(comparison) == ""


def test_the_verdict_of_a_compared_run_states_speeds_and_acceptance():
    text = text_of(verdict_html(COMPARED, whose="your run"))
    for fact in (
        "2.00× faster, output identical",
        "2.0 against 1.0",
        "42%",
        "2.67",
        "2.00 against 2.00 s",
        "one run of each side",
    ):
        assert fact in text


def test_the_spread_is_that_of_the_repeats():
    record = record_of(
        ("speculative", ROUNDS),
        ("baseline", plain_run(step_s=1.0)),
        ("speculative", ROUNDS),
        ("baseline", plain_run(step_s=1.5)),
        settings={"repeats": 2},
    )
    assert "2.00× to 3.00×" in verdict_html(record, whose="your run")


# Differently fast repeats, so that their order and the middle of an even number count.
STEP_S = (1.0, 1.5, 0.75, 2.0)


def repeated(num_repeats: int) -> RunRecord:
    """Return a comparison whose sides have their own order of fast and slow repeats."""
    return record_of(
        *(("speculative", plain_run(step_s / 2)) for step_s in STEP_S[:num_repeats]),
        *(("baseline", plain_run(step_s)) for step_s in reversed(STEP_S[:num_repeats])),
        settings={"repeats": num_repeats},
    )


def fact(html: str, name: str) -> str:
    (value,) = re.findall(rf"<dt [^>]*>{name}</dt><dd>(.*?)</dd>", html)
    return str(value)


@pytest.mark.parametrize("num_repeats", [1, 2, 3, 4])
def test_the_verdict_and_the_table_give_the_same_numbers(num_repeats: int):
    record = repeated(num_repeats)
    verdict, rows = verdict_html(record, whose="your run"), cells(figures_html(record))
    assert fact(verdict, "Tokens/s") == " against ".join(rows["Tokens per second"])
    assert fact(verdict, "Time to first token").split(" against ") == [
        rows["Time to first token"][0].removesuffix(" s"),
        rows["Time to first token"][1],
    ]


@pytest.mark.parametrize("num_repeats", [1, 2, 3, 4])
def test_the_claimed_speedup_is_that_of_the_table(num_repeats: int):
    record = repeated(num_repeats)
    ours, theirs = (
        1000 / float(cell.removesuffix(" ms").replace(",", ""))
        for cell in cells(figures_html(record))["Time per token"]
    )
    comparison = comparison_of(record)
    assert comparison.speedup is not None
    assert comparison.speedup.median == pytest.approx(ours / theirs, rel=0.001)
    assert comparison.speedup.low <= comparison.speedup.median <= comparison.speedup.high
    assert headline_of(comparison).startswith(f"{ours / theirs:.2f}× ")


@pytest.mark.parametrize("num_repeats", [1, 2, 3, 4])
def test_a_side_alone_has_the_numbers_of_its_table(num_repeats: int):
    record = record_of(
        *(("speculative", plain_run(step_s)) for step_s in STEP_S[:num_repeats]),
        settings={"repeats": num_repeats},
    )
    (speed,) = cells(figures_html(record))["Tokens per second"]
    said = fact(verdict_html(record, whose="your run"), "Speculative tokens/s")
    assert said.split(",")[0] == speed


@pytest.mark.parametrize("num_events", [1, 3, -1])
def test_a_repeat_that_was_stopped_does_not_stand_for_the_whole_ones(num_events: int):
    whole = record_of(("speculative", ROUNDS))
    stopped = record_of(("speculative", ROUNDS), ("speculative", plain_run(0.01)[:num_events]))
    assert figures_html(stopped) == figures_html(whole)


@pytest.mark.parametrize("side", SIDES)
def test_a_side_alone_claims_no_speedup(side: Side):
    html = verdict_html(record_of((side, ROUNDS)), whose="your run")
    assert "Run without a baseline" in html
    assert "no speedup is claimed" in html
    assert "×" not in html
    assert "class='sd-verdict sd-open'" in html


@pytest.mark.parametrize(
    ("record", "is_stopped"),
    [
        pytest.param(record_of(), True, id="before the first event"),
        pytest.param(record_of(("speculative", ROUNDS[:2])), True, id="on the first side"),
        pytest.param(COMPARED, True, id="at the last moment"),
        pytest.param(
            record_of(("speculative", ROUNDS), ("baseline", plain_run(1.0)[:-1])),
            False,
            id="as a recording tells",
        ),
    ],
)
def test_a_stopped_run_claims_no_speedup(record: RunRecord, is_stopped: bool):
    html = verdict_html(record, whose="your run", is_stopped=is_stopped)
    assert "<h2>Ended early</h2>" in html
    assert "no speedup is claimed" in html
    assert "×" not in html


def test_a_run_that_has_just_begun_has_no_verdict_yet():
    html = verdict_html(record_of(), whose="your run")
    assert "<h2>Running …</h2>" in html
    assert "compared" not in html


def test_a_missing_repeat_is_no_finished_comparison():
    record = record_of(
        ("speculative", ROUNDS),
        ("baseline", plain_run(step_s=1.0)),
        ("speculative", ROUNDS),
        settings={"repeats": 2},
    )
    assert "<h2>Ended early</h2>" in verdict_html(record, whose="your run")


@pytest.mark.parametrize("whose", ["recorded run", "your run"])
def test_the_verdict_says_whose_run_it_was(whose: str):
    assert f"<span class='sd-chip'>{whose}</span>" in verdict_html(COMPARED, whose=whose)


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        (
            {},
            "org/target with prompt lookup, num_draft_tokens 4 · float32 on a processor · "
            "2026-11-30",
        ),
        (
            {"draft_kind": "model", "device": "NVIDIA H200", "dtype": "bfloat16"},
            "org/target with a draft model, num_draft_tokens 4 · bfloat16 on NVIDIA H200 · "
            "2026-11-30",
        ),
        (
            {"draft_kind": "model", "draft_dtype": "bfloat16"},
            "org/target with a draft model, num_draft_tokens 4 · float32 (draft bfloat16) on a "
            "processor · 2026-11-30",
        ),
        (
            {"draft_kind": "none", "num_draft_tokens": 0},
            "org/target with nothing drafted · float32 on a processor · 2026-11-30",
        ),
    ],
)
def test_the_verdict_names_the_pair_and_the_machine(settings: dict[str, Any], source: str):
    record = record_of(("speculative", ROUNDS), settings=settings)
    assert text_of(verdict_html(record, whose="your run")).rstrip().endswith(source)


def test_a_record_that_says_nothing_of_its_making_is_still_shown():
    record = RunRecord("a prompt", {"repeats": 1}, {})
    text = text_of(verdict_html(record, whose="recorded run"))
    assert "an unknown target with an unknown draft" in text
    assert "an unknown device" in text
    assert not text.rstrip().endswith("·")


EXPECTED_FIGURES = {
    "Tokens per second": ["2.0", "1.0"],
    "Time to first token": ["2.00 s", "2.00 s"],
    "Time per token": ["500.0 ms", "1,000.0 ms"],
    "Total time": ["5.00 s", "9.00 s"],
    "Output tokens": ["8", "8"],
    "Target steps": ["3", "8"],
    "Accepted ÷ drafted": ["5 ÷ 12", MISSING],
    "Acceptance rate": ["42%", MISSING],
    "Mean acceptance length": ["2.67", MISSING],
    "Accepted by position": ["67% 33% 33% 33%", MISSING],
    "Drafting": ["0.75 s", "0.00 s"],
    "Verifying": ["1.50 s", "8.00 s"],
    "Ended by": ["length", "length"],
}


def test_the_figures_are_those_of_the_run():
    assert cells(figures_html(COMPARED)) == EXPECTED_FIGURES


@pytest.mark.parametrize(
    ("events", "unreported"),
    [
        pytest.param(UNTOLD, {}, id="untold"),
        pytest.param(
            UNCOUNTED,
            {
                "Accepted ÷ drafted": f"5 ÷ {NOT_REPORTED}",
                "Acceptance rate": NOT_REPORTED,
                "Mean acceptance length": NOT_REPORTED,
                "Accepted by position": NOT_REPORTED,
            },
            id="uncounted",
        ),
        pytest.param(
            MERGED,
            {
                "Target steps": NOT_REPORTED,
                "Accepted ÷ drafted": NOT_REPORTED,
                "Acceptance rate": NOT_REPORTED,
                "Mean acceptance length": NOT_REPORTED,
                "Accepted by position": NOT_REPORTED,
            },
            id="merged",
        ),
    ],
)
def test_figures_that_are_not_reported_say_so(
    events: list[GenerationEvent], unreported: dict[str, str]
):
    expected = {name: figures[0] for name, figures in EXPECTED_FIGURES.items()}
    expected |= {"Drafting": NOT_REPORTED, "Verifying": "2.25 s, drafting included", **unreported}
    shown = cells(figures_html(record_of(("speculative", events))))
    assert {name: figures[0] for name, figures in shown.items()} == expected


def test_the_length_is_a_figure_where_only_the_number_drafted_is_not_reported():
    row = cells(figures_html(record_of(("speculative", UNCOUNTED[:3]))))
    assert row["Mean acceptance length"] == ["3.50"]
    assert row["Accepted by position"] == ["100% 50% 50% 50%"]
    assert row["Acceptance rate"] == [NOT_REPORTED]


def test_every_figure_comes_with_its_definition():
    text = text_of(figures_html(COMPARED))
    assert [figure.name for figure in FIGURES] == list(EXPECTED_FIGURES)
    assert all(figure.definition in text for figure in FIGURES)


@pytest.mark.parametrize(
    ("side", "name"), [("speculative", "Speculative"), ("baseline", "Baseline")]
)
def test_a_side_alone_has_the_table_to_itself(side: Side, name: str):
    html = figures_html(record_of((side, ROUNDS)))
    assert re.findall(r"<th scope='col'>(.*?)</th>", html) == ["Figure", name]
    assert cells(html)["Acceptance rate"] == ["42%"]


def test_a_run_stopped_while_it_read_the_prompt_has_figures_without_numbers():
    row = cells(figures_html(record_of(("speculative", [PREFILL]))))
    assert row["Time to first token"] == row["Time per token"] == [MISSING]
    assert row["Tokens per second"] == row["Acceptance rate"] == [MISSING]
    assert row["Total time"] == ["1.00 s"]
    assert row["Ended by"] == ["cancelled"]


def test_nothing_run_has_no_figures():
    assert figures_html(record_of()) == ""


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_recording_says_of_itself_is_shown_as_it_is(text: str):
    names = ("target", "draft_kind", "num_draft_tokens", "dtype", "draft_dtype", "device")
    record = record_of(("speculative", ROUNDS), settings=dict.fromkeys(names, text))
    record.environment = dict.fromkeys(("cpu", "date"), text)
    html = verdict_html(record, whose=text)
    assert text_of(html).count(text) >= 5
    assert set(re.findall(r"<(\w+)", html)) <= {
        *("section", "h2", "p", "dl", "div", "dt", "dd", "span"),
    }


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("is_error", [False, True])
def test_the_status_line_shows_text_as_it_is(text: str, is_error: bool):
    html = status_html(text, is_error=is_error)
    assert re.findall(r"<(\w+)", html) == ["div"]
    assert text_of(html).strip() == text.strip()


def test_an_error_is_announced_at_once_and_a_status_when_there_is_time():
    assert "role='alert'" in status_html("the device is gone", is_error=True)
    assert "role='status'" in status_html("Done.")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.kind)
def test_an_example_says_what_to_expect_of_it(example):
    assert text_of(expectation_html(example)).strip() == (
        f"Example {example.kind}: {example.expectation}."
    )


# -- the phases of a tuning


def test_every_phase_of_a_tuning_is_explained_in_its_order():
    assert tuple(PHASES) == distill_spec.PHASES


@pytest.mark.parametrize(
    ("current", "num_past"), [(None, 0), ("prepare", 0), ("train", 2), ("save", 4), ("", 5)]
)
def test_the_phases_say_which_are_over_and_which_goes_on(current: str | None, num_past: int):
    html = phases_html(current)
    assert html.count("<li") == len(PHASES)
    assert html.count("class='sd-past'") == num_past
    marked = re.findall(r"<li aria-current='step'><b>(\w+)</b>", html)
    assert marked == ([current] if current else [])


@pytest.mark.parametrize("text", HOSTILE)
def test_how_far_a_phase_is_stays_text(text: str):
    html = phases_html("train", text)
    assert unescape(html.partition("<small>")[2].partition("</small>")[0]) == text
    assert html.count("<") == phases_html("train", "5%").count("<")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.9, "1 min"),
        (150, "2 min"),
        (3599, "1.0 h"),
        (9000, "2.5 h"),
    ],
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float, text: str):
    assert duration(seconds) == text
