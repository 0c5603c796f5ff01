"""LLM of the PyTorch flow: the library runs the loop, a caller sees chunks and statistics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from trtllm_fake.api import Given, find, implements
from trtllm_fake.decoding import Sampling
from trtllm_fake.iterations import (
    Iteration,
    Propose,
    draft_by_lookup,
    draft_by_model,
    iterate,
    statistics,
)
from trtllm_fake.outputs import RequestOutput
from trtllm_fake.records import draft_model
from trtllm_fake.state import hang, require_gpus, scenario, suffer
from trtllm_fake.table import TableModel, count_token_ids

TWO_MODEL_VERSIONS = ("1.0.0", "1.1.0", "1.2.1")
WITHOUT_DRAFT_STATISTICS = ("1.0.0", "1.1.0")
LOGIT_OPTIONS = (
    "logprobs",
    "prompt_logprobs",
    "return_context_logits",
    "return_generation_logits",
)


@implements("tensorrt_llm.llmapi.LLM")
class LLM:
    """A target, and a draft if the speculative config names one."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._folder = _checked_folder(given.model)
        self._model = _table(self._folder, is_draft=False)
        self._propose = self._drafter()
        require_gpus(given.tensor_parallel_size)
        fault = scenario()["load"]
        if fault == "hang":
            hang()
        suffer(fault)
        self._iterations: list[Iteration] = []  # done since the statistics were read
        self._num_iterations_read = 0
        self._num_requests = 0
        self._is_open = True

    def _drafter(self) -> Propose | None:
        given = self._given
        config = given.speculative_config
        if config is None:
            return None
        if given.pipeline_parallel_size > 1:
            raise NotImplementedError("Drafting is not supported for selected executor loop")
        if scenario()["version"] in TWO_MODEL_VERSIONS and not given.disable_overlap_scheduler:
            raise RuntimeError("Speculative decoding needs disable_overlap_scheduler=True")
        if isinstance(config, find("NGramDecodingConfig")):
            return draft_by_lookup(config.max_draft_len)
        if not isinstance(config, find("DraftTargetDecodingConfig")):
            raise NotImplementedError(f"the fake does not draft with {type(config).__name__}")
        draft = _table(_checked_folder(draft_model(config)), is_draft=True)
        if draft.vocab_size_padded != self._model.vocab_size_padded:
            raise ValueError(
                f"the draft's vocabulary has {draft.vocab_size_padded} entries, "
                f"the target's {self._model.vocab_size_padded}"
            )
        return draft_by_model(draft, config.max_draft_len)

    @property
    def tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._folder / "tokenizer.json"))

    def generate_async(self, given: Given) -> RequestOutput:
        return self._request(given.inputs, given.sampling_params, given.streaming)

    def generate(self, given: Given) -> Any:
        inputs = given.inputs
        if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)):
            return self._request(inputs, given.sampling_params, False).drain()
        return [self._request(one, given.sampling_params, False).drain() for one in inputs]

    def get_stats(self, given: Given) -> list[dict[str, Any]]:
        """Return what was counted since the last call."""
        if scenario()["no_stats"] or not self._given.enable_iter_perf_stats:
            return []
        drafts = self._propose is not None and scenario()["version"] not in WITHOUT_DRAFT_STATISTICS
        has_draft_model = scenario()["version"] in TWO_MODEL_VERSIONS
        first = self._num_iterations_read
        self._num_iterations_read += len(self._iterations)
        stats = [
            statistics(number, iteration, has_drafts=drafts, has_draft_model=has_draft_model)
            for number, iteration in enumerate(self._iterations, first)
        ]
        self._iterations.clear()
        return stats

    def shutdown(self, given: Given | None = None) -> None:
        self._is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False

    def _request(self, inputs: Any, params: Any, streaming: bool) -> RequestOutput:
        if not self._is_open:
            raise RuntimeError("LLM is shutting down")
        params = params or find("SamplingParams")()
        if any(getattr(params, option) for option in LOGIT_OPTIONS):
            if self._propose is not None:
                raise ValueError("logits and logprobs are not supported with speculative_config")
            raise NotImplementedError("the fake returns no logits or logprobs here")
        prompt = self.tokenizer.encode(inputs).ids if isinstance(inputs, str) else list(inputs)
        self._check_lengths(prompt, params)
        self._num_requests += 1
        return RequestOutput(
            request_id=self._num_requests,
            prompt=inputs if isinstance(inputs, str) else None,
            prompt_token_ids=prompt,
            params=params,
            end_id=self._end_id(params),
            passes=self._passes(prompt, params),
            decode=self._decoder(params),
            is_streaming=streaming,
        )

    def _passes(self, prompt: list[int], params: Any) -> Iterator[Iteration]:
        """Yield the passes of one request, and keep them for the statistics."""
        sampling = Sampling(params.temperature, params.top_k, params.top_p, params.seed)
        for iteration in iterate(self._model, prompt, sampling, self._propose):
            self._iterations.append(iteration)
            yield iteration

    def _check_lengths(self, prompt: list[int], params: Any) -> None:
        limits = {"max_seq_len": params.max_tokens, "max_num_tokens": 0, "max_input_len": 0}
        for name, more in limits.items():
            limit = getattr(self._given, name)
            if limit is not None and len(prompt) + more > limit:
                raise ValueError(f"{len(prompt)} + {more} tokens exceed {name} {limit}")
        if not prompt:
            raise ValueError("the prompt is empty")

    def _end_id(self, params: Any) -> int | None:
        if params.ignore_eos:
            return None
        if params.end_id is not None:
            return int(params.end_id)
        end = _config(self._folder).get("eos_token_id")
        return end[0] if isinstance(end, list) else end

    def _decoder(self, params: Any) -> Callable[[list[int]], str] | None:
        if not params.detokenize or not (self._folder / "tokenizer.json").is_file():
            return None
        tokenizer = self.tokenizer
        return lambda ids: str(
            tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        )


def _checked_folder(model: Any) -> Path:
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise OSError(f"{model} is not a local folder with a config.json")
    return folder


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def _table(folder: Path, *, is_draft: bool) -> TableModel:
    size = _config(folder)["vocab_size"]
    return TableModel(count_token_ids(folder, size), size, is_draft)
