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
    "rejected",  # drafted and dropped: the first that verification refused
    "unverified",  # drafted behind the rejected one, so never judged
    "discarded",  # drafted behind a stop token, so never wanted
]
OUTPUT_ORIGINS: frozenset[TokenOrigin] = frozenset({"accepted", "recovered", "bonus", "target"})
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
    """One target forward pass.

    `tokens` joins the output, `rejected` is what was drafted and dropped. A plain step drafts
    nothing and has one token.
    """

    tokens: tuple[Token, ...]
    rejected: tuple[Token, ...]
    num_draft_tokens: int
    draft_s: float  # time drafting
    target_s: float  # time of the target's pass and of the verdict
    elapsed_s: float  # since the request began, less the time the consumer held the stream

    @property
    def num_accepted_tokens(self) -> int:
        return sum(token.origin == "accepted" for token in self.tokens)

    @property
    def tokens_in_place(self) -> tuple[Token, ...]:
        """Every token where it was drafted: the accepted, the dropped, then the target's own."""
        num_accepted = self.num_accepted_tokens
        return (*self.tokens[:num_accepted], *self.rejected, *self.tokens[num_accepted:])


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event. A generation that is closed early or fails has none."""

    reason: Literal["stop", "length"]
    elapsed_s: float


GenerationEvent: TypeAlias = Prefill | Step | Finish
