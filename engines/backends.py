"""The table of back ends: names to classes, imported when asked for, and the choice among them.

To add one: implement `Backend` and `Engine` of `engines.base`, add a line here, and a case to
`tests/engines/test_contract.py`.
"""

from __future__ import annotations

import importlib

from engines.base import Backend
from engines.config import AUTO
from engines.store import EngineStore

BACKENDS = {
    "onnxruntime": "engines.onnxruntime_backend.backend:OnnxRuntimeBackend",
    "transformers": "engines.transformers_backend.backend:TransformersBackend",
    "tensorrt_llm": "engines.tensorrt_llm_backend.backend:TensorRTBackend",
}
CHOOSER = "engines.auto_backend:AutoBackend"
BACKEND_CHOICES = (AUTO, *BACKENDS)


def create_backend(name: str, store: EngineStore | None = None) -> Backend:
    """Return a back end by name, importing what it needs.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in BACKEND_CHOICES:
        raise ValueError(f"backend is '{name}': use one of {', '.join(BACKEND_CHOICES)}")
    place = CHOOSER if name == AUTO else BACKENDS[name]
    module, _, class_name = place.partition(":")
    backend = getattr(importlib.import_module(module), class_name)(store)
    assert isinstance(backend, Backend)
    return backend
