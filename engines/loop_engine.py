"""What engines share whose two cached models are driven by our own loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from engines.config import DraftKind, GenerationRequest
from engines.drafting import (
    PREFILL_CHUNK_TOKENS,
    CachedModel,
    EchoProposer,
    ModelProposer,
    NoProposer,
    PromptLookupProposer,
    Proposer,
    prefill_chunks,
)
from engines.errors import EngineError, translate_errors
from engines.generation import Rounds
from engines.speculative import Round, RoundMaker, StepwiseRounds, decode
from engines.text_engine import TextEngine
from engines.tokenizer import generation_settings

WARM_UP_ROUNDS = 2
# What a checkpoint may set to change its own output; both sides of a comparison ignore it alike.
# With the values that change nothing.
IGNORED_SETTINGS = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "min_p": 0,
    "typical_p": 1,
}


class LoopEngine(TextEngine):
    """A target with or without a draft. Prompt lookup and plain decoding need no draft."""

    sees_draft_probs = True
    generation_errors: ClassVar[Mapping[type[Exception], type[EngineError]]]  # of its library

    @abstractmethod
    def open_target(self, capacity: int) -> CachedModel:
        """Return the target with an empty cache that has room for `capacity` tokens."""

    @abstractmethod
    def open_draft(self, capacity: int) -> CachedModel:
        """Return the draft likewise. Called only where there is one."""

    def rounds(self, request: GenerationRequest) -> Rounds:
        with translate_errors("generating failed", self.generation_errors):
            yield from self._decode(
                replace(request, min_draft_prob=self.min_draft_prob(request)),
                self._proposer(request.draft_kind, self._capacity(request)),
                stop_token_ids=self._text.vocabulary.stop_token_ids,
            )

    def warm_up(self, request: GenerationRequest) -> Generator[str | None, None, None]:
        self.check(request)
        # The prompt's last chunk, then passes that verify as many drafts as the request will.
        short = replace(
            request,
            prompt_token_ids=request.prompt_token_ids[-PREFILL_CHUNK_TOKENS:],
            max_new_tokens=WARM_UP_ROUNDS * (request.num_draft_tokens + 1),
            min_draft_prob=0.0,
        )
        proposer: Proposer = EchoProposer()  # prompt lookup may find nothing
        if request.draft_kind != "prompt_lookup":
            proposer = self._proposer(request.draft_kind, self._capacity(short))
        passes = self._decode(short, proposer, stop_token_ids=frozenset())
        with closing(passes), translate_errors("warming up failed", self.generation_errors):
            num_rounds = 0
            for item in passes:
                yield None
                num_rounds += isinstance(item, Round)
                if num_rounds == WARM_UP_ROUNDS:
                    break

    def logit_gap(self, token_ids: Sequence[int], first: int, second: int) -> float | None:
        model = self.open_target(len(token_ids))
        with translate_errors("comparing two tokens failed", self.generation_errors):
            for _ in prefill_chunks(model, token_ids[:-1]):
                pass
            logits = model.forward(token_ids[-1:], num_logits=1)[0]
        return float(logits[first] - logits[second])

    def _decode(
        self, request: GenerationRequest, proposer: Proposer, *, stop_token_ids: frozenset[int]
    ) -> Rounds:
        return decode(
            self._round_maker(request, proposer),
            request,
            stop_token_ids=stop_token_ids,
            context_length=self._info.context_length,
        )

    def _round_maker(self, request: GenerationRequest, proposer: Proposer) -> RoundMaker:
        return StepwiseRounds(self.open_target(self._capacity(request)), proposer, request)

    def _proposer(self, kind: DraftKind, capacity: int) -> Proposer:
        match kind:
            case "model":
                return ModelProposer(self.open_draft(capacity))
            case "prompt_lookup":
                return PromptLookupProposer()
            case "none":
                return NoProposer()

    def _capacity(self, request: GenerationRequest) -> int:
        """Return the most tokens that a request caches."""
        longest = len(request.prompt_token_ids) + request.max_new_tokens
        return min(longest, self._info.context_length)


def settings_notes(target: Path) -> tuple[str, ...]:
    """Return what a reader must know of settings in a checkpoint that no side applies."""
    ignored = {
        key: value
        for key, value in generation_settings(target).items()
        if key in IGNORED_SETTINGS and value not in (None, IGNORED_SETTINGS[key])
    }
    if not ignored:
        return ()
    settings = ", ".join(f"{key}={value}" for key, value in sorted(ignored.items()))
    return (f"the checkpoint's own {settings} is not applied, on neither side",)
