"""What a generation emits: Prefill, Step, Finish, and the tokens they carry.

Plain Python values only: no tensors, nothing that keeps device memory alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

TokenOrigin = Literal[
    "accepted",  # drafted and kept
    "recovered",  # drawn from the corrected distribution at the first rejection
    "bonus",  # drawn from the target when the whole draft was kept
    "target",  # drawn from the target where nothing was drafted
    "unreported",  # joined the output; which of these parts it played was not reported
    "rejected",  # drafted and dropped: the first that verification refused
    "unverified",  # drafted behind the rejected one, so never judged
    "discarded",  # drafted behind a stop token, so never wanted
]
OUTPUT_ORIGINS: frozenset[TokenOrigin] = frozenset(
    {"accepted", "recovered", "bonus", "target", "unreported"}
)
DROPPED_ORIGINS: frozenset[TokenOrigin] = frozenset({"rejected", "unverified", "discarded"})


@dataclass(frozen=True, slots=True)
class TopEntry:
    """One of the likeliest entries of a next-token distribution."""

    id: int
    text: str
    prob: float  # 0-1


@dataclass(frozen=True, slots=True)
class Token:
    """One vocabulary entry, with the part it played in its step.

    The probabilities are those of the distribution the rule compared, after temperature, top-k and
    top-p. Greedy decoding compares only the likeliest entry, so there they are the plain softmax
    and say how sure each model was. `None` means that the back end does not report the value.
    """

    id: int
    text: str  # what it adds to the output: "" for control tokens and unfinished characters
    origin: TokenOrigin
    control: str = ""  # the name of a control token, such as an end of text
    target_prob: float | None = None
    draft_prob: float | None = None
    uniform: float | None = None  # 0-1, the draw it was accepted, rejected or chosen by
    top_target: tuple[TopEntry, ...] = ()
    top_draft: tuple[TopEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefill:
    """The target has read the prompt, all but its last token, up to `num_cached_tokens`.

    A long prompt is read in chunks with an event after each, so that it can be stopped, by the
    target and then by the draft. The last event comes when both are done.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """One target forward pass, or several that a back end reports as one.

    `tokens` joins the output, `rejected` is what was drafted and dropped. A plain step drafts
    nothing and has one token.

    `None` means that the back end does not report the value. Where it does not report how much was
    drafted, recovered and bonus cannot be told apart, and the token behind the accepted ones is
    unreported. Where passes that drafted come as one, every token is.
    """

    tokens: tuple[Token, ...]
    rejected: tuple[Token, ...] | None  # None: which were dropped, not whether any were
    num_draft_tokens: int | None
    draft_s: float | None  # time drafting
    target_s: float  # of the target's pass and the verdict; of the whole step if draft_s is None
    elapsed_s: float  # since the request began, less the time the consumer held the stream

    @property
    def dropped_place(self) -> int:
        """Where in `tokens` the dropped drafts belong: behind the accepted."""
        return sum(token.origin == "accepted" for token in self.tokens)

    @property
    def tokens_in_place(self) -> tuple[Token, ...]:
        """Every token where it was drafted: the accepted, the dropped, then the target's own."""
        place = self.dropped_place
        return (*self.tokens[:place], *(self.rejected or ()), *self.tokens[place:])

    @property
    def num_passes(self) -> int | None:
        """Target passes. Each ends with a token that is not accepted, or with a stop token."""
        num_own = len(self.tokens) - self.dropped_place
        is_known = num_own <= 1 or all(token.origin != "unreported" for token in self.tokens)
        return max(num_own, 1) if is_known else None

    @property
    def num_drafts(self) -> int | None:
        """Target passes for which something was drafted."""
        if self.num_draft_tokens == 0:
            return 0
        has_draft = self.num_draft_tokens is not None or any(
            token.origin in ("accepted", "recovered", "bonus") for token in self.tokens
        )
        return self.num_passes if has_draft else None

    @property
    def num_accepted_tokens(self) -> int | None:
        return None if self.num_passes is None else self.dropped_place

    @property
    def num_dropped_tokens(self) -> int | None:
        if self.num_draft_tokens is None or self.num_accepted_tokens is None:
            return None
        return self.num_draft_tokens - self.num_accepted_tokens


@dataclass(frozen=True, slots=True)
class Totals:
    """What a back end reports only of a generation as a whole; None where not even that."""

    num_drafts: int | None = None  # target passes for which something was drafted
    num_draft_tokens: int | None = None
    draft_s: float | None = None  # time drafting


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event. A generation that is closed early or fails has none."""

    reason: Literal["stop", "length"]
    elapsed_s: float
    totals: Totals = Totals()  # they stand in for what the steps left out


GenerationEvent: TypeAlias = Prefill | Step | Finish
