"""judge_draft: how much of a draft to keep, and the token that follows it.

Speculative sampling, Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1) and Chen et al. 2023
(arXiv 2302.01318, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from array_api_compat import array_namespace, device

from engines.sampling import Array, draw_entry, require_entry


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one verification."""

    num_accepted_tokens: int
    next_token_id: int  # recovered, or the bonus token where every draft token was accepted


def judge_draft(
    draft_token_ids: Array, draft_probs: Array, target_probs: Array, uniforms: Array
) -> tuple[Array, Array]:
    """Decide how much of a draft to keep, and draw the token that follows it.

    The kept tokens and the one drawn are distributed as if sampled from the target alone. A greedy
    target is certain of one entry, which turns the rule into exact match. All arrays are on one
    device, which is never waited for.

    Args:
        draft_token_ids: [num_draft_tokens] int64, none of them for a plain step.
        draft_probs: [num_draft_tokens, vocab_size], what each draft token was drawn from. A token
            that was not drawn but chosen comes from a distribution that is certain of it.
        target_probs: [num_draft_tokens + 1, vocab_size]
        uniforms: [num_draft_tokens + 1] float64, independent numbers in [0, 1): one for each draft
            token, the last for the token that follows.

    Returns:
        num_accepted: [] int64, the number of draft tokens kept.
        next_token_id: [] int64, the recovered or bonus token; as `draw_entry` gives it.
    """
    xp = array_namespace(target_probs)
    num_draft_tokens = draft_token_ids.shape[0]
    drafted, judged = (
        xp.astype(probs_of(draft_token_ids, probs), xp.float64)
        for probs in (draft_probs, target_probs[:num_draft_tokens])
    )
    # Kept where uniform < min(1, target / draft); a draft that is not a number is not kept.
    num_accepted = num_leading(uniforms[:-1] * drafted < judged)
    weights = xp.take(target_probs, num_accepted[None], axis=0)[0]
    if num_draft_tokens > 0:
        row = xp.clip(num_accepted[None], max=num_draft_tokens - 1)
        unserved = xp.clip(weights - xp.take(draft_probs, row, axis=0)[0], min=0)
        # Two rows that differ by rounding alone leave nothing; then they are the same distribution.
        is_recovered = (num_accepted < num_draft_tokens) & xp.any(unserved > 0)
        weights = xp.where(is_recovered, unserved, weights)
    return num_accepted, draw_entry(weights, uniforms[-1])


def verify_draft(
    draft_token_ids: Sequence[int],
    draft_probs: Array,
    target_probs: Array,
    uniforms: Sequence[float],
) -> Verdict:
    """Return what `judge_draft` decides, from ids and numbers on the host.

    Raises:
        GenerationError: The probabilities are not numbers.
    """
    xp, where = array_namespace(target_probs), device(target_probs)
    num_accepted, next_token_id = judge_draft(
        xp.asarray(draft_token_ids, dtype=xp.int64, device=where),
        draft_probs,
        target_probs,
        xp.asarray(uniforms, dtype=xp.float64, device=where),
    )
    vocab_size = target_probs.shape[-1]
    return Verdict(int(num_accepted), require_entry(int(next_token_id), vocab_size))


def judge_greedy(draft_token_ids: Array, target_token_ids: Array) -> tuple[Array, Array]:
    """Return what `verify_greedy` decides as arrays, without waiting for the device.

    Args:
        draft_token_ids: [num_draft_tokens]
        target_token_ids: [num_draft_tokens + 1]
    """
    xp = array_namespace(target_token_ids)
    num_accepted = num_leading(draft_token_ids == target_token_ids[:-1])
    return num_accepted, xp.take(target_token_ids, num_accepted[None], axis=0)[0]


def verify_greedy(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> Verdict:
    """Return what `verify_draft` decides where the target is certain of one entry in each row.

    Then its rule is exact match, whatever the draft was drawn from, and no distribution is needed.

    Args:
        draft_token_ids: num_draft_tokens ids.
        target_token_ids: num_draft_tokens + 1 ids, the likeliest of each row.
    """
    num_accepted = 0
    for drafted, certain in zip(draft_token_ids, target_token_ids, strict=False):
        if drafted != certain:
            break
        num_accepted += 1
    return Verdict(num_accepted, target_token_ids[num_accepted])


def num_leading(is_kept: Array) -> Array:
    """Return [] int64: how many of [num_tokens] are true before the first that is not."""
    xp = array_namespace(is_kept)
    return xp.sum(xp.cumulative_prod(xp.astype(is_kept, xp.int64)))


def probs_of(token_ids: Array, probs: Array) -> Array:
    """Return [num_tokens]: each row's probability of its own token, of [num_tokens, vocab_size]."""
    return array_namespace(probs).take_along_axis(probs, token_ids[:, None], axis=-1)[:, 0]
