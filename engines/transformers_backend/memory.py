"""What a pair takes through PyTorch: weights, caches, on CUDA graphs and what else is set up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.config import EngineConfig
from engines.pairs.memory import CACHES, MemoryNeed, kv_bytes, need_of, weight_bytes
from engines.transformers_backend.device import (
    device_name,
    device_of,
    draft_dtype_of,
    dtype_name,
    dtype_of,
    free_memory_bytes,
)

CUDA_BYTES = 10**9  # graphs, workspaces and the context of CUDA: an estimate


def memory_need(
    config: EngineConfig, target: Mapping[str, Any], draft: Mapping[str, Any] | None
) -> MemoryNeed | None:
    """Return what a pair takes by its configurations; None where they do not tell."""
    device = device_of(config.device)
    dtypes = {"target": dtype_name(dtype_of(config.dtype, device))}
    models = {"target": target}
    if draft is not None:
        dtypes["draft"] = dtype_name(draft_dtype_of(config.dtype, device))
        models["draft"] = draft
    parts = {role: weight_bytes(model, dtypes[role]) for role, model in models.items()}
    parts[CACHES] = kv_bytes((model, dtypes[role]) for role, model in models.items())
    if device.type == "cuda":
        parts["graphs and workspaces"] = CUDA_BYTES
    place = device_name(device) if device.type == "cuda" else "memory"
    return need_of(parts, free_bytes=free_memory_bytes(device), device=place)
