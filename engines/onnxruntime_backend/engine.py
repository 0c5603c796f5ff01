"""OnnxEngine: target and draft as sessions of onnxruntime on the CPU."""

from __future__ import annotations

import logging
import platform
from time import perf_counter
from typing import ClassVar

import onnxruntime

from engines.base import EngineInfo
from engines.built_pair import BuiltPair
from engines.config import DEFAULT_MIN_DRAFT_PROB, DraftKind, EngineConfig
from engines.loop_engine import LoopEngine, settings_notes
from engines.onnxruntime_backend.cpu import has_integer_products
from engines.onnxruntime_backend.llama import LlamaShape
from engines.onnxruntime_backend.model import OnnxModel
from engines.onnxruntime_backend.narrow_build import narrow_arrays
from engines.onnxruntime_backend.sessions import (
    GENERATION_ERRORS,
    give_back_memory,
    load_session,
    use_one_pool,
)
from engines.store import EngineStore
from engines.tensor_files import read_checkpoint

logger = logging.getLogger(__name__)

SLOW_INTEGERS = (
    "this processor has no AVX2, so the draft runs in float32 and costs more of a target step"
)


class OnnxEngine(LoopEngine):
    """A Llama in float32, with or without a draft, whose matrices are 4-bit integers."""

    generation_errors: ClassVar = GENERATION_ERRORS
    default_min_draft_prob = DEFAULT_MIN_DRAFT_PROB

    def __init__(self, config: EngineConfig, store: EngineStore) -> None:
        """Load the models.

        Raises:
            EngineError: They are not built, unreadable, incompatible, no Llamas, or too large.
        """
        pair = BuiltPair.find(config, store)
        target, draft = pair.target, pair.draft
        self._target_shape = LlamaShape.load(target.path, name=target.name)
        self._draft_shape = self._target_shape
        if draft is not None:
            self._draft_shape = LlamaShape.load(draft.path, name=draft.name)
        text, warnings = pair.load_text()

        started = perf_counter()
        self._draft: onnxruntime.InferenceSession | None = None
        is_narrow = has_integer_products()
        if draft is not None:
            arrays = read_checkpoint(draft.path, draft.name)
            if is_narrow:
                arrays |= narrow_arrays(draft.reference, store)
            self._draft = load_session(
                self._draft_shape, arrays, name=draft.name, is_narrow=is_narrow
            )
        self._target: onnxruntime.InferenceSession | None = load_session(
            self._target_shape,
            read_checkpoint(target.path, target.name),
            name=target.name,
            is_narrow=False,
        )
        give_back_memory()
        logger.info("loaded %s in %.1f s", config, perf_counter() - started)

        shapes = (self._target_shape, self._draft_shape)
        self._vocab_size = min(len(text.tokenizer), *(shape.vocab_size for shape in shapes))
        notes = (*settings_notes(target.path), *warnings)
        if draft is not None and not is_narrow:
            notes = (*notes, SLOW_INTEGERS)
        info = EngineInfo(
            backend="onnxruntime",
            target=target.reference.described,
            draft=None if draft is None else draft.reference.described,
            dtype="float32",
            device=f"{platform.machine()} CPU, {use_one_pool()} threads",
            context_length=min(shape.context_length for shape in shapes),
            draft_dtype=None if draft is None else "int4" if is_narrow else "float32",
            notes=notes,
            versions={"onnxruntime": onnxruntime.__version__},
            commits=pair.commits,
        )
        kinds: tuple[DraftKind, ...] = ("prompt_lookup", "none")
        super().__init__(
            info,
            text,
            kinds if draft is None else ("model", *kinds),
            num_known_ids=self._vocab_size,
        )

    @property
    def is_open(self) -> bool:
        return self._target is not None

    def open_target(self, capacity: int) -> OnnxModel:
        assert self._target is not None
        return OnnxModel(
            self._target, self._target_shape, capacity=capacity, vocab_size=self._vocab_size
        )

    def open_draft(self, capacity: int) -> OnnxModel:
        assert self._draft is not None
        return OnnxModel(
            self._draft, self._draft_shape, capacity=capacity, vocab_size=self._vocab_size
        )

    def close(self) -> None:
        self._target = self._draft = None
