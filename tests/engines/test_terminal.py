"""Runs on a terminal: tokens with their marks, and figures that say what is not known."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from engines.events import DROPPED_ORIGINS, GenerationEvent, Step, Token, TokenOrigin
from engines.stats import GenerationStats, stats_of
from engines.terminal import stats_lines, step_text
from tests.engines.test_stats import MERGED, PLAIN_STEP, ROUNDS, UNCOUNTED, UNTOLD, untold

# A greedy target continues 5 6, and the draft proposed 5 9 9.
STEP = Step(
    tokens=(Token(5, "five", "accepted"), Token(6, "six", "recovered")),
    rejected=(Token(9, "nine", "rejected"), Token(9, "nine\n", "unverified")),
    num_draft_tokens=3,
    draft_s=0.1,
    target_s=0.2,
    elapsed_s=1.5,
)
GREEN, YELLOW, DIM, RESET = "\x1b[32m", "\x1b[33m", "\x1b[2m", "\x1b[0m"


def test_dropped_drafts_are_struck_through_in_their_place():
    assert step_text(STEP, colour=True) == (
        f"{GREEN}five{RESET}\x1b[31;9mnine{RESET}\x1b[2;9mnine⏎{RESET}{YELLOW}six{RESET}"
    )


def test_dropped_drafts_that_are_not_told_have_their_number_in_their_place():
    assert step_text(untold(STEP), colour=True) == (
        f"{GREEN}five{RESET}{DIM}⊘2{RESET}{YELLOW}six{RESET}"
    )


@pytest.mark.parametrize("num_draft_tokens", [1, None])
def test_there_is_no_mark_where_no_drop_is_known(num_draft_tokens: int | None):
    step = replace(untold(STEP), num_draft_tokens=num_draft_tokens)
    assert step_text(step, colour=True) == f"{GREEN}five{RESET}{YELLOW}six{RESET}"


@pytest.mark.parametrize("step", [STEP, untold(STEP)])
def test_without_colour_a_step_is_its_output(step: Step):
    assert step_text(step, colour=False) == "fivesix"


@pytest.mark.parametrize("origin", get_args(TokenOrigin))
def test_every_origin_can_be_shown(origin: TokenOrigin):
    token = Token(5, "word\x1b[2J", origin)
    is_dropped = origin in DROPPED_ORIGINS
    step = Step(() if is_dropped else (token,), (token,) if is_dropped else (), 1, 0.1, 0.2, 1.5)
    shown = step_text(step, colour=True)
    assert "word\ufffd[2J" in shown
    assert shown.endswith(RESET)


def test_the_figures_of_a_run_are_two_lines():
    assert stats_lines("speculative", stats_of(ROUNDS)) == [
        "speculative: 8 tokens in 3 steps, 2.0 tokens/s, first token after 2.00 s, ended by length",
        "  accepted 5 of 12 drafted (42%), 2.67 tokens a draft",
    ]


@pytest.mark.parametrize("events", [[PLAIN_STEP], ROUNDS[:1], []])
def test_where_nothing_was_drafted_there_is_no_acceptance(events: list[GenerationEvent]):
    assert len(stats_lines("baseline", stats_of(events))) == 1


@pytest.mark.parametrize(
    ("events", "steps", "acceptance"),
    [
        pytest.param(
            UNTOLD,
            "8 tokens in 3 steps,",
            "  accepted 5 of 12 drafted (42%), 2.67 tokens a draft",
            id="untold",
        ),
        pytest.param(
            UNCOUNTED,
            "8 tokens in 3 steps,",
            "  accepted: 5; drafted: not reported; tokens a draft: not reported",
            id="uncounted",
        ),
        pytest.param(
            UNCOUNTED[:3],
            "7 tokens in 2 steps,",
            "  accepted: 5; drafted: not reported; tokens a draft: 3.50",
            id="uncounted, where each step drafted",
        ),
        pytest.param(
            MERGED,
            "8 tokens, steps not reported,",
            "  accepted: not reported; drafted: not reported; tokens a draft: not reported",
            id="merged",
        ),
    ],
)
def test_what_is_not_reported_is_called_so(
    events: list[GenerationEvent], steps: str, acceptance: str
):
    stats: GenerationStats = stats_of(events)
    first, second = stats_lines("speculative", stats)
    assert first.startswith(f"speculative: {steps} ")
    assert second == acceptance
