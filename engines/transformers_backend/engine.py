"""TransformersEngine: target and draft loaded through transformers, driven by our loop."""

from __future__ import annotations

import logging
from collections.abc import Generator
from time import perf_counter
from typing import Any, ClassVar

import torch
import transformers

from engines.base import EngineInfo
from engines.built_pair import BuiltPair
from engines.config import DEFAULT_MIN_DRAFT_PROB, DraftKind, EngineConfig, GenerationRequest
from engines.drafting import CachedModel, ModelProposer, Proposer
from engines.errors import EngineError, GenerationError
from engines.loop_engine import LoopEngine, settings_notes
from engines.speculative import RoundMaker, StepwiseRounds
from engines.store import EngineStore
from engines.transformers_backend.captured import (
    CapturedModel,
    CapturedPasses,
    NotCapturedError,
    first_line,
    require_same,
    why_not_captured,
)
from engines.transformers_backend.captured_round import CapturedRound, CapturedRounds, RoundShape
from engines.transformers_backend.device import (
    device_name,
    device_of,
    draft_dtype_of,
    dtype_name,
    dtype_of,
)
from engines.transformers_backend.model import (
    TransformersModel,
    context_length,
    load_model,
    require_rollback,
)

logger = logging.getLogger(__name__)

GENERATION_ERRORS: dict[type[Exception], type[EngineError]] = {
    RuntimeError: GenerationError,  # torch's, out of memory among them
    MemoryError: GenerationError,
}


CAPTURE_ERRORS = (
    NotCapturedError,
    torch.cuda.OutOfMemoryError,
    RuntimeError,  # of a capture that an operation breaks
)
CAPACITY_STEP = 1024  # tokens: a longer run makes the cache anew, a shorter one does not
MAX_ROUNDS = 8  # captured; each has logits of its own on the device


