"""What a speculative loop would accept, replayed on text that the target has written.

No drafting is needed for it. In the loop every output token follows the target's distribution, and
a draft token stands in its place with probability min(1, draft / target), greedy or not: where a
token of the target's text is given, that chance alone decides whether the draft had guessed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often drafts were accepted, over any number of texts."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
        )

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def mean_acceptance_length(self) -> float:
        return 1 + self.num_accepted_tokens / self.num_drafts


def replay(is_match: Sequence[bool], num_draft_tokens: int) -> Acceptance:
    """Walk over one text as the loop would.

    Where a limit has cut the text, its last step drafts one token more than the loop does, which
    leaves the last place to the target.

    Args:
        is_match: For each token of the text, whether a draft token in its place is accepted.
        num_draft_tokens: Drafted per step; fewer at the end, where the text has fewer left.
    """
    position = num_drafts = num_drafted = num_accepted = 0
    while position < len(is_match):
        draft = is_match[position : position + num_draft_tokens]
        accepted = draft.index(False) if False in draft else len(draft)
        num_drafts += 1
        num_drafted += len(draft)
        num_accepted += accepted
        position += accepted + 1
    return Acceptance(num_drafts, num_drafted, num_accepted)


def total(parts: Iterable[Acceptance]) -> Acceptance:
    """Return the sum of several."""
    return sum(parts, Acceptance())
