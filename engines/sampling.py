"""Logits to probabilities to a token: temperature, top-k, top-p, inverse-CDF draws.

Written once over the array API, so that NumPy and PyTorch arrays, on CPU or CUDA, follow the same
rule. Pure: nothing is written into its inputs, and randomness comes in as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from array_api_compat import array_namespace, device

from engines.config import SamplingParams
from engines.errors import GenerationError

NOT_NUMBERS = (
    "the model returned logits that are not numbers: its weights are damaged, or the dtype is too "
    "narrow for it; try float32"
)

Array: TypeAlias = Any  # a NumPy array or a PyTorch tensor

MIN_TEMPERATURE = 1e-20  # counts for any below: in float32 the smallest become 0, and 0 / 0 a NaN


def softmax(logits: Array) -> Array:
    """Return probabilities over the last axis, in the logits' dtype."""
    xp = array_namespace(logits)
    weights = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
    return weights / xp.sum(weights, axis=-1, keepdims=True)


def greedy_token_ids(logits: Array) -> list[int]:
    """Return each row's likeliest entry, the first of equals."""
    token_ids: list[int] = array_namespace(logits).argmax(logits, axis=-1).tolist()
    return token_ids


def token_probs(logits: Array, rows: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    """Return probabilities of single entries, as `softmax` gives them, without all the others.

    Args:
        logits: [num_rows, vocab_size]
        rows: The row of each entry, in ascending order. Rows behind the last are not read.
        token_ids: The entries, as many.
    """
    xp = array_namespace(logits)
    used = logits[: rows[-1] + 1]
    largest = xp.max(used, axis=-1, keepdims=True)
    weights = used - largest
    xp.exp(weights, out=weights)  # in place: after a pass of a model all memory is far away
    totals = xp.sum(weights, axis=-1)
    where = xp.asarray(rows, dtype=xp.int64, device=device(logits))
    entries = xp.asarray(token_ids, dtype=xp.int64, device=device(logits))
    probs: list[float] = (weights[where, entries] / totals[where]).tolist()
    return probs


def one_hot(token_ids: Array, vocab_size: int, dtype: Any) -> Array:
    """Return [num_tokens, vocab_size] rows that are certain of `token_ids` [num_tokens]."""
    xp = array_namespace(token_ids)
    columns = xp.arange(vocab_size, dtype=token_ids.dtype, device=device(token_ids))
    return xp.astype(token_ids[:, None] == columns[None, :], dtype)


def to_probs(logits: Array, sampling: SamplingParams) -> Array:
    """Return the distributions that tokens are drawn from.

    Temperature first, then top-k, then top-p, each on what the one before left, as transformers
    orders them. Entries that tie with the last one kept are kept too. Greedy is a distribution
    that is certain of the likeliest entry (the first of equals), so the rejection rule needs no
    case of its own for it.

    Args:
        logits: [num_tokens, vocab_size], float32 or better: in half precision the difference of
            two probabilities can vanish.
        sampling: Applied to every row.

    Returns:
        [num_tokens, vocab_size], rows that sum to 1.
    """
    xp = array_namespace(logits)
    vocab_size = logits.shape[-1]
    if sampling.is_greedy:
        return one_hot(xp.argmax(logits, axis=-1), vocab_size, logits.dtype)
    # The maximum goes first: a tiny temperature would otherwise turn large logits into infinities.
    temperature = max(sampling.temperature, MIN_TEMPERATURE)
    logits = (logits - xp.max(logits, axis=-1, keepdims=True)) / temperature
    if 0 < sampling.top_k < vocab_size:
        smallest_kept = xp.sort(logits, axis=-1, descending=True)[:, sampling.top_k - 1, None]
        logits = xp.where(logits >= smallest_kept, logits, -xp.inf)
    probs = softmax(logits)
    if sampling.top_p < 1:
        descending = xp.sort(probs, axis=-1, descending=True)
        mass_before = xp.cumulative_sum(descending, axis=-1) - descending
        # The likeliest entry has no mass before it, so at least one is kept.
        smallest_kept = xp.min(
            xp.where(mass_before < sampling.top_p, descending, xp.inf), axis=-1, keepdims=True
        )
        probs = xp.where(probs >= smallest_kept, probs, 0)
        probs = probs / xp.sum(probs, axis=-1, keepdims=True)
    return probs


def draw(weights: Array, uniform: float) -> int:
    """Return the entry of `weights` [vocab_size] that a uniform number in [0, 1) falls on.

    The weights need not sum to 1. An entry of weight 0 is never returned.

    Raises:
        GenerationError: The weights are not numbers.
    """
    return require_entry(int(draw_entry(weights, uniform)), weights.shape[0])


def draw_entry(weights: Array, uniform: Array | float) -> Array:
    """Return what `draw` does as an array [], without waiting for the device.

    Where the weights are not numbers it is vocab_size: no entry's mass exceeds the product.
    """
    xp = array_namespace(weights)
    mass = xp.cumulative_sum(xp.astype(weights, xp.float64), axis=-1)
    return xp.searchsorted(mass, mass[-1:] * uniform, side="right")[0]


def require_entry(entry: int, vocab_size: int) -> int:
    """Return an entry that was drawn.

    Raises:
        GenerationError: None was: the weights were not numbers.
    """
    if entry == vocab_size:
        raise GenerationError(NOT_NUMBERS)
    return entry


def top_entries(probs: Array, num_entries: int) -> list[tuple[int, float]]:
    """Return the likeliest (id, probability) pairs of one row [vocab_size], likeliest first."""
    xp = array_namespace(probs)
    ids = xp.argsort(probs, axis=-1, descending=True)[:num_entries]
    return list(zip(ids.tolist(), probs[ids].tolist(), strict=True))
