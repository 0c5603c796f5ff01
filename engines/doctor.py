"""What is installed and usable here: back ends, devices, memory, the store, the bundled pair."""

from __future__ import annotations

from typing import Any

import psutil

from engines import bundled
from engines.backends import BACKENDS, create_backend
from engines.checkpoints import bundled_key, parse_reference, stored_key
from engines.config import BUNDLED_DRAFT, EngineConfig, TensorRTOptions
from engines.environment import environment, free_disk_bytes
from engines.errors import EngineBuildError, EngineError
from engines.store import EngineStore


def doctor(store: EngineStore | None = None, python: str | None = None) -> dict[str, Any]:
    """Return the state of this installation. Loads no model and needs no network.

    Args:
        store: Of engines; None: the usual one.
        python: The interpreter to ask for TensorRT-LLM; None: the usual one.
    """
    store = store or EngineStore()
    config = EngineConfig(tensorrt_llm=TensorRTOptions(python=python))
    statuses = [create_backend(name, store).probe(config) for name in BACKENDS]
    return {
        "backends": {
            status.name: {
                "usable": status.usable,
                "detail": status.detail,
                "devices": list(status.devices),
            }
            for status in statuses
        },
        "memory_available_bytes": psutil.virtual_memory().available,
        "store": {
            "folder": str(store.root),  # not "path", which Gradio takes for a file to send
            "free_bytes": free_disk_bytes(store.root),
            "engines": [entry.to_dict() for entry in store.entries()],
        },
        "bundled": {
            "target": bundled.NAME,
            "draft": bundled.DRAFT_NAME,
            "state": _bundled_state(store),
            "draft_state": _bundled_draft_state(store),
        },
        "environment": environment(),
    }


def _bundled_state(store: EngineStore) -> str:
    try:
        if store.find(bundled_key()) is not None:
            return "built"
        found = bundled.local_copy()
    except EngineBuildError as exc:
        return str(exc)
    if found is not None:
        return f"not built; its file is here already: {found}"
    return f"not built; the first build fetches {bundled.GGUF_BYTES / 1e6:.0f} MB"


def _bundled_draft_state(store: EngineStore) -> str:
    try:
        if store.find(stored_key(parse_reference(BUNDLED_DRAFT))) is not None:
            return "built"
    except EngineError as exc:
        return str(exc)
    return f"not built; it is unpacked from {bundled.DRAFT_FOLDER} in seconds"
