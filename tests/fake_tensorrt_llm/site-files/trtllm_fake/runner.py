"""ModelRunnerCpp of the engine flow: one engine that decodes, alone or behind a draft."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from trtllm_fake.api import Given, implements
from trtllm_fake.loading import MOST_OF_THE_MEMORY, LoadedEngine, load
from trtllm_fake.requests import Request, checked_requests
from trtllm_fake.results import to_result
from trtllm_fake.state import generate_fault, hang, log_call, suffer

open_runners: list[ModelRunnerCpp] = []


@implements("tensorrt_llm.bindings.executor.Executor")
class Executor:
    """What a runner holds open."""

    is_open = True

    def shutdown(self, given: Given) -> None:
        self.is_open = False

    def can_enqueue_requests(self, given: Given) -> bool:
        return self.is_open


@implements("tensorrt_llm.runtime.ModelRunnerCpp")
class ModelRunnerCpp:
    """An engine in GPU memory."""

    def __init__(self, given: Given, engine: LoadedEngine) -> None:
        self.engine = engine
        limits = engine.limits
        self.max_batch_size: int = given.max_batch_size or limits["max_batch_size"]
        self.max_input_len: int = given.max_input_len or limits["max_input_len"]
        self.max_seq_len: int = limits["max_seq_len"]
        if given.max_output_len is not None:
            self.max_seq_len = self.max_input_len + given.max_output_len
        self.session = Executor()
        self.may_return_logits: bool = (
            limits["gather_generation_logits"] or given.gather_generation_logits
        )
        fraction = given.kv_cache_free_gpu_memory_fraction or 0.9
        self._is_greedy_for_memory = (
            fraction > MOST_OF_THE_MEMORY and given.max_tokens_in_paged_kv_cache is None
        )

    @classmethod
    def from_dir(cls, given: Given) -> ModelRunnerCpp:
        runner = cls(given, load(given))
        if any(other.session.is_open and other._is_greedy_for_memory for other in open_runners):
            suffer("oom")
        open_runners.append(runner)
        return runner

    dtype = property(lambda self: _torch_dtype(self.engine.facts["dtype"]))
    vocab_size = property(lambda self: self.engine.facts["vocab_size"])
    vocab_size_padded = property(lambda self: self.engine.model.vocab_size_padded)
    hidden_size = property(lambda self: self.engine.facts["hidden_size"])
    num_heads = property(lambda self: self.engine.facts["num_attention_heads"])
    num_layers = property(lambda self: self.engine.facts["num_hidden_layers"])
    max_sequence_length = property(lambda self: self.max_seq_len)
    max_prompt_embedding_table_size = property(lambda self: 0)
    remove_input_padding = property(lambda self: True)
    gather_context_logits = property(lambda self: self.engine.limits["gather_context_logits"])
    gather_generation_logits = property(lambda self: self.engine.limits["gather_generation_logits"])

    def generate(self, given: Given) -> Any:
        if not self.session.is_open:
            raise RuntimeError("the executor was shut down")
        fault = generate_fault()
        if fault == "hang":
            hang()
        if fault == "error":
            raise RuntimeError("Encountered an error in forwardAsync function: CUDA error")
        suffer(fault)
        requests = checked_requests(self, given)
        if fault == "short":
            for request in requests:
                request.max_new_tokens = 1
        passes = [request.passes(self.engine.model, given) for request in requests]
        if given.streaming:
            return self._stream(given, requests, passes)
        for steps in passes:
            deque(steps, maxlen=0)
        return to_result(self, given, requests, is_spoilt=fault == "nan_logits")

    def _stream(
        self, given: Given, requests: list[Request], passes: list[Iterator[bool]]
    ) -> Iterator[Any]:
        """Yield the whole output after every pass. Closing this early does not end the request."""
        is_first = True
        try:
            while sum(next(steps, False) for steps in passes) or is_first:
                is_first = False
                yield to_result(self, given, requests, is_spoilt=False)
        except GeneratorExit:
            if sum(next(steps, False) for steps in passes):
                num_new_tokens = [len(request.new_ids) for request in requests]
                log_call("abandoned", {"num_new_tokens": num_new_tokens})
            raise


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)
