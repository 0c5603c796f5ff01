"""TransformersEngine: target and draft loaded through transformers, driven by our loop."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
import transformers

from engines.base import EngineInfo
from engines.checkpoints import built_path, parse_reference
from engines.compatibility import check_vocabularies
from engines.config import DraftKind, EngineConfig, GenerationRequest
from engines.drafting import (
    PREFILL_CHUNK_TOKENS,
    EchoProposer,
    ModelProposer,
    NoProposer,
    PromptLookupProposer,
    Proposer,
    prefill_chunks,
)
from engines.errors import EngineError, GenerationError, translate_errors
from engines.generation import Rounds
from engines.speculative import Round, decode
from engines.store import EngineStore
from engines.text_engine import TextEngine
from engines.tokenizer import Text, generation_settings, load_tokenizer
from engines.transformers_backend.cpu_linear import has_wide_onednn
from engines.transformers_backend.device import device_name, device_of
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


class TransformersEngine(TextEngine):
    """A target with or without a draft. Prompt lookup and plain decoding need no draft."""

    def __init__(self, config: EngineConfig, store: EngineStore) -> None:
        """Load the models.

        Raises:
            EngineError: They are not built, unreadable, incompatible, or the device is missing.
        """
        transformers.utils.logging.disable_progress_bar()
        device = device_of(config.device)
        dtype = _dtype(config.dtype, device)
        draft_dtype = _draft_dtype(config.dtype, device)
        target = parse_reference(config.target)
        draft = parse_reference(config.draft) if config.draft is not None else None
        target_path = built_path(target, store)
        draft_path = built_path(draft, store) if draft is not None else None

        # Tokenizers first: a pair that does not fit is refused before any weights are read.
        text = Text.load(target_path, name=target.name)
        if draft is not None and draft_path is not None:
            draft_tokenizer = load_tokenizer(draft_path, name=draft.name)
            check_vocabularies(
                target.name, text.tokenizer.get_vocab(), draft.name, draft_tokenizer.get_vocab()
            )

        started = perf_counter()
        self.target_model: Any = load_model(
            target_path, name=target.name, dtype=dtype, device=device
        )
        require_rollback(self.target_model, target.name)
        self.draft_model: Any = None
        if draft is not None and draft_path is not None:
            self.draft_model = load_model(
                draft_path, name=draft.name, dtype=draft_dtype, device=device
            )
            require_rollback(self.draft_model, draft.name)
        logger.info("loaded %s in %.1f s", config, perf_counter() - started)

        models = [model for model in (self.target_model, self.draft_model) if model is not None]
        self._vocab_size = min(
            len(text.tokenizer), *(model.config.get_text_config().vocab_size for model in models)
        )
        ignored = {
            key: value
            for key, value in generation_settings(target_path).items()
            if key in IGNORED_SETTINGS and value not in (None, IGNORED_SETTINGS[key])
        }
        info = EngineInfo(
            backend="transformers",
            target=target.described,
            draft=None if draft is None else draft.described,
            dtype=_dtype_name(dtype),
            device=device_name(device),
            context_length=min(context_length(model.config) for model in models),
            draft_dtype=None if draft is None else _dtype_name(draft_dtype),
            notes=_notes(dtype, ignored),
            versions={"torch": str(torch.__version__), "transformers": transformers.__version__},
        )
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

    def warm_up(self, request: GenerationRequest) -> Generator[None, None, None]:
        self.check(request)
        # The prompt's last chunk, then passes that verify as many drafts as the request will.
        short = replace(
            request,
            prompt_token_ids=request.prompt_token_ids[-PREFILL_CHUNK_TOKENS:],
            max_new_tokens=WARM_UP_ROUNDS * (request.num_draft_tokens + 1),
        )
        proposer = self._proposer(request.draft_kind)
        if request.draft_kind == "prompt_lookup":  # it may find nothing
            proposer = EchoProposer()
        passes = decode(
            TransformersModel(self.target_model, vocab_size=self._vocab_size),
            proposer,
            short,
            stop_token_ids=frozenset(),
            context_length=self._info.context_length,
        )
        with closing(passes), translate_errors("warming up failed", GENERATION_ERRORS):
            num_rounds = 0
            for item in passes:
                yield
                num_rounds += isinstance(item, Round)
                if num_rounds == WARM_UP_ROUNDS:
                    break

    def logit_gap(self, token_ids: Sequence[int], first: int, second: int) -> float | None:
        model = TransformersModel(self.target_model, vocab_size=self._vocab_size)
        with translate_errors("comparing two tokens failed", GENERATION_ERRORS):
            for _ in prefill_chunks(model, token_ids[:-1]):
                pass
            logits = model.forward(token_ids[-1:], num_logits=1)[0]
        return float(logits[first] - logits[second])

    def close(self) -> None:
        self.target_model = self.draft_model = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def rounds(self, request: GenerationRequest) -> Rounds:
        with translate_errors("generating failed", GENERATION_ERRORS):
            yield from decode(
                TransformersModel(self.target_model, vocab_size=self._vocab_size),
                self._proposer(request.draft_kind),
                request,
                stop_token_ids=self._text.vocabulary.stop_token_ids,
                context_length=self._info.context_length,
            )

    def _proposer(self, kind: DraftKind) -> Proposer:
        match kind:
            case "model":
                return ModelProposer(
                    TransformersModel(self.draft_model, vocab_size=self._vocab_size)
                )
            case "prompt_lookup":
                return PromptLookupProposer()
            case "none":
                return NoProposer()


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _draft_dtype(name: str, device: torch.device) -> torch.dtype:
    # A draft decides nothing, so by itself it takes the quicker one. Without AVX-512 a CPU reads
    # a prompt several times as slowly in bfloat16.
    if name == "auto" and device.type == "cpu" and has_wide_onednn():
        return torch.bfloat16
    return _dtype(name, device)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _notes(dtype: torch.dtype, ignored: dict[str, Any]) -> tuple[str, ...]:
    notes = []
    if dtype != torch.float32:
        notes.append(
            f"in {_dtype_name(dtype)} a pass over several tokens rounds differently "
            "from passes over one, so greedy outputs may part where two tokens are nearly tied"
        )
    if ignored:
        settings = ", ".join(f"{key}={value}" for key, value in sorted(ignored.items()))
        notes.append(f"the checkpoint's own {settings} is not applied, on neither side")
    return tuple(notes)
