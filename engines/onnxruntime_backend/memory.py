"""What a pair takes here: weights as they are packed, a narrow draft, caches, the sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil

from engines.onnxruntime_backend.cpu import has_integer_products
from engines.onnxruntime_backend.narrow import BITS, BLOCK_SIZE
from engines.pairs.memory import BYTES, CACHES, MemoryNeed, kv_bytes, need_of, weight_bytes

SESSION_BYTES = 45 * 10**6  # what onnxruntime takes beside a model's weights, by measurement
# Of a narrow weight: itself, and its share of a block's scale and zero point
NARROW_BITS = BITS + (32 + BITS) / BLOCK_SIZE


def memory_need(target: Mapping[str, Any], draft: Mapping[str, Any] | None) -> MemoryNeed | None:
    """Return what a pair takes by its configurations; None where they do not tell."""
    models = [target] if draft is None else [target, draft]
    if any(config.get("model_type") != "llama" for config in models):
        return None  # it runs elsewhere
    parts = {"target": _with_session(weight_bytes(target, "float32"))}
    if draft is not None:
        is_narrow = has_integer_products()
        weights = _narrow_bytes(draft) if is_narrow else weight_bytes(draft, "float32")
        parts["draft"] = _with_session(weights)
    parts[CACHES] = kv_bytes((config, "float32") for config in models)
    return need_of(parts, free_bytes=int(psutil.virtual_memory().available), device="memory")


def _narrow_bytes(config: Mapping[str, Any]) -> int | None:
    """Return what a draft takes: matrices of 4 bits, and the embeddings as they are stored."""
    whole = weight_bytes(config, "float32")
    if whole is None:
        return None
    embeddings = config["vocab_size"] * config["hidden_size"]
    num_matrices = whole // BYTES["float32"]
    if not config.get("tie_word_embeddings"):
        num_matrices -= embeddings
    stored = BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), BYTES["float32"])
    return int(num_matrices * NARROW_BITS / 8 + embeddings * stored)


def _with_session(num_bytes: int | None) -> int | None:
    return None if num_bytes is None else num_bytes + SESSION_BYTES
