"""What proposers hand over: tokens, what they were drawn from, and what they have read."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from engines.config import SamplingParams
from engines.drafting import (
    Draft,
    DraftRequest,
    EchoProposer,
    ModelProposer,
    NoProposer,
    PromptLookupProposer,
)
from engines.sampling import draw, softmax, to_probs
from tests.conftest import TableModel

SAMPLED = SamplingParams(temperature=0.7, top_k=4)
GREEDY = SamplingParams()
CONTEXT = (3, 1, 4)


def proposed(model: TableModel, sampling: SamplingParams, *, num_top_tokens: int = 0) -> Draft:
    return ModelProposer(model).propose(
        DraftRequest(CONTEXT, 3, sampling, Random(0), num_top_tokens)
    )


def logits_behind(model: TableModel, draft: Draft) -> np.ndarray:
    """Return what the model says before each token of a draft, [num_draft_tokens, vocab_size]."""
    token_ids = (*CONTEXT, *draft.token_ids)
    num_context = len(CONTEXT)
    return np.stack(
        [
            model.table[token_ids[i - 1], token_ids[i - 2]]
            for i in range(num_context, len(token_ids))
        ]
    )


def test_every_token_is_drawn_from_the_row_that_comes_with_it():
    draft = proposed(TableModel.random(0), SAMPLED)
    random = Random(0)
    assert draft.probs is not None
    assert draft.token_ids == tuple(draw(row, random.random()) for row in draft.probs)


def test_the_rows_are_those_of_the_model_under_the_sampling_asked_for():
    model = TableModel.random(0)
    draft = proposed(model, SAMPLED)
    np.testing.assert_array_equal(draft.probs, to_probs(logits_behind(model, draft), SAMPLED))


def test_a_greedy_draft_is_certain_of_the_likeliest_and_reports_how_sure_the_model_was():
    model = TableModel.random(0)
    draft = proposed(model, GREEDY, num_top_tokens=2)
    plain = softmax(logits_behind(model, draft))
    assert draft.probs is None
    assert draft.token_ids == tuple(plain.argmax(axis=-1).tolist())
    assert draft.reported_probs == pytest.approx(plain.max(axis=-1).tolist(), rel=1e-6)
    assert [top[0][0] for top in draft.top] == list(draft.token_ids)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_draft_ends_behind_the_first_token_that_its_model_is_unsure_of(sampling):
    whole = proposed(TableModel.random(0), sampling)
    for least in (0.0, *(prob for prob in whole.reported_probs if prob is not None), 1.0):
        model = TableModel.random(0)
        request = DraftRequest(CONTEXT, 3, sampling, Random(0), min_prob=least)
        draft = ModelProposer(model).propose(request)

        unsure = [prob < least for prob in whole.reported_probs if prob is not None]
        expected = unsure.index(True) + 1 if True in unsure else 3
        assert draft.token_ids == whole.token_ids[:expected]
        assert model.num_passes == expected


def test_a_sampled_draft_reports_what_it_was_drawn_from():
    draft = proposed(TableModel.random(0), SAMPLED, num_top_tokens=2)
    assert draft.probs is not None
    assert draft.reported_probs == tuple(
        float(row[id_]) for row, id_ in zip(draft.probs, draft.token_ids, strict=True)
    )
    assert [top[0][1] for top in draft.top] == [row.max() for row in draft.probs]


def test_no_top_entries_are_reported_unless_asked_for():
    assert proposed(TableModel.random(0), GREEDY).top == ()


def test_a_draft_takes_one_pass_a_token():
    model = TableModel.random(0)
    proposed(model, GREEDY)
    assert model.num_passes == 3


def test_the_last_token_of_a_kept_draft_is_read_with_the_bonus_token():
    model = TableModel.random(0)
    proposer = ModelProposer(model)
    draft = proposed(model, GREEDY)
    context = (*CONTEXT, *draft.token_ids, 5)
    proposer.keep(len(context) - 1)
    assert model.token_ids == list(context[:-2])

    proposer.propose(DraftRequest(context, 1, GREEDY, Random(0)))

    assert model.token_ids == list(context)


def test_keep_forgets_what_lies_beyond():
    model = TableModel.random(0)
    draft = proposed(model, GREEDY)
    ModelProposer(model).keep(len(CONTEXT) + 1)
    assert model.token_ids == [*CONTEXT, draft.token_ids[0]]


def test_prompt_lookup_is_certain_of_what_it_proposes():
    proposer = PromptLookupProposer()
    draft = proposer.propose(DraftRequest((1, 2, 3, 4, 1, 2), 2, SAMPLED, Random(0)))
    assert draft == Draft((3, 4), probs=None, reported_probs=(1.0, 1.0))


def test_no_proposer_proposes_nothing():
    assert NoProposer().propose(DraftRequest(CONTEXT, 4, SAMPLED, Random(0))) == Draft()


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, (4,)), (3, (3, 1, 4)), (5, (1, 4, 3, 1, 4))]
)
def test_an_echo_is_as_long_as_asked_for(num_tokens, expected):
    draft = EchoProposer().propose(DraftRequest(CONTEXT, num_tokens, GREEDY, Random(0)))
    assert draft.token_ids == expected
    assert draft.reported_probs == (1.0,) * num_tokens
