"""What a back end offers: Backend builds and loads, Engine generates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from engines.config import DraftKind, EngineConfig, GenerationRequest
from engines.events import GenerationEvent
from engines.pairs.memory import MemoryNeed

WARM_UP_TOKENS = 4
# Stages of getting ready that build nothing
LOADING = "load the models"
WAITING = "wait for the engine"


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """Where a build stands."""

    stage: int  # from 1
    num_stages: int
    name: str
    elapsed_s: float
    message: str | None = None  # a log line
    done_bytes: int | None = None  # of a download
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """Whether a back end can be used here, and why not."""

    name: str
    usable: bool
    detail: str  # versions and devices, or what is missing and the command that mends it
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a loaded engine is made of, for the record of a run."""

    backend: str
    target: str
    draft: str | None
    dtype: str
    device: str
    context_length: int  # prompt and output together, in tokens
    draft_dtype: str | None = None  # None without a draft model
    notes: tuple[str, ...] = ()  # what a reader of its figures must know
    settings: dict[str, Any] = field(default_factory=dict)  # of this back end alone
    versions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)  # of models from the Hub, by their role


class Engine(ABC):
    """A loaded target model, with or without a draft model. Serves one generation at a time."""

    default_min_draft_prob = 0.0  # where a request leaves it open

    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    def min_draft_prob(self, request: GenerationRequest) -> float:
        """Return below which probability a request's drafts end here; 0 where they never do."""
        if request.draft_kind != "model":
            return 0.0
        if request.min_draft_prob is None:
            return self.default_min_draft_prob
        return request.min_draft_prob

    @property
    @abstractmethod
    def draft_kinds(self) -> tuple[DraftKind, ...]:
        """Return what this engine can draft with."""

    @abstractmethod
    def encode(self, prompt: str, *, chat_template: bool) -> tuple[int, ...]:
        """Return the ids of a prompt, for target, draft and baseline alike.

        Raises:
            ValueError: The prompt is empty or does not fit the context.
        """

    @abstractmethod
    def generate(self, request: GenerationRequest) -> Generator[GenerationEvent, None, None]:
        """Yield the events of one generation: `Prefill`s, `Step`s, at most one `Finish`.

        Closing the generator cancels the generation before its next step.

        Raises:
            ValueError: The request does not suit this engine.
            GenerationError: The back end failed while generating. The engine stays usable, or
                `is_open` says that it is not.
        """

    @property
    def is_open(self) -> bool:
        """Whether it can generate. One whose process has ended cannot, and is loaded anew."""
        return True

    def prepare(self, request: GenerationRequest) -> Generator[str | None, None, None]:
        """Make ready what a request needs beyond what is loaded, yielding log lines, or None.

        Called before each generation that is measured; here there is nothing to do.

        Raises:
            EngineError: It cannot be had.
        """
        yield from ()

    def warm_up(self, request: GenerationRequest) -> Generator[str | None, None, None]:
        """Do once what the request will do often, yielding between passes; nothing is kept.

        What it yields is as for `prepare`.

        A measured run then pays nothing that comes once. A back end that can force the passes of
        a request, drafts included, does that instead of generating a few tokens.
        """
        short = replace(request, max_new_tokens=min(request.max_new_tokens, WARM_UP_TOKENS))
        with closing(self.generate(short)) as events:
            for _ in events:
                yield None

    def logit_gap(self, token_ids: Sequence[int], first: int, second: int) -> float | None:
        """Return by how much the target prefers one next token to another; None if it cannot say.

        Args:
            token_ids: The text before: prompt and output so far.
            first: The preferred token's id.
            second: The other's.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Release device memory. Calling it twice is allowed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Backend(ABC):
    """One way to run models. It is named in the table of `engines.backends`."""

    builds_on_device = False  # a build needs the memory that a loaded engine takes

    @abstractmethod
    def probe(self, config: EngineConfig | None = None) -> BackendStatus:
        """Say whether it can be used here, without loading a model. Never raises.

        Args:
            config: Its options say where to look; None: at the usual place.
        """

    @abstractmethod
    def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
        """Fetch, verify, convert and check the models, yielding progress.

        Closing the generator cancels the build and leaves nothing half-built. What is already
        built is reused.

        Raises:
            EngineError: It failed; the text says at what and what to do.
        """

    @abstractmethod
    def load(self, config: EngineConfig) -> Engine:
        """Load built models.

        Raises:
            ModelNotBuiltError: `build` must run first.
            EngineError: They cannot be loaded.
        """

    def memory_need(self, config: EngineConfig) -> MemoryNeed | None:
        """Return what loading a pair will take, by its configurations; None where nobody knows.

        No weights are read, and nothing is fetched.
        """
        return None

    def loading(self, config: EngineConfig) -> Generator[BuildProgress, None, Engine]:
        """Load built models, yielding meanwhile where that takes long.

        Closing the generator leaves nothing loaded. The errors are those of `load`.
        """
        yield from ()
        return self.load(config)
