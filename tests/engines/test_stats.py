"""The figures: counts, rates and times from events, differences and spreads."""

from __future__ import annotations

from math import log

import pytest

from engines.events import Finish, GenerationEvent, Prefill, Step, Token, TokenOrigin
from engines.stats import FirstDifference, Spread, first_difference, spread_of, stats_of


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


def test_prefill_ends_with_its_last_chunk():
    stats = stats_of([Prefill(600, 256, 1.0), Prefill(600, 599, 2.0), PLAIN_STEP])
    assert (stats.num_prompt_tokens, stats.prefill_s) == (600, 2)


def test_before_the_first_step_there_is_no_speed():
    stats = stats_of(ROUNDS[:1])
    assert stats.tokens_per_second is None
    assert stats.time_to_first_token_s is None


def test_a_stream_without_its_finish_is_cancelled():
    assert stats_of(ROUNDS).finish_reason == "length"
    assert stats_of(ROUNDS[:-1]).finish_reason == "cancelled"


def test_the_json_figures_are_those_of_the_attributes():
    stats = stats_of(ROUNDS)
    figures = stats.to_dict()
    assert {name: getattr(stats, name) for name in figures} == figures


def outputs(*tokens_: tuple[int, float | None]) -> list[Token]:
    return [Token(id_, "x", "target", target_prob=prob) for id_, prob in tokens_]


def test_equal_outputs_have_no_difference():
    assert first_difference(outputs((1, 0.9), (2, 0.8)), outputs((1, 0.9), (2, 0.7))) is None


def test_the_first_difference_comes_with_the_gap_between_the_logits():
    ours, theirs = outputs((1, 0.9), (2, 0.5), (5, 0.9)), outputs((1, 0.9), (3, 0.25), (6, 0.9))
    assert first_difference(ours, theirs) == FirstDifference(1, 2, 3, logit_gap=log(2))


@pytest.mark.parametrize("probs", [(None, 0.5), (0.5, None), (None, None)])
def test_the_gap_is_unknown_where_a_probability_is_not_reported(probs):
    ours, theirs = (outputs((id_, prob)) for id_, prob in enumerate(probs))
    assert first_difference(ours, theirs) == FirstDifference(0, 0, 1, None)


def test_an_output_that_ends_early_differs_where_the_other_goes_on():
    short, long = outputs((1, 0.9)), outputs((1, 0.9), (2, 0.8))
    assert first_difference(short, long) == FirstDifference(1, None, 2, None)
    assert first_difference(long, short) == FirstDifference(1, 2, None, None)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0, 1.0, 2.0], Spread(median=2, low=1, high=3)),
        ([4.0, None, 1.0], Spread(median=2.5, low=1, high=4)),
        ([5.0], Spread(median=5, low=5, high=5)),
        ([None], None),
        ([], None),
    ],
)
def test_a_spread_is_the_median_with_its_range(values, expected):
    assert spread_of(values) == expected
