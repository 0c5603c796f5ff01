"""The replayed loop: by hand, and against the real one."""

from __future__ import annotations

from math import sqrt
from statistics import fmean, variance

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from engines.config import GenerationRequest, SamplingParams
from engines.distill.acceptance import Acceptance, replay, total
from engines.drafting import ModelProposer, NoProposer, Proposer
from engines.sampling import softmax
from engines.speculative import Round, StepwiseRounds, decode
from tests.conftest import STOP_ID, TableModel

T, F = True, False


@pytest.mark.parametrize(
    ("is_match", "num_draft_tokens", "expected"),
    [
        ([], 4, (0, 0, 0)),
        ([F], 4, (1, 1, 0)),
        ([T], 4, (1, 1, 1)),
        ([F, F, F], 2, (3, 5, 0)),
        ([T, T, T, T, T, T], 2, (2, 4, 4)),  # two kept and the target's own, twice
        ([T, F, T, T, F, F], 2, (3, 5, 3)),  # kept 1 and recovered; kept 2 and a bonus; rejected
        ([T, T, F, T], 4, (2, 5, 3)),  # of the last draft only what the text still has
        ([T, F, T, F, T], 1, (3, 3, 3)),  # what the target says itself is not guessed
        ([F, T, T, T, T, T], 8, (2, 11, 5)),
    ],
)
def test_a_text_is_replayed_as_by_hand(
    is_match: list[bool], num_draft_tokens: int, expected: tuple[int, int, int]
):
    num_drafts, num_drafted, num_accepted = expected
    result = replay(is_match, num_draft_tokens)

    assert result.num_drafts == num_drafts
    assert result.num_accepted_tokens == num_accepted
    assert result.num_draft_tokens == num_drafted


def test_texts_add_up():
    result = total([replay([T, T, F], 2), replay([F], 2)])

    assert result == Acceptance(num_drafts=2, num_draft_tokens=3, num_accepted_tokens=2)
    assert result.acceptance_rate == 2 / 3
    assert result.mean_acceptance_length == 1 + 2 / 2
    assert total([]) == Acceptance()


def tables(seed: int, noise: float) -> tuple[TableModel, TableModel]:
    target = TableModel.random(seed)
    return target, TableModel(target.table + np.float32(noise) * TableModel.random(seed + 1).table)


def rounds_of(
    target: TableModel,
    proposer: Proposer,
    *,
    num_draft_tokens: int,
    num_tokens: int,
    temperature: float,
    seed: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
) -> list[Round]:
    request = GenerationRequest(
        (0,),
        draft_kind="model" if num_draft_tokens else "none",
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=num_tokens,
        sampling=SamplingParams(temperature=temperature, seed=seed),
    )
    rounds = StepwiseRounds(target, proposer, request)
    items = decode(rounds, request, stop_token_ids=stop_token_ids, context_length=10**6)
    return [item for item in items if isinstance(item, Round)]


def output_of(rounds: list[Round]) -> list[int]:
    return [id_ for round_ in rounds for id_ in round_.output_token_ids]


def num_accepted(round_: Round) -> int:
    """Return how many draft tokens joined the output: none behind a stop token."""
    return min(round_.verification.verdict.num_accepted_tokens, len(round_.output_token_ids))


def logits_along(model: TableModel, text: list[int]) -> np.ndarray:
    return TableModel(model.table).forward([0, *text[:-1]], num_logits=len(text))


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    noise=st.sampled_from([0.0, 0.3, 1.0]),
    num_draft_tokens=st.integers(1, 8),
    num_tokens=st.integers(1, 50),
    stops=st.booleans(),
)
def test_the_greedy_loop_accepts_what_the_replay_says(
    seed: int, noise: float, num_draft_tokens: int, num_tokens: int, stops: bool
):
    target, draft = tables(seed, noise)
    stop_token_ids = frozenset({STOP_ID} if stops else ())
    plain, rounds = (
        rounds_of(
            TableModel(target.table),
            proposer,
            num_draft_tokens=number,
            num_tokens=num_tokens,
            temperature=0,
            stop_token_ids=stop_token_ids,
        )
        for proposer, number in ((NoProposer(), 0), (ModelProposer(draft), num_draft_tokens))
    )
    text = output_of(plain)
    if len(text) == num_tokens:  # the loop drafts less where a limit ends the output
        rounds = rounds[:-1]
        text = text[: len(output_of(rounds))]

    is_match = (logits_along(draft, text).argmax(-1) == text).tolist() if text else []
    result = replay(is_match, num_draft_tokens)

    assert output_of(rounds) == text
    assert result.num_drafts == len(rounds)
    assert result.num_accepted_tokens == sum(map(num_accepted, rounds))


@pytest.mark.parametrize("num_draft_tokens", [2, 5])
def test_at_temperature_1_the_loop_accepts_as_much_as_a_replay_of_chances(num_draft_tokens: int):
    target, draft = tables(11, 0.7)
    looped, replayed = [], []
    for seed in range(100):
        rounds = rounds_of(
            TableModel(target.table),
            ModelProposer(TableModel(draft.table)),
            num_draft_tokens=num_draft_tokens,
            num_tokens=80,
            temperature=1,
            seed=seed,
        )
        looped.append(1 + fmean(map(num_accepted, rounds)))
        text = output_of(
            rounds_of(
                TableModel(target.table),
                NoProposer(),
                num_draft_tokens=0,
                num_tokens=80,
                temperature=1,
                seed=1000 + seed,
            )
        )
        rows = np.arange(len(text))
        target_probs = softmax(logits_along(target, text))[rows, text]
        draft_probs = softmax(logits_along(draft, text))[rows, text]
        uniforms = np.random.default_rng(seed).random(len(text))
        is_match = (uniforms < np.minimum(1, draft_probs / target_probs)).tolist()
        replayed.append(replay(is_match, num_draft_tokens).mean_acceptance_length)

    standard_error = sqrt((variance(looped) + variance(replayed)) / len(looped))
    assert 1.5 < fmean(looped) < 1 + num_draft_tokens - 0.5  # neither all nor nothing
    assert abs(fmean(looped) - fmean(replayed)) <= 4 * standard_error
    assert standard_error < 0.06
