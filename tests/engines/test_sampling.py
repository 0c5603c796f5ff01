"""Temperature, top-k, top-p and draws: by hand, against transformers, on NumPy and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engines.config import SamplingParams
from engines.sampling import (
    draw,
    greedy_token_ids,
    one_hot,
    softmax,
    to_probs,
    token_probs,
    top_entries,
)

ARRAYS = [pytest.param(np.array, id="numpy"), pytest.param(torch.tensor, id="torch")]
LOGITS = np.log(np.array([[4.0, 2.0, 1.0, 1.0]]))
PROBS = [1 / 2, 1 / 4, 1 / 8, 1 / 8]  # at temperature 1
LARGEST_UNIFORM = 1 - 2**-53  # that random.random() can return

ToArray = Callable[[Any], Any]


@pytest.mark.parametrize("to_array", ARRAYS)
@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(temperature=1), PROBS),
        # Half the temperature squares the weights: 16, 4, 1, 1.
        (SamplingParams(temperature=0.5), [16 / 22, 4 / 22, 1 / 22, 1 / 22]),
        (SamplingParams(temperature=1, top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (SamplingParams(temperature=1, top_k=3), PROBS),  # the fourth ties with the third
        (SamplingParams(temperature=1, top_k=9), PROBS),
        (SamplingParams(temperature=1, top_p=0.6), [2 / 3, 1 / 3, 0, 0]),
        (SamplingParams(temperature=1, top_p=0.8), PROBS),  # the fourth ties with the third
        (SamplingParams(temperature=1, top_p=1e-6), [1, 0, 0, 0]),
        # Of the two that top-k leaves, the first alone has more mass than top-p asks for.
        (SamplingParams(temperature=1, top_k=2, top_p=0.6), [1, 0, 0, 0]),
        # So it has at half the temperature, but not at 1.
        (SamplingParams(temperature=0.5, top_p=0.6), [1, 0, 0, 0]),
    ],
)
def test_probabilities_are_those_worked_out_by_hand(to_array: ToArray, sampling, expected):
    probs = to_probs(to_array(LOGITS), sampling)
    assert np.asarray(probs)[0] == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(top_k)) * 3
    warped = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)

    probs = to_probs(logits, SamplingParams(temperature, top_k, top_p))

    torch.testing.assert_close(probs, torch.softmax(warped, dim=-1))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_k=5, top_p=0.7),
    ],
)
def test_numpy_and_torch_agree(sampling):
    logits = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    on_numpy, on_torch = to_probs(logits, sampling), to_probs(torch.tensor(logits), sampling)
    assert on_numpy.dtype == np.float32
    assert on_torch.dtype == torch.float32
    np.testing.assert_allclose(on_numpy, on_torch, rtol=1e-5)
    for row in range(20):
        uniform = row / 20
        assert draw(on_numpy[row], uniform) == draw(on_torch[row], uniform)
        likeliest, _ = zip(*top_entries(on_numpy[row], 3), strict=True)
        assert likeliest == tuple(id_ for id_, _ in top_entries(on_torch[row], 3))


@pytest.mark.parametrize("to_array", ARRAYS)
def test_inputs_are_never_written_into(to_array: ToArray):
    logits, weights = to_array(LOGITS), to_array(LOGITS[0] + 1)
    for sampling in (SamplingParams(), SamplingParams(temperature=0.5, top_k=2, top_p=0.5)):
        to_probs(logits, sampling)
    softmax(logits)
    draw(weights, 0.5)
    top_entries(weights, 2)
    assert np.array_equal(np.asarray(logits), LOGITS)
    assert np.array_equal(np.asarray(weights), LOGITS[0] + 1)


@pytest.mark.parametrize("to_array", ARRAYS)
def test_greedy_is_certain_of_the_first_maximum(to_array: ToArray):
    logits = to_array([[0.0, 3.0, 3.0], [-1.0, -3.0, -2.0]])
    assert to_probs(logits, SamplingParams()).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert greedy_token_ids(logits) == [1, 0]


@pytest.mark.parametrize("to_array", ARRAYS)
def test_single_probabilities_are_those_of_whole_rows(to_array: ToArray):
    values = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32) * 40
    logits = to_array(values)
    rows, token_ids = [0, 1, 1], [3, 999, int(values[1].argmax())]
    expected = [float(softmax(logits)[row, id_]) for row, id_ in zip(rows, token_ids, strict=True)]
    assert token_probs(logits, rows, token_ids) == pytest.approx(expected, rel=1e-5)
    assert np.array_equal(np.asarray(logits), values)


@pytest.mark.parametrize("to_array", ARRAYS)
def test_a_row_that_is_not_numbers_has_no_probabilities(to_array: ToArray):
    logits = to_array(np.array([[0.0, 1.0], [np.nan, 1.0]], np.float32))
    assert np.isnan(token_probs(logits, [0, 1], [0, 1])).tolist() == [False, True]


@pytest.mark.parametrize("to_array", ARRAYS)
def test_one_hot_of_no_tokens_has_no_rows(to_array: ToArray):
    no_tokens = to_array([0])[:0]
    assert one_hot(no_tokens, 5, to_array([0.0]).dtype).shape == (0, 5)


@pytest.mark.parametrize("to_array", ARRAYS)
@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_a_tiny_temperature_is_near_greedy(to_array: ToArray, temperature):
    logits = to_array(np.array([[50.0, -50.0, 80.0, 80.0]], dtype=np.float32))
    probs = to_probs(logits, SamplingParams(temperature=temperature, top_p=0.9))
    assert probs.tolist() == [[0, 0, 0.5, 0.5]]


@pytest.mark.parametrize("to_array", ARRAYS)
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_extreme_logits_make_probabilities(to_array: ToArray, top_p):
    logits = to_array(np.array([[1e38, -1e38, -np.inf], [-1e38, -1e38, -np.inf]], dtype=np.float32))
    probs = to_probs(logits, SamplingParams(temperature=1, top_k=2, top_p=top_p))
    assert probs.tolist() == [[1, 0, 0], [0.5, 0.5, 0]]


rows = st.lists(
    st.one_of(st.just(0.0), st.floats(0, 1, width=32), st.sampled_from([1e-30, 1e-8, 1.0])),
    min_size=1,
    max_size=12,
).filter(any)
uniforms = st.one_of(
    st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, LARGEST_UNIFORM])
)


@settings(deadline=None)
@given(weights=rows, uniform=uniforms)
def test_draw_never_returns_an_entry_of_weight_zero(weights, uniform):
    for row in (np.array(weights, dtype=np.float32), torch.tensor(weights, dtype=torch.float32)):
        assert row[draw(row, uniform)] > 0


@settings(deadline=None)
@given(
    logits=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12),
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 15),
    top_p=st.floats(1e-6, 1),
)
def test_rows_sum_to_one_and_keep_the_likeliest_entry(logits, temperature, top_k, top_p):
    row = np.array(logits, dtype=np.float32)
    probs = to_probs(row[None], SamplingParams(temperature, top_k, top_p))[0]
    assert probs.sum() == pytest.approx(1, abs=1e-5)
    assert probs[row.argmax()] == probs.max() > 0


@pytest.mark.parametrize("to_array", ARRAYS)
@pytest.mark.parametrize(
    ("uniform", "entry"),
    [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (LARGEST_UNIFORM, 4)],
)
def test_draw_inverts_the_cumulative_weights(to_array: ToArray, uniform, entry):
    # They sum to 4, not 1, with gaps before, between and behind.
    weights = to_array([0.0, 1.0, 0.0, 2.0, 1.0, 0.0])
    assert draw(weights, uniform) == entry


@pytest.mark.parametrize("to_array", ARRAYS)
def test_draw_stays_exact_over_a_large_vocabulary(to_array: ToArray):
    num_entries = 200_000
    weights = to_array(np.full(num_entries, 1 / num_entries, dtype=np.float32))
    for entry in range(0, num_entries, 9_999):
        assert draw(weights, (entry + 0.5) / num_entries) == entry


@pytest.mark.parametrize("to_array", ARRAYS)
def test_top_entries_come_likeliest_first(to_array: ToArray):
    probs = to_array([0.125, 0.5, 0.125, 0.25])
    assert top_entries(probs, 3) == [(1, 0.5), (3, 0.25), (0, 0.125)]
    assert len(top_entries(probs, 9)) == 4
