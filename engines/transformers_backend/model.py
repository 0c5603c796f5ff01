"""TransformersModel: a causal language model of transformers, with a KV cache that rolls back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from engines.errors import IncompatibleModelsError, ModelLoadError, translate_errors
from engines.sampling import token_probs
from engines.small_files import MAX_CONFIG_BYTES, require_small
from engines.tokenizer import LOAD_ERRORS
from engines.transformers_backend.cpu_linear import use_cpu_linear

UNBOUNDED_CONTEXT = 2**20  # where a configuration names no limit


def load_config(path: Path, *, name: str) -> Any:
    """Return a checkpoint's configuration, without its weights.

    Raises:
        ModelLoadError: It is unreadable or unknown to transformers.
    """
    require_small(path / "config.json", MAX_CONFIG_BYTES)
    with translate_errors(f"the model '{name}' cannot be read", LOAD_ERRORS):
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def load_model(path: Path, *, name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a causal language model in evaluation mode.

    Raises:
        ModelLoadError: It is unreadable, incomplete, unknown to transformers or too large.
    """
    with translate_errors(f"the model '{name}' cannot be loaded", LOAD_ERRORS):
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        # transformers fills what a checkpoint lacks with random numbers, which is no model.
        if missing := sorted(report["missing_keys"]):
            raise ModelLoadError(
                f"the model '{name}' is incomplete: {len(missing)} weights are missing, "
                f"{missing[0]} the first; fetch or convert it again"
            )
        if misshapen := sorted(report["mismatched_keys"]):
            weight, shape, expected = misshapen[0]
            raise ModelLoadError(
                f"the weights of '{name}' do not fit its config.json: {weight} is {list(shape)}, "
                f"not {list(expected)}; fetch or convert it again"
            )
        return use_cpu_linear(model.to(device).eval())


def context_length(config: Any) -> int:
    """Return how many tokens a model can read, prompt and output together."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else UNBOUNDED_CONTEXT


def cache_argument(model: Any) -> str:
    """Return what a model's forward calls its KV cache: renamed during transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class TransformersModel:
    """A `CachedModel` for one sequence over a model that several may share one after another."""

    def __init__(self, model: Any, *, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size  # of the tokenizer: rows of padding behind it are cut off
        self._cache = DynamicCache(config=model.config)
        # Sliding-window layers keep what has left the window until the next truncation.
        self._cache.activate_past_recording()
        self._num_cached_tokens = 0
        self._logits: Any = None  # of the last pass
        self._cuts_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model)

    @property
    def num_cached_tokens(self) -> int:
        return self._num_cached_tokens

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], *, num_logits: int) -> torch.Tensor:
        input_ids = torch.tensor([list(token_ids)], device=self._model.device)
        keep = {"logits_to_keep": num_logits} if self._cuts_logits else {}
        cache = {self._cache_argument: self._cache}
        output = self._model(input_ids, use_cache=True, **cache, **keep)
        self._num_cached_tokens += len(token_ids)
        logits: torch.Tensor = output.logits[0, -num_logits:, : self._vocab_size].float()
        self._logits = logits
        return logits

    def token_probs(self, rows: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        return token_probs(self._logits, rows, token_ids)

    def truncate(self, num_tokens: int) -> None:
        # Also where nothing goes: sliding-window layers then drop what has left the window.
        self._cache.crop(num_tokens - self._num_cached_tokens)
        self._num_cached_tokens = num_tokens

    def synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)


def require_rollback(model: Any, name: str) -> None:
    """Refuse a model whose cache cannot forget rejected tokens, such as a recurrent one.

    Raises:
        IncompatibleModelsError: It cannot.
    """
    with translate_errors(f"the model '{name}' cannot be loaded", LOAD_ERRORS):
        cache = DynamicCache(config=model.config)
    if not cache.is_croppable:
        raise IncompatibleModelsError(
            f"'{name}' cannot take part in speculative decoding: its cache cannot be rolled back "
            "(a recurrent or quantised cache); choose a model with plain attention"
        )
