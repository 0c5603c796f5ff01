"""verify_draft: how much of a draft to keep, and the token that follows it.

Speculative sampling, Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1) and Chen et al. 2023
(arXiv 2302.01318, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from array_api_compat import array_namespace, device

from engines.sampling import Array, draw


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one verification."""

    num_accepted_tokens: int
    next_token_id: int  # recovered, or the bonus token where every draft token was accepted


def verify_draft(
    draft_token_ids: Sequence[int],
    draft_probs: Array,
    target_probs: Array,
    uniforms: Sequence[float],
) -> Verdict:
    """Decide how much of a draft to keep, and draw the token that follows it.

    The kept tokens and the one drawn are distributed as if sampled from the target alone. A greedy
    target is certain of one entry, which turns the rule into exact match.

    Args:
        draft_token_ids: num_draft_tokens ids, 0 of them for a plain step.
        draft_probs: [num_draft_tokens, vocab_size], what each draft token was drawn from. A token
            that was not drawn but chosen comes from a distribution that is certain of it.
        target_probs: [num_draft_tokens + 1, vocab_size], on the same device.
        uniforms: num_draft_tokens + 1 independent numbers in [0, 1): one for each draft token, the
            last for the token that follows.

    Returns:
        The number of draft tokens kept, and the id of the recovered or bonus token.
    """
    num_draft_tokens = len(draft_token_ids)
    num_accepted = 0
    for uniform, target_prob, draft_prob in zip(
        uniforms,
        probs_of(draft_token_ids, target_probs[:num_draft_tokens]),
        probs_of(draft_token_ids, draft_probs),
        strict=False,
    ):
        # Kept where uniform < min(1, target / draft); a draft that is not a number is not kept.
        if not uniform * draft_prob < target_prob:
            break
        num_accepted += 1

    weights = target_probs[num_accepted]
    if num_accepted < num_draft_tokens:  # recovered: what the draft left unserved
        xp = array_namespace(weights)
        unserved = xp.clip(weights - draft_probs[num_accepted], min=0)
        # Two rows that differ by rounding alone leave nothing; then they are the same distribution.
        weights = xp.where(xp.any(unserved > 0), unserved, weights)
    return Verdict(num_accepted, draw(weights, uniforms[-1]))


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


def probs_of(token_ids: Sequence[int], probs: Array) -> list[float]:
    """Return each row's probability of its own token: one of `probs` [num_tokens, vocab_size]."""
    xp = array_namespace(probs)
    columns = xp.asarray(token_ids, dtype=xp.int64, device=device(probs))[:, None]
    values: list[float] = xp.take_along_axis(probs, columns, axis=-1)[:, 0].tolist()
    return values