class TransformersEngine(LoopEngine):
    """Any causal language models whose cache can be cut back, on a CPU or CUDA."""

    generation_errors: ClassVar = GENERATION_ERRORS

    def __init__(self, config: EngineConfig, store: EngineStore) -> None:
        """Load the models.

        Raises:
            EngineError: They are not built, unreadable, incompatible, or the device is missing.
        """
        transformers.utils.logging.disable_progress_bar()
        device = device_of(config.device)
        dtype = dtype_of(config.dtype, device)
        draft_dtype = draft_dtype_of(config.dtype, device)
        pair = BuiltPair.find(config, store)
        target, draft = pair.target, pair.draft
        text, warnings = pair.load_text()

        started = perf_counter()
        self.target_model: Any = load_model(
            target.path, name=target.name, dtype=dtype, device=device
        )
        require_rollback(self.target_model, target.name)
        self.draft_model: Any = None
        if draft is not None:
            self.draft_model = load_model(
                draft.path, name=draft.name, dtype=draft_dtype, device=device
            )
            require_rollback(self.draft_model, draft.name)
        logger.info("loaded %s in %.1f s", config, perf_counter() - started)

        if device.type == "cpu":
            self.default_min_draft_prob = DEFAULT_MIN_DRAFT_PROB
        models = [model for model in (self.target_model, self.draft_model) if model is not None]
        self._vocab_size = min(
            len(text.tokenizer), *(model.config.get_text_config().vocab_size for model in models)
        )
        info = EngineInfo(
            backend="transformers",
            target=target.reference.described,
            draft=None if draft is None else draft.reference.described,
            dtype=dtype_name(dtype),
            device=device_name(device),
            context_length=min(context_length(model.config) for model in models),
            draft_dtype=None if draft is None else dtype_name(draft_dtype),
            notes=(*_notes(dtype), *settings_notes(target.path), *warnings),
            commits=pair.commits,
            versions={"torch": str(torch.__version__), "transformers": transformers.__version__},
        )
        self._captured: dict[str, CapturedPasses] = {}  # of the target and the draft
        self._rounds: dict[RoundShape, CapturedRound] = {}
        self.is_capturing = device.type == "cuda"  # set to False, it runs as it would without
        kinds: tuple[DraftKind, ...] = ("prompt_lookup", "none")
        super().__init__(
            info,
            text,
            kinds if self.draft_model is None else ("model", *kinds),
            num_known_ids=self._vocab_size,
        )

    @property
    def is_open(self) -> bool:
        return self.target_model is not None

    def prepare(self, request: GenerationRequest) -> Generator[str | None, None, None]:
        """Capture the passes that a request will make, once; where that fails, say so and go on."""
        if not self.is_capturing:
            return
        wanted = {"target": (1, request.num_draft_tokens + 1)}
        if request.draft_kind == "model":
            wanted["draft"] = (1, 2)  # behind a draft that was kept whole, two tokens are unread
        try:
            for role, sizes in wanted.items():
                yield from self._capture(role, sizes, self._capacity(request))
            if request.draft_kind != "prompt_lookup" and not self.min_draft_prob(request):
                yield from self._capture_round(RoundShape.of(request))
        except CAPTURE_ERRORS as exc:
            self.is_capturing = False
            self._rounds.clear()
            self._captured.clear()
            self.add_note(f"CUDA graphs are not used, which is slower: {first_line(exc)}")
            yield self.info.notes[0]

    def warm_up(self, request: GenerationRequest) -> Generator[str | None, None, None]:
        self.check(request)
        yield from self.prepare(request)
        yield from super().warm_up(request)

    def open_target(self, capacity: int) -> CachedModel:
        return self._open("target", self.target_model, capacity)

    def open_draft(self, capacity: int) -> CachedModel:
        return self._open("draft", self.draft_model, capacity)

    def close(self) -> None:
        if self._captured:
            torch.compiler.reset()  # compiled layers would count against the next models' versions
        self._rounds.clear()
        self._captured.clear()
        self.target_model = self.draft_model = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _round_maker(self, request: GenerationRequest, proposer: Proposer) -> RoundMaker:
        stepwise = StepwiseRounds(self.open_target(self._capacity(request)), proposer, request)
        captured = self._rounds.get(RoundShape.of(request))
        draft = proposer.model if isinstance(proposer, ModelProposer) else None
        if (
            captured is None
            or request.min_draft_prob  # whether to draft on is decided on the host
            or not isinstance(stepwise.target, CapturedModel)
            or not isinstance(draft, CapturedModel | None)
            or (draft is None) != (request.num_draft_tokens == 0)
        ):
            return stepwise
        return CapturedRounds(captured, draft, stepwise.target, stepwise)

    def _open(self, role: str, model: Any, capacity: int) -> CachedModel:
        passes = self._captured.get(role) if self.is_capturing else None
        if passes is not None and passes.capacity >= capacity + max(passes.sizes, default=0):
            return CapturedModel(passes, vocab_size=self._vocab_size)
        return TransformersModel(model, vocab_size=self._vocab_size)

    def _capture(
        self, role: str, sizes: tuple[int, ...], capacity: int
    ) -> Generator[str | None, None, None]:
        """Capture what is missing of a model's passes, into a larger cache where need be."""
        model = self.target_model if role == "target" else self.draft_model
        if reason := why_not_captured(model):
            raise NotCapturedError(f"{role}: {reason}")
        passes = self._captured.get(role)
        all_sizes = sorted({*sizes, *(passes.sizes if passes is not None else ())})
        needed = capacity + all_sizes[-1]  # a pass may be padded
        capacity = -(-needed // CAPACITY_STEP) * CAPACITY_STEP
        if passes is None:
            passes = CapturedPasses(model, capacity=capacity)
        if passes.capacity < capacity:
            self._rounds.clear()
        passes.make_room(capacity)
        for size in all_sizes:
            if size not in passes.sizes:
                started = perf_counter()
                yield None
                passes.capture(size)
                require_same(model, passes, size)
                seconds = perf_counter() - started
                if passes.unfused_reason is not None and passes.sizes == (size,):
                    note = "its layers run as they are, which is slower, since torch.compile failed"
                    self.add_note(f"{role}: {note} ({passes.unfused_reason})")
                yield f"captured passes of the {role} over {size} token(s) in {seconds:.1f} s"
        self._captured[role] = passes

    def _capture_round(self, shape: RoundShape) -> Generator[str | None, None, None]:
        """Capture a round of a shape, in place of the oldest where there are many."""
        if shape in self._rounds:
            return
        yield None
        started = perf_counter()
        if len(self._rounds) == MAX_ROUNDS:
            del self._rounds[next(iter(self._rounds))]
        draft = self._captured["draft"] if shape.num_draft_tokens else None
        target, vocab_size = self._captured["target"], self._vocab_size
        self._rounds[shape] = CapturedRound(target, draft, shape, vocab_size=vocab_size)
        seconds = perf_counter() - started
        yield f"captured rounds of {shape.num_draft_tokens} draft token(s) in {seconds:.1f} s"


def _notes(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.float32:
        return ()
    return (
        f"in {dtype_name(dtype)} a pass over several tokens rounds differently from passes over "
        "one, so greedy outputs may part where two tokens are nearly tied",
    )
