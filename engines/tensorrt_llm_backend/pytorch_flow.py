"""The PyTorch flow: the library's own loop, which tells what came and not what was dropped.

How a model drafts is fixed when it is loaded, so each side of a comparison has a worker of its own.
Both stay loaded where the GPUs have room for both; else one makes way for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from engines.base import EngineInfo
from engines.config import DraftKind, GenerationRequest
from engines.errors import GenerationError
from engines.events import Totals
from engines.generation import Rounds
from engines.generators import finished
from engines.speculative import Pass, PrefillChunk
from engines.tensorrt_llm_backend.gpus import Gpu
from engines.tensorrt_llm_backend.worker_process import Worker
from engines.text_engine import TextEngine
from engines.tokenizer import Text

LONGER = ", or load with a larger max_seq_len"
WARM_UP_PASSES = 2
ROOM = 1.2  # of what the first worker took must be free for the second


@dataclass(frozen=True, slots=True)
class Side:
    """What a worker is loaded for."""

    draft_kind: DraftKind
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Models:
    """What the library is told to load."""

    model: str  # folder
    draft: str | None
    dtype: str
    max_seq_len: int
    tensor_parallel_size: int
    is_two_model: bool  # the draft is an engine of its own, which also drafts when sampling


class PyTorchFlowEngine(TextEngine):
    """A target, and whatever the library drafts with. Workers are loaded when a run needs them."""

    def __init__(
        self,
        info: EngineInfo,
        text: Text,
        draft_kinds: tuple[DraftKind, ...],
        models: Models,
        *,
        make_worker: Callable[[], Worker],
        look_at_gpus: Callable[[], tuple[Gpu, ...]],
        start_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        """Take what is to be loaded.

        Args:
            info: For the record of a run.
            text: The target's tokenizer.
            draft_kinds: On offer.
            models: What to load.
            make_worker: Prepares a worker.
            look_at_gpus: Returns the GPUs in use, with what is free there now.
            start_timeout_s: The longest that loading may take.
            step_timeout_s: The longest from one pass to the next.
        """
        super().__init__(info, text, draft_kinds, longer=LONGER)
        self._models = models
        self._make_worker = make_worker
        self._look_at_gpus = look_at_gpus
        self._start_timeout_s = start_timeout_s
        self._step_timeout_s = step_timeout_s
        self._workers: dict[Side, Worker] = {}
        self._taken_bytes: int | None = None  # by one worker, None where nobody can tell
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    def check(self, request: GenerationRequest) -> None:
        super().check(request)
        is_lossless = request.draft_kind == "none" or (
            request.draft_kind == "model" and self._models.is_two_model
        )
        if not request.sampling.is_greedy and not is_lossless:
            raise ValueError(
                f"temperature is {request.sampling.temperature}: this version's PyTorch flow is "
                f"not known to keep the target's distribution with the draft kind "
                f"'{request.draft_kind}'; use temperature 0"
            )

    def prepare(self, request: GenerationRequest) -> Generator[str | None, None, None]:
        """Load the side and warm it up: it may have made way for the other since it was."""
        if not self._is_loaded(request):
            yield from self._load(request)
            yield from self._warm(request)

    def warm_up(self, request: GenerationRequest) -> Generator[str | None, None, None]:
        yield from self._load(request)
        yield from self._warm(request)

    def _is_loaded(self, request: GenerationRequest) -> bool:
        worker = self._workers.get(_side_of(request))
        return worker is not None and worker.is_alive

    def _load(self, request: GenerationRequest) -> Generator[str | None, None, None]:
        self.check(request)
        if self._is_loaded(request):
            return
        side = _side_of(request)
        self._make_room(side)
        free_before = self._free_bytes()
        worker = self._make_worker()
        models = self._models
        yield from worker.open(
            self._start_timeout_s,
            flow="pytorch",
            model=models.model,
            draft_kind=side.draft_kind,
            draft=models.draft if side.draft_kind == "model" else None,
            num_draft_tokens=side.num_draft_tokens,
            max_seq_len=models.max_seq_len,
            dtype=models.dtype,
            tensor_parallel_size=models.tensor_parallel_size,
        )
        self._workers[side] = worker
        free_after = self._free_bytes()
        if free_before is not None and free_after is not None and free_after < free_before:
            self._taken_bytes = max(self._taken_bytes or 0, free_before - free_after)

    def _warm(self, request: GenerationRequest) -> Generator[None, None, None]:
        num_tokens = WARM_UP_PASSES * (request.num_draft_tokens + 1)
        with closing(self._rounds(replace(request, max_new_tokens=num_tokens))) as rounds:
            for _ in rounds:
                yield None

    def close(self) -> None:
        self._is_closed = True
        self._close_workers()

    def rounds(self, request: GenerationRequest) -> Rounds:
        finished(self._load(request))
        yield from self._rounds(request)

    def _rounds(self, request: GenerationRequest) -> Rounds:
        worker = self._workers[_side_of(request)]
        prompt = list(request.prompt_token_ids)
        finished(worker.ask("begin", self._step_timeout_s, prompt=prompt))
        yield PrefillChunk(len(prompt) - 1)
        num_wanted = min(request.max_new_tokens, self.info.context_length - len(prompt))
        sampling = request.sampling
        draws = {"temperature": sampling.temperature, "top_k": sampling.top_k or None}
        draws |= {"top_p": sampling.top_p, "seed": sampling.seed}
        asked = worker.ask(
            "stream",
            self._step_timeout_s,
            prompt=prompt,
            max_new_tokens=num_wanted,
            stop_token_ids=sorted(self._text.vocabulary.stop_token_ids),
            sampling=None if sampling.is_greedy else draws,
        )
        try:
            yield from self._passes(asked, request, num_wanted)
        except (GeneratorExit, KeyboardInterrupt):
            worker.cancel(asked)
            raise

    def _passes(
        self,
        asked: Generator[dict[str, Any] | None, None, dict[str, Any]],
        request: GenerationRequest,
        num_wanted: int,
    ) -> Rounds:
        stops = self._text.vocabulary.stop_token_ids
        num_tokens, num_passes, is_last = 0, 0, False
        while True:
            try:
                item = next(asked)
            except StopIteration as ended:
                result = ended.value
                break
            if item is None or is_last:
                continue
            is_first = num_tokens == 0
            num_tokens += len(item["tokens"])
            num_passes += item["num_passes"]
            is_last = item["tokens"][-1] in stops or num_tokens >= num_wanted
            yield from _passes_of(item, request, is_first=is_first, is_last=is_last)
        if not is_last:
            raise GenerationError(
                f"TensorRT-LLM ended after {num_tokens} of {num_wanted} tokens, without a stop "
                "token: look into the worker's log, or load the models again"
            )
        yield _totals(result["statistics"], num_tokens - num_passes)

    def _make_room(self, side: Side) -> None:
        """Close what the new worker replaces, then what it has no room beside."""
        for other, worker in list(self._workers.items()):
            is_replaced = (other.draft_kind == "none") == (side.draft_kind == "none")
            if is_replaced or not worker.is_alive:
                self._workers.pop(other).close()
        free_bytes, taken_bytes = self._free_bytes(), self._taken_bytes
        if free_bytes is None or taken_bytes is None or free_bytes < ROOM * taken_bytes:
            self._close_workers()

    def _close_workers(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def _free_bytes(self) -> int | None:
        free = [gpu.free_bytes for gpu in self._look_at_gpus()]
        known = [num_bytes for num_bytes in free if num_bytes is not None]
        return min(known) if known and len(known) == len(free) else None


def _side_of(request: GenerationRequest) -> Side:
    return Side(request.draft_kind, request.num_draft_tokens)


def _totals(statistics: list[dict[str, Any]], num_accepted: int) -> Totals:
    """Return what the statistics of all passes come to.

    The library keeps a limited number of them and counts no draft whose id is 0, so sums that do
    not hold the accepted tokens are none.
    """
    num_told, num_drafted = (
        sum(item[name] for item in statistics)
        for name in ("num_accepted_tokens", "num_draft_tokens")
    )
    if not statistics or not num_accepted <= num_told <= num_drafted:
        return Totals()
    draft_s = sum(item["draft_s"] for item in statistics)
    return Totals(
        num_drafts=len(statistics),
        num_draft_tokens=num_drafted,
        draft_s=draft_s or None,  # only a draft that is an engine of its own is timed
    )


def _passes_of(
    item: dict[str, Any], request: GenerationRequest, *, is_first: bool, is_last: bool
) -> Generator[Pass, None, None]:
    """Yield what arrived together: one pass, several plain ones, or several as one."""
    tokens, step_s = tuple(item["tokens"]), item["step_s"]
    if request.draft_kind == "none":
        for place, token_id in enumerate(tokens, start=1):
            yield Pass((token_id,), 0, 0, is_last and place == len(tokens), step_s / len(tokens))
    elif item["num_passes"] != 1:
        yield Pass(tokens, None, None, is_last, step_s)
    elif is_first:  # it ends the reading of the prompt, and verifies nothing
        yield Pass(tokens, 0, 0, is_last, step_s)
    else:
        # A model's drafts are as long as asked for; those from the text may be shorter.
        num_drafted = request.num_draft_tokens if request.draft_kind == "model" else None
        yield Pass(tokens, len(tokens) - 1, num_drafted, is_last, step_s)
