"""What both flows of TensorRT-LLM share: text and ids, checks, events from a worker's rounds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from engines.base import Engine, EngineInfo
from engines.config import DraftKind, GenerationRequest
from engines.errors import GenerationError
from engines.events import GenerationEvent
from engines.generation import Rounds, Vocabulary, generate_events
from engines.tokenizer import encode_prompt, load_tokenizer, vocabulary_of

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Text:
    """A tokenizer, and what a generation needs of it."""

    tokenizer: Any
    vocabulary: Vocabulary

    @classmethod
    def load(cls, path: Path, *, name: str) -> Text:
        """Return that of a checkpoint.

        Raises:
            ModelLoadError: It has none, or one that cannot be read.
        """
        tokenizer = load_tokenizer(path, name=name)
        return cls(tokenizer, vocabulary_of(tokenizer, path))


class TensorRTEngine(Engine):
    """A pair whose passes a worker process makes."""

    def __init__(self, info: EngineInfo, text: Text, draft_kinds: tuple[DraftKind, ...]) -> None:
        self._info = info
        self._text = text
        self._draft_kinds = draft_kinds
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
        self._check_ids(request.prompt_token_ids)

    def _generate(self, request: GenerationRequest) -> Generator[GenerationEvent, None, None]:
        # Not a `with`: the lock is held over yields, and another thread may close the generator.
        if not self._busy.acquire(blocking=False):
            raise GenerationError("the engine is busy with another generation; try again later")
        try:
            yield from generate_events(self.rounds(request), request, self._text.vocabulary)
        finally:
            self._busy.release()

    def _check_ids(self, token_ids: tuple[int, ...]) -> None:
        num_known = len(self._text.tokenizer)
        unknown = next((id_ for id_ in token_ids if not 0 <= id_ < num_known), None)
        if unknown is not None:
            raise ValueError(
                f"the prompt has the token id {unknown}, and the models know 0 to {num_known - 1}: "
                "encode it with this engine"
            )
        limit = self._info.context_length
        if len(token_ids) >= limit:
            raise ValueError(
                f"the prompt has {len(token_ids):,} tokens, and the engine holds {limit:,} with "
                "the answer: shorten the prompt, or build with a larger max_seq_len"
            )


def finished(asked: Generator[Any, None, Result]) -> Result:
    """Wait for the result of something asked, passing over what comes before."""
    while True:
        try:
            next(asked)
        except StopIteration as ended:
            result: Result = ended.value
            return result
