"""The figures: counts, rates and times from events, differences and spreads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.events import Finish, GenerationEvent, Prefill, Step, Token, TokenOrigin, Totals
from engines.stats import (
    FirstDifference,
    GenerationStats,
    Spread,
    first_difference,
    spread_of,
    stats_of,
    typical,
)


def tokens(origin: TokenOrigin, count: int) -> tuple[Token, ...]:
    return tuple(Token(id_, "x", origin) for id_ in range(count))


def drafted_step(num_accepted: int, num_draft_tokens: int, elapsed_s: float) -> Step:
    is_whole = num_accepted == num_draft_tokens
    return Step(
        tokens=tokens("accepted", num_accepted) + tokens("bonus" if is_whole else "recovered", 1),
        rejected=tokens("rejected", num_draft_tokens - num_accepted),
        num_draft_tokens=num_draft_tokens,
        draft_s=0.25,
        target_s=0.5,
        elapsed_s=elapsed_s,
    )


# Three drafts of four, of which 4, 1 and 0 are accepted: 8 tokens from 3 target passes.
ROUNDS: list[GenerationEvent] = [
    Prefill(num_prompt_tokens=7, num_cached_tokens=6, elapsed_s=1.0),
    drafted_step(4, 4, elapsed_s=2.0),
    drafted_step(1, 4, elapsed_s=3.0),
    drafted_step(0, 4, elapsed_s=4.0),
    Finish("length", elapsed_s=5.0),
]
PLAIN_STEP = Step(tokens("target", 1), (), 0, 0.0, 0.5, elapsed_s=2.0)


def untold(step: Step) -> Step:
    """Return a step as of a back end that tells neither what it dropped nor how long it drafted."""
    return replace(step, rejected=None, draft_s=None, target_s=step.target_s + (step.draft_s or 0))


def uncounted(num_accepted: int, elapsed_s: float) -> Step:
    """Return a step of a back end that does not tell how much it drafted either."""
    output = tokens("accepted", num_accepted) + tokens("unreported", 1)
    return Step(output, None, None, None, 0.75, elapsed_s)


# The rounds as told by back ends that report less and less; at last, the last two passes as one.
UNTOLD: list[GenerationEvent] = [
    untold(event) if isinstance(event, Step) else event for event in ROUNDS
]
UNCOUNTED: list[GenerationEvent] = [
    ROUNDS[0],
    uncounted(4, 2.0),
    uncounted(1, 3.0),
    uncounted(0, 4.0),
    ROUNDS[-1],
]
MERGED_STEP = Step(tokens("unreported", 1) * 3, None, None, None, 1.5, elapsed_s=4.0)
MERGED: list[GenerationEvent] = [*UNCOUNTED[:2], MERGED_STEP, ROUNDS[-1]]
PARTIAL = pytest.mark.parametrize(
    "events",
    [
        pytest.param(UNTOLD, id="untold"),
        pytest.param(UNCOUNTED, id="uncounted"),
        pytest.param(MERGED, id="merged"),
    ],
)


def test_counts_are_those_of_the_steps():
    stats = stats_of(ROUNDS)
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (7, 8)
    assert (stats.num_steps, stats.num_drafts) == (3, 3)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (12, 5)
    assert stats.num_accepted_tokens_per_pos == [2, 1, 1, 1]
    assert stats.text == "x" * 8


def test_acceptance_is_a_ratio_of_sums():
    stats = stats_of(ROUNDS)
    assert stats.acceptance_rate == pytest.approx(5 / 12)
    assert stats.mean_acceptance_length == pytest.approx(1 + 5 / 3)


def test_a_step_without_a_draft_is_left_out_of_acceptance():
    stats = stats_of([*ROUNDS[:-1], PLAIN_STEP])
    assert (stats.num_steps, stats.num_drafts) == (4, 3)
    assert stats.mean_acceptance_length == pytest.approx(1 + 5 / 3)


def test_positions_grow_with_the_longest_draft():
    stats = stats_of([drafted_step(1, 1, 1.0), drafted_step(2, 3, 2.0), drafted_step(1, 2, 3.0)])
    assert stats.num_accepted_tokens_per_pos == [3, 1, 0]


# -- steps of back ends that do not report everything


@pytest.mark.parametrize(
    ("step", "num_passes", "num_drafts", "num_accepted", "num_dropped"),
    [
        pytest.param(drafted_step(1, 4, 1.0), 1, 1, 1, 3, id="all is told"),
        pytest.param(PLAIN_STEP, 1, 0, 0, 0, id="plain"),
        pytest.param(untold(drafted_step(1, 4, 1.0)), 1, 1, 1, 3, id="untold"),
        pytest.param(untold(drafted_step(4, 4, 1.0)), 1, 1, 4, 0, id="untold, kept whole"),
        pytest.param(uncounted(2, 1.0), 1, 1, 2, None, id="uncounted"),
        pytest.param(uncounted(0, 1.0), 1, None, 0, None, id="uncounted, with or without a draft"),
        pytest.param(
            Step(tokens("accepted", 2), None, 4, None, 0.5, 1.0), 1, 1, 2, 2, id="ends in a stop"
        ),
        pytest.param(
            Step(tokens("recovered", 1), None, None, None, 0.5, 1.0), 1, 1, 0, None, id="none kept"
        ),
        pytest.param(MERGED_STEP, None, None, None, None, id="merged"),
        pytest.param(
            replace(MERGED_STEP, num_draft_tokens=8), None, None, None, None, id="merged, counted"
        ),
        pytest.param(
            Step(tokens("target", 3), (), 0, 0.0, 0.5, 1.0), 3, 0, 0, 0, id="plain ones merged"
        ),
    ],
)
def test_a_step_counts_what_can_be_known_of_it(
    step: Step,
    num_passes: int | None,
    num_drafts: int | None,
    num_accepted: int | None,
    num_dropped: int | None,
):
    assert (step.num_passes, step.num_drafts) == (num_passes, num_drafts)
    assert (step.num_accepted_tokens, step.num_dropped_tokens) == (num_accepted, num_dropped)


def test_the_tokens_in_place_are_the_output_where_the_dropped_are_not_told():
    step = drafted_step(1, 4, 1.0)
    assert [token.origin for token in step.tokens_in_place] == [
        *("accepted", "rejected", "rejected", "rejected", "recovered"),
    ]
    assert untold(step).tokens_in_place == step.tokens
    assert MERGED_STEP.tokens_in_place == MERGED_STEP.tokens


@PARTIAL
def test_what_any_back_end_reports_is_known_of_each(events: list[GenerationEvent]):
    stats, told = stats_of(events), stats_of(ROUNDS)
    assert stats.num_output_tokens == told.num_output_tokens
    assert stats.tokens_per_second == told.tokens_per_second
    assert stats.time_per_token_s == told.time_per_token_s
    assert stats.elapsed_s == told.elapsed_s
    assert stats.text == told.text


def test_acceptance_is_known_without_the_tokens_that_were_dropped():
    known = {**stats_of(ROUNDS).to_dict(), "draft_s": None, "target_s": 2.25}
    assert stats_of(UNTOLD).to_dict() == known


def test_without_the_number_drafted_the_accepted_are_known_and_no_rate():
    stats = stats_of(UNCOUNTED)
    assert (stats.num_steps, stats.num_accepted_tokens) == (3, 5)
    assert stats.num_accepted_tokens_per_pos == [2, 1, 1, 1]
    assert (stats.num_draft_tokens, stats.acceptance_rate) == (None, None)


def test_the_acceptance_length_needs_only_to_know_which_steps_drafted():
    assert stats_of(UNCOUNTED[:3]).mean_acceptance_length == 1 + 5 / 2
    assert stats_of([*UNCOUNTED[:3], PLAIN_STEP]).mean_acceptance_length == 1 + 5 / 2
    # One token that nothing is told of may have had a draft before it or not.
    assert stats_of(UNCOUNTED).num_drafts is None
    assert stats_of(UNCOUNTED).mean_acceptance_length is None


def test_of_passes_that_come_as_one_no_count_is_made_up():
    figures = stats_of(MERGED).to_dict()
    unknown = {name for name, value in figures.items() if value is None}
    assert unknown == {
        *("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens"),
        *("num_accepted_tokens_per_pos", "acceptance_rate", "mean_acceptance_length", "draft_s"),
    }


def test_what_one_step_leaves_out_stays_unknown():
    stats = stats_of([MERGED_STEP, drafted_step(4, 4, 5.0)])
    assert stats.num_steps is None
    assert stats.num_accepted_tokens is None
    assert stats.num_accepted_tokens_per_pos is None
    assert stats.draft_s is None


@PARTIAL
def test_without_the_time_of_drafting_whole_steps_are_timed(events: list[GenerationEvent]):
    stats = stats_of(events)
    assert (stats.draft_s, stats.target_s) == (None, 2.25)


@pytest.mark.parametrize("order", [1, -1])
def test_times_add_up_where_only_some_steps_tell_that_of_drafting(order: int):
    steps = [drafted_step(4, 4, 2.0), untold(drafted_step(1, 4, 3.0))][::order]
    stats = stats_of(steps)
    assert (stats.draft_s, stats.target_s) == (None, 1.5)


# -- totals, where steps leave things out

TOTALS = Totals(num_drafts=3, num_draft_tokens=12, draft_s=0.75)


def with_totals(events: list[GenerationEvent], totals: Totals = TOTALS) -> GenerationStats:
    return stats_of([*events[:-1], Finish("length", 5.0, totals)])


def test_totals_stand_in_for_what_the_steps_leave_out():
    stats = with_totals(UNCOUNTED)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 12, 5)
    assert stats.acceptance_rate == pytest.approx(5 / 12)
    assert stats.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert (stats.draft_s, stats.target_s) == (0.75, 1.5)
    assert stats.to_dict() == stats_of(ROUNDS).to_dict()


def test_totals_leave_alone_what_the_steps_tell():
    others = Totals(num_drafts=99, num_draft_tokens=99, draft_s=99.0)
    assert with_totals(ROUNDS, others) == stats_of(ROUNDS)


def test_of_passes_that_come_as_one_only_the_totals_are_known():
    stats = with_totals(MERGED)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.draft_s) == (3, 12, 0.75)
    assert stats.num_accepted_tokens is stats.acceptance_rate is None
    assert stats.mean_acceptance_length is stats.num_steps is None


@pytest.mark.parametrize(
    ("totals", "known"),
    [
        (Totals(), (None, None, None)),
        (Totals(num_drafts=3), (3, None, None)),
        (Totals(num_draft_tokens=12), (None, 12, None)),
        (Totals(draft_s=0.75), (None, None, 0.75)),
    ],
)
def test_totals_may_leave_things_out_as_well(totals: Totals, known: tuple[object, ...]):
    stats = with_totals(UNCOUNTED, totals)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.draft_s) == known


def test_drafting_takes_no_longer_than_the_steps_whatever_another_clock_says():
    stats = with_totals(UNCOUNTED, Totals(draft_s=99.0))
    assert (stats.draft_s, stats.target_s) == (2.25, 0)


# -- no acceptance, no speed


def test_nothing_drafted_has_no_acceptance():
    stats = stats_of([PLAIN_STEP])
    assert stats.acceptance_rate is None
    assert stats.mean_acceptance_length is None


def test_times_keep_prefill_apart():
    stats = stats_of(ROUNDS)
    assert (stats.prefill_s, stats.decode_s, stats.elapsed_s) == (1, 4, 5)
    assert stats.time_to_first_token_s == 2
    assert (stats.draft_s, stats.target_s) == (0.75, 1.5)
    assert stats.tokens_per_second == 8 / 4
    assert stats.time_per_token_s == 4 / 8


def test_prefill_ends_with_its_last_chunk():
    stats = stats_of([Prefill(600, 256, 1.0), Prefill(600, 599, 2.0), PLAIN_STEP])
    assert (stats.num_prompt_tokens, stats.prefill_s) == (600, 2)


def test_before_the_first_step_there_is_no_speed():
    stats = stats_of(ROUNDS[:1])
    assert stats.tokens_per_second is None
    assert stats.time_per_token_s is None
    assert stats.time_to_first_token_s is None


def test_a_stream_without_its_finish_is_cancelled():
    assert stats_of(ROUNDS).finish_reason == "length"
    assert stats_of(ROUNDS[:-1]).finish_reason == "cancelled"


def test_the_json_figures_are_those_of_the_attributes():
    stats = stats_of(ROUNDS)
    figures = stats.to_dict()
    assert {name: getattr(stats, name) for name in figures} == figures


@pytest.mark.parametrize(
    ("speculative", "baseline", "expected"),
    [
        ([1, 2], [1, 2], None),
        ([], [], None),
        ([1, 2, 5], [1, 3, 6], FirstDifference(1, 2, 3)),
        ([1], [1, 2], FirstDifference(1, None, 2)),
        ([1, 2], [1], FirstDifference(1, 2, None)),
        ([], [4], FirstDifference(0, None, 4)),
    ],
)
def test_outputs_part_where_their_first_tokens_differ(speculative, baseline, expected):
    assert first_difference(speculative, baseline) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0, 1.0, 2.0], Spread(median=2, low=1, high=3)),
        ([4.0, None, 1.0], Spread(median=1, low=1, high=4)),
        ([4.0, 2.0, 3.0, 1.0], Spread(median=2, low=1, high=4)),
        ([5.0], Spread(median=5, low=5, high=5)),
        ([None], None),
        ([], None),
    ],
)
def test_a_spread_is_the_median_with_its_range(values, expected):
    assert spread_of(values) == expected


def repeat_of(tokens_per_second: float, finish_reason: str) -> GenerationStats:
    return GenerationStats(
        output_token_ids=[1, 2, 3, 4],
        elapsed_s=4 / tokens_per_second,
        finish_reason=finish_reason,
    )


def whole(*speeds: float) -> list[GenerationStats]:
    return [repeat_of(speed, "length") for speed in speeds]


def stopped(*speeds: float) -> list[GenerationStats]:
    return [repeat_of(speed, "cancelled") for speed in speeds]


@pytest.mark.parametrize(
    ("repeats", "expected"),
    [
        pytest.param(whole(5), 0, id="one"),
        pytest.param(whole(4, 1, 2), 2, id="odd"),
        pytest.param(whole(4, 1), 1, id="two"),
        pytest.param(whole(8, 1, 4, 2), 3, id="even"),
        pytest.param(whole(2, 2, 2), 1, id="equal"),
        pytest.param([*whole(4), *stopped(2, 1)], 0, id="stopped ones beside a whole one"),
        pytest.param([*stopped(1), *whole(8, 2, 4)], 3, id="a stopped one before"),
        pytest.param(stopped(1), 0, id="one that was stopped"),
        pytest.param(stopped(4, 1, 2), 2, id="none that is whole"),
    ],
)
def test_the_typical_repeat_has_the_median_speed(repeats, expected):
    assert typical(repeats) is repeats[expected]


def test_a_repeat_that_said_nothing_is_the_slowest():
    silent, *others = [GenerationStats(finish_reason="length"), *whole(2, 4)]
    assert typical([silent, *others]) is others[0]
