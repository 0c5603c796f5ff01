"""What engines share that read and write text by a tokenizer: ids, checks, one run at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from dataclasses import replace
from threading import Lock

from engines.base import Engine, EngineInfo
from engines.config import DraftKind, GenerationRequest
from engines.errors import GenerationError
from engines.events import GenerationEvent
from engines.generation import Rounds, generate_events
from engines.tokenizer import Text, encode_prompt


class TextEngine(Engine):
    """An engine that yields rounds of ids, of which this makes events."""

    sees_draft_probs = False  # so that a draft can end where its model is unsure

    def __init__(
        self,
        info: EngineInfo,
        text: Text,
        draft_kinds: tuple[DraftKind, ...],
        *,
        num_known_ids: int | None = None,
        longer: str = "",
    ) -> None:
        """Keep what is shared.

        Args:
            info: For the record of a run.
            text: The target's tokenizer.
            draft_kinds: On offer.
            num_known_ids: Ids that the models know; None: as many as the tokenizer has.
            longer: What else than a shorter prompt helps where the context is too short.
        """
        self._info = info
        self._text = text
        self._draft_kinds = draft_kinds
        self._num_known_ids = len(text.tokenizer) if num_known_ids is None else num_known_ids
        self._longer = longer
        # Not used by `with`: it is held over yields, and another thread may close the generator.
        self._busy = Lock()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def draft_kinds(self) -> tuple[DraftKind, ...]:
        return self._draft_kinds

    def encode(self, prompt: str, *, chat_template: bool) -> tuple[int, ...]:
        token_ids = encode_prompt(self._text.tokenizer, prompt, chat_template=chat_template)
        self._check_ids(token_ids)
        return token_ids

    def generate(self, request: GenerationRequest) -> Generator[GenerationEvent, None, None]:
        self.check(request)
        return self._generate(request)

    def add_note(self, note: str) -> None:
        """Tell a reader of this engine's figures one thing more, before the others."""
        self._info = replace(self._info, notes=(note, *self._info.notes))

    @abstractmethod
    def rounds(self, request: GenerationRequest) -> Rounds:
        """Yield how the prompt is read, then what each pass of the target brings.

        Closing the generator leaves no pass running.
        """

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that does not suit this engine.

        Raises:
            ValueError: So it is.
            GenerationError: It is closed.
        """
        if not self.is_open:
            raise GenerationError("the engine is closed; load it again")
        if request.draft_kind not in self.draft_kinds:
            raise ValueError(
                f"draft_kind is '{request.draft_kind}', but no draft model is loaded: name one, or "
                f"use one of {', '.join(self.draft_kinds)}"
            )
        if self.min_draft_prob(request) and not self.sees_draft_probs:
            raise ValueError(
                f"min_draft_prob is {request.min_draft_prob}: the back end '{self._info.backend}' "
                "does not report what its drafts were given; use 0, or leave it out"
            )
        self._check_ids(request.prompt_token_ids)

    def _generate(self, request: GenerationRequest) -> Generator[GenerationEvent, None, None]:
        if not self._busy.acquire(blocking=False):
            raise GenerationError("the engine is busy with another generation; try again later")
        try:
            yield from generate_events(self.rounds(request), request, self._text.vocabulary)
        finally:
            self._busy.release()

    def _check_ids(self, token_ids: tuple[int, ...]) -> None:
        unknown = next((id_ for id_ in token_ids if not 0 <= id_ < self._num_known_ids), None)
        if unknown is not None:
            raise ValueError(
                f"the prompt has the token id {unknown}, and the models know 0 to "
                f"{self._num_known_ids - 1}: encode it with this engine"
            )
        limit = self._info.context_length
        if len(token_ids) >= limit:
            raise ValueError(
                f"the prompt has {len(token_ids):,} tokens, and the context holds {limit:,} with "
                f"the answer: shorten the prompt{self._longer}"
            )
