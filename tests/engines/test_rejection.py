"""The rule that keeps drafts: tables for greedy, statistics for everything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from random import Random
from typing import TypeAlias

import numpy as np
import pytest
import torch

from engines.rejection import Verdict, verify_draft, verify_greedy
from engines.sampling import Array, draw, one_hot
from tests.frequencies import assert_follows, assert_share

NUM_SAMPLES = 10_000
LARGEST_UNIFORM = 1 - 2**-53  # that random.random() can return
TARGET = np.array([0.6, 0.3, 0.1])
DRAFT = np.array([0.2, 0.5, 0.3])

Rule: TypeAlias = Callable[[Sequence[int], Array, Array, Sequence[float]], Verdict]
Drafter: TypeAlias = Callable[[Array, Random], int]


@pytest.mark.parametrize(
    ("draft", "target", "expected"),
    [
        pytest.param([], [4], Verdict(0, 4), id="empty draft"),
        pytest.param([1, 2, 3], [1, 2, 3, 4], Verdict(3, 4), id="all kept"),
        pytest.param([1, 2, 3], [0, 2, 3, 4], Verdict(0, 0), id="first rejected"),
        pytest.param([1, 2, 3], [1, 0, 3, 4], Verdict(1, 0), id="middle rejected"),
        pytest.param([1, 2, 3], [1, 2, 0, 4], Verdict(2, 0), id="last rejected"),
    ],
)
@pytest.mark.parametrize("to_array", [np.array, torch.tensor])
@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST_UNIFORM])
def test_a_greedy_target_keeps_what_it_would_have_said(to_array, draft, target, expected, uniform):
    draft_probs, target_probs = (to_array(np.eye(5)[np.array(ids, int)]) for ids in (draft, target))
    assert verify_draft(draft, draft_probs, target_probs, [uniform] * len(target)) == expected
    assert verify_greedy(draft, target) == expected


def test_a_token_that_the_target_excludes_is_rejected_even_at_uniform_zero():
    draft_probs, target_probs = np.array([[0.5, 0.5]]), np.array([[1.0, 0.0], [0.5, 0.5]])
    assert verify_draft([1], draft_probs, target_probs, [0.0, 0.0]) == Verdict(0, 0)


@pytest.mark.parametrize("uniform", [0.0, 0.3, LARGEST_UNIFORM])
def test_equal_distributions_accept_at_every_uniform(uniform):
    for token_id in range(3):
        verdict = verify_draft([token_id], DRAFT[None], np.stack([DRAFT, TARGET]), [uniform, 0.0])
        assert verdict == Verdict(1, 0)


def test_rows_that_differ_by_rounding_alone_leave_the_target_to_draw_from():
    # The draft has more of each entry, so nothing is unserved.
    draft_probs = np.nextafter(TARGET, 1.0)[None]
    verdict = verify_draft([2], draft_probs, np.stack([TARGET, TARGET]), [LARGEST_UNIFORM, 0.7])
    assert verdict == Verdict(0, draw(TARGET, 0.7))


def drawn(draft_probs: Array, random: Random) -> int:
    return draw(draft_probs, random.random())


def output_of_a_round(
    random: Random, target_probs: Array, draft_probs: Array, rule: Rule, drafter: Drafter
) -> tuple[int, ...]:
    """Draft, verify, and go on with the target alone to the end of `target_probs`."""
    draft = [drafter(row, random) for row in draft_probs]
    uniforms = [random.random() for _ in target_probs]
    verdict = rule(draft, draft_probs, target_probs, uniforms)
    output = [*draft[: verdict.num_accepted_tokens], verdict.next_token_id]
    output += [draw(row, random.random()) for row in target_probs[len(output) :]]
    return tuple(output)


def check_outputs(
    target_probs: Array, draft_probs: Array, *, rule: Rule = verify_draft, drafter: Drafter = drawn
) -> None:
    """Assert that rounds follow the target, in the joint distribution of all their tokens."""
    random = Random(0)
    counts = Counter(
        output_of_a_round(random, target_probs, draft_probs, rule, drafter)
        for _ in range(NUM_SAMPLES)
    )
    cells = product(range(target_probs.shape[1]), repeat=len(target_probs))
    assert_follows(
        counts, {cell: prod(target_probs[range(len(cell)), cell].tolist()) for cell in cells}
    )


def test_the_first_token_follows_the_target():
    check_outputs(np.stack([TARGET, TARGET]), DRAFT[None])


def test_all_tokens_of_a_longer_draft_follow_the_target_together():
    target_probs = np.array([TARGET, [0.1, 0.1, 0.8], [0.0, 0.5, 0.5], [0.4, 0.3, 0.3]])
    draft_probs = np.array([DRAFT, [0.3, 0.3, 0.4], [0.6, 0.2, 0.2]])
    check_outputs(target_probs, draft_probs)


@pytest.mark.parametrize("token_id", [0, 1, 2])
def test_the_output_follows_the_target_where_the_draft_is_certain(token_id):
    check_outputs(np.stack([TARGET, TARGET]), one_hot(np.array([token_id]), 3, TARGET.dtype))


def redraw_from_target(
    token_ids: Sequence[int], draft_probs: Array, target_probs: Array, uniforms: Sequence[float]
) -> Verdict:
    """Wrong: after a rejection, what the draft already served can be drawn again."""
    num_accepted = verify_draft(token_ids, draft_probs, target_probs, uniforms).num_accepted_tokens
    return Verdict(num_accepted, draw(target_probs[num_accepted], uniforms[-1]))


def accept_if_likelier(
    token_ids: Sequence[int], draft_probs: Array, target_probs: Array, uniforms: Sequence[float]
) -> Verdict:
    """Wrong: accepts by comparing the two probabilities, without chance."""
    return verify_draft(token_ids, draft_probs, target_probs, [1.0, *uniforms[1:]])


def reuse_the_uniform(
    token_ids: Sequence[int], draft_probs: Array, target_probs: Array, uniforms: Sequence[float]
) -> Verdict:
    """Wrong: the following token depends on the number that decided the first."""
    return verify_draft(token_ids, draft_probs, target_probs, [uniforms[0], uniforms[0]])


def likeliest(draft_probs: Array, random: Random) -> int:
    """Wrong: the draft was not drawn from the distribution that is handed to the rule."""
    return int(draft_probs.argmax())


@pytest.mark.parametrize("rule", [redraw_from_target, accept_if_likelier, reuse_the_uniform])
def test_a_wrong_rule_is_found_out(rule: Rule):
    with pytest.raises(AssertionError, match="standard errors"):
        check_outputs(np.stack([TARGET, TARGET]), DRAFT[None], rule=rule)


def test_a_draft_that_was_not_drawn_as_it_says_is_found_out():
    with pytest.raises(AssertionError, match="standard errors"):
        check_outputs(np.stack([TARGET, TARGET]), DRAFT[None], drafter=likeliest)


def accepted_count(token_id: int | None, draft_probs: Array) -> int:
    """Return in how many of the samples the draft is accepted; None draws each draft."""
    random = Random(0)
    target_probs = np.stack([TARGET, TARGET])
    count = 0
    for _ in range(NUM_SAMPLES):
        draft = drawn(DRAFT, random) if token_id is None else token_id
        uniforms = [random.random(), random.random()]
        count += verify_draft([draft], draft_probs, target_probs, uniforms).num_accepted_tokens
    return count


def test_the_acceptance_rate_is_what_the_distributions_share():
    assert_share(accepted_count(None, DRAFT[None]), NUM_SAMPLES, np.minimum(TARGET, DRAFT).sum())


@pytest.mark.parametrize(("token_id", "expected"), [(0, 1.0), (1, 0.3 / 0.5), (2, 0.1 / 0.3)])
def test_a_token_is_accepted_by_the_ratio_of_its_probabilities(token_id, expected):
    assert_share(accepted_count(token_id, DRAFT[None]), NUM_SAMPLES, expected)
