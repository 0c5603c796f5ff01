"""The table of back ends: names to classes, imported when asked for.

To add one: implement `Backend` and `Engine` of `engines.base`, add a line here, and a case to
`tests/engines/test_contract.py`.
"""

from __future__ import annotations

import importlib

from engines.base import Backend
from engines.store import EngineStore

BACKENDS = {
    "transformers": "engines.transformers_backend.backend:TransformersBackend",
    "tensorrt_llm": "engines.tensorrt_llm_backend.backend:TensorRTBackend",
}


def create_backend(name: str, store: EngineStore | None = None) -> Backend:
    """Return a back end by name, importing what it needs.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is '{name}': use one of {', '.join(BACKENDS)}")
    module, _, class_name = BACKENDS[name].partition(":")
    backend = getattr(importlib.import_module(module), class_name)(store)
    assert isinstance(backend, Backend)
    return backend
