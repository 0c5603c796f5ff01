"""RequestOutput of the PyTorch flow: the one object that a caller iterates and looks into."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from trtllm_fake.api import Given, class_entry, exists, implements
from trtllm_fake.iterations import Iteration
from trtllm_fake.state import generate_fault, hang, scenario, suffer

REQUEST_OUTPUT = "tensorrt_llm.llmapi.RequestOutput"


@implements("tensorrt_llm.llmapi.CompletionOutput")
class CompletionOutput:
    """All that was generated so far, and what came last."""

    index = 0
    text = ""
    finish_reason: str | None = None
    stop_reason: int | None = None
    request_perf_metrics: Any = None

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._num_seen = 0
        self._num_seen_characters = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._num_seen :]

    @property
    def text_diff(self) -> str:
        return self.text[self._num_seen_characters :]

    def mark_seen(self) -> None:
        self._num_seen = len(self.token_ids)
        self._num_seen_characters = len(self.text)


class DraftCounts:
    """What became of each draft of a request."""

    def __init__(self) -> None:
        self._accepted: list[int] = []
        self._drafted: list[int] = []

    def add(self, iteration: Iteration) -> None:
        if iteration.draft_ids:
            self._accepted.append(iteration.num_accepted_tokens)
            self._drafted.append(len(iteration.draft_ids))

    @property
    def spec_dec_totals(self) -> tuple[int, int]:
        return sum(self._accepted), sum(self._drafted)

    @property
    def per_pos_accepted(self) -> list[int]:
        return _per_position(self._accepted)

    @property
    def per_pos_drafted(self) -> list[int]:
        return _per_position(self._drafted)


def _per_position(counts: list[int]) -> list[int]:
    """Return how many drafts reached each position, from how far each one went."""
    return [sum(count > position for count in counts) for position in range(max(counts, default=0))]


@implements(REQUEST_OUTPUT)
class RequestOutput:
    """One request. Iterating yields this same object, changed, after every chunk."""

    context_logits = None

    def __init__(
        self,
        *,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: Any,
        end_id: int | None,
        passes: Iterator[Iteration],
        decode: Callable[[list[int]], str] | None,
        is_streaming: bool,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.decoding_iter = 0
        self._params = params
        self._end_id = end_id
        self._passes = passes
        self._decode = decode
        self._is_aborted = False
        self._counts = DraftCounts()
        self._chunks = self._run(scenario()["merge"] if is_streaming else None)

    @property
    def avg_decoded_tokens_per_iter(self) -> float | None:
        return self.outputs[0].length / self.decoding_iter if self.decoding_iter else None

    def __getattr__(self, name: str) -> Any:
        """Give the counts of drafts, in the versions that tell them."""
        attribute = class_entry(REQUEST_OUTPUT)["attributes"].get(name)
        if attribute is None or not exists(attribute):
            raise AttributeError(f"'RequestOutput' object has no attribute '{name}'")
        return getattr(self._counts, name)

    def abort(self, given: Given) -> None:
        self._is_aborted = True

    def aborted(self, given: Given) -> bool:
        return self._is_aborted

    def result(self, given: Given) -> RequestOutput:
        return self.drain()

    def drain(self) -> RequestOutput:
        deque(self._chunks, maxlen=0)
        return self

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        next(self._chunks)
        return self

    def _run(self, num_merged: int | None) -> Iterator[None]:
        """Advance by so many passes a chunk, or to the end.

        Args:
            num_merged: None where nothing is streamed.
        """
        fault = generate_fault()
        if fault == "hang":
            hang()
        if fault == "error":
            raise RuntimeError("Encountered an error in the executor: CUDA error")
        suffer(fault)
        output = self.outputs[0]
        while not self.finished:
            output.mark_seen()
            num_passes = 0
            while not self.finished and num_passes != num_merged:
                self._advance(output)
                num_passes += 1
            yield

    def _advance(self, output: CompletionOutput) -> None:
        if self._is_aborted:
            output.finish_reason = "cancelled"
            self.finished = True
            return
        iteration = next(self._passes)
        self.decoding_iter += 1
        self._counts.add(iteration)
        for token_id in iteration.new_ids:
            self._take(output, token_id)
            if self.finished:
                break
        if self._decode is not None:
            output.text = self._decode(output.token_ids)
        if self._params.return_perf_metrics:
            output.request_perf_metrics = self._perf_metrics()

    def _take(self, output: CompletionOutput, token_id: int) -> None:
        """Add one id. The end token stays in the output, a stop token does if that is asked for."""
        is_stop = token_id in (self._params.stop_token_ids or ())
        if not is_stop or self._params.include_stop_str_in_output:
            output.token_ids.append(token_id)
        if is_stop:
            output.finish_reason, output.stop_reason = "stop", token_id
        elif token_id == self._end_id:
            output.finish_reason = "stop"
        elif output.length == self._params.max_tokens:
            output.finish_reason = "length"
        self.finished = output.finish_reason is not None

    def _perf_metrics(self) -> SimpleNamespace:
        """Return the counters of a request, which stay 0 in versions that count nothing."""
        is_counted = exists(class_entry(REQUEST_OUTPUT)["attributes"]["spec_dec_totals"])
        accepted, drafted = self._counts.spec_dec_totals if is_counted else (0, 0)
        speculative = SimpleNamespace(
            acceptance_rate=accepted / drafted if drafted else 0.0,
            total_accepted_draft_tokens=accepted,
            total_draft_tokens=drafted,
        )
        return SimpleNamespace(speculative_decoding=speculative)
