"""OnnxModel: a session and its KV buffers, which a rollback leaves as they are and forgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnxruntime

from engines.onnxruntime_backend.graph import cache_names
from engines.onnxruntime_backend.llama import LlamaShape
from engines.sampling import token_probs

OUTPUTS = ("logits", "probs")
Rows: TypeAlias = np.ndarray[Any, Any]


class OnnxModel:
    """A `CachedModel` for one sequence over a session that several share one after another."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        shape: LlamaShape,
        *,
        capacity: int,
        vocab_size: int,
    ) -> None:
        """Make room for a sequence.

        Args:
            session: See `sessions`.
            shape: Of its model.
            capacity: The most tokens that are cached at any time.
            vocab_size: Of the tokenizer: rows of padding behind it are cut off.
        """
        self._session = session
        self._shape = shape
        self._vocab_size = vocab_size
        self._num_cached_tokens = 0
        # One buffer for all passes: memory that is new each time costs as much as reading it.
        self._outputs = np.empty((len(OUTPUTS), 0, shape.vocab_size), np.float32)
        self._num_logits = 0  # of the last pass
        self._binding = session.io_binding()
        sizes = (1, shape.num_key_value_heads, capacity, shape.head_dim)
        for past, present in cache_names(shape.num_layers):
            buffer = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(sizes, np.float32))
            self._binding.bind_ortvalue_input(past, buffer)
            self._binding.bind_ortvalue_output(present, buffer)

    @property
    def num_cached_tokens(self) -> int:
        return self._num_cached_tokens

    def forward(self, token_ids: Sequence[int], *, num_logits: int) -> Rows:
        total = self._num_cached_tokens + len(token_ids)
        if num_logits > self._outputs.shape[1]:
            sizes = (len(OUTPUTS), num_logits, self._shape.vocab_size)
            self._outputs = np.empty(sizes, np.float32)
        binding = self._binding
        for name, values in (
            ("input_ids", np.array([token_ids], np.int64)),
            ("total_sequence_length", np.array(total, np.int32)),
            ("seqlens_k", np.array([total - 1], np.int32)),
            ("num_logits", np.array([num_logits], np.int64)),
        ):
            binding.bind_cpu_input(name, values)
        for name, rows in zip(OUTPUTS, self._outputs[:, :num_logits], strict=True):
            binding.bind_output(name, "cpu", 0, np.float32, [1, *rows.shape], rows.ctypes.data)
        self._session.run_with_iobinding(binding)
        self._num_cached_tokens = total
        self._num_logits = num_logits
        return self._last("logits")

    def token_probs(self, rows: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        if self._vocab_size < self._shape.vocab_size:  # the graph's have a share for the padding
            return token_probs(self._last("logits"), rows, token_ids)
        probs = self._last("probs")
        return [float(probs[row, id_]) for row, id_ in zip(rows, token_ids, strict=True)]

    def _last(self, output: str) -> Rows:
        """Return [num_logits, vocab_size] of the last pass."""
        rows: Rows = self._outputs[OUTPUTS.index(output), : self._num_logits, : self._vocab_size]
        return rows

    def truncate(self, num_tokens: int) -> None:
        self._num_cached_tokens = num_tokens

    def synchronize(self) -> None:
        """A pass is over when it returns."""
