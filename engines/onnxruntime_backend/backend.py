"""OnnxRuntimeBackend: what can be used here, and builds as fetch, convert, narrow, check."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from functools import partial

from engines.base import Backend, BackendStatus, BuildProgress, Engine
from engines.building import Stage, run_stages
from engines.checkpoint_build import checkpoint_stages
from engines.checkpoints import Reference, built_path, parse_reference
from engines.child import child_lines, own_module
from engines.config import EngineConfig
from engines.environment import usable_cpus
from engines.errors import BackendUnavailableError, UnsupportedModelError
from engines.packages import BASE, missing_packages, version_of
from engines.pairs.memory import MemoryNeed
from engines.pairs.reading import known_configs
from engines.store import EngineStore

NAME = "onnxruntime"
PACKAGES = ("onnxruntime", "onnx", "ml_dtypes", "transformers", "gguf", "safetensors")
USE_OTHER = "use the transformers back end"


class OnnxRuntimeBackend(Backend):
    """Runs Llamas on the CPU through onnxruntime."""

    def __init__(self, store: EngineStore | None = None) -> None:
        self._store = store or EngineStore()

    def probe(self, config: EngineConfig | None = None) -> BackendStatus:
        if missing := missing_packages(PACKAGES):
            detail = f"needs {', '.join(missing)}: run '{BASE}'"
            return BackendStatus(NAME, usable=False, detail=detail)
        try:
            import onnxruntime  # noqa: F401
        except (ImportError, OSError) as exc:  # installed, but for another processor or system
            detail = f"onnxruntime cannot be imported ({exc}): run '{BASE}' again"
            return BackendStatus(NAME, usable=False, detail=detail)
        return BackendStatus(
            NAME,
            usable=True,
            detail=f"{NAME} {version_of(NAME)}, Llamas only",
            devices=(f"cpu, {usable_cpus()} threads",),
        )

    def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
        _require_usable(config)
        from engines.onnxruntime_backend.cpu import has_integer_products
        from engines.onnxruntime_backend.narrow_build import narrow_stage

        target = parse_reference(config.target)
        draft = parse_reference(config.draft) if config.draft is not None else None
        references = [target] if draft is None else [target, draft]
        with ExitStack() as cleanup:
            stages = checkpoint_stages(references, self._store, cleanup)
            stages.append(Stage("read the configurations", partial(self._read, references)))
            if draft is not None and has_integer_products():
                stages.append(
                    Stage(f"narrow {draft.name}", partial(narrow_stage, draft, self._store))
                )
            stages.append(Stage("check", partial(self._check, config)))
            yield from run_stages(stages)

    def load(self, config: EngineConfig) -> Engine:
        _require_usable(config)
        from engines.onnxruntime_backend.engine import OnnxEngine

        return OnnxEngine(config, self._store)

    def memory_need(self, config: EngineConfig) -> MemoryNeed | None:
        from engines.onnxruntime_backend.memory import memory_need

        configs = known_configs(config, self._store)
        return None if configs is None else memory_need(*configs)

    def _read(self, references: Sequence[Reference]) -> Generator[str | None, None, None]:
        """Refuse what is no Llama before anything is made for it."""
        from engines.onnxruntime_backend.llama import LlamaShape

        for reference in references:
            shape = LlamaShape.load(built_path(reference, self._store), name=reference.name)
            sizes = f"{shape.num_layers} layers, {shape.hidden_size} wide"
            yield f"{reference.name}: a Llama of {sizes}"

    def _check(self, config: EngineConfig) -> Generator[str | None, None, None]:
        """Load the pair in a process of its own, which can be killed, and compare its passes."""
        models = [config.target, *([config.draft] if config.draft is not None else [])]
        return child_lines(
            own_module("engines.onnxruntime_backend.check", str(self._store.root), *models),
            action="checking the pair",
        )


def _require_usable(config: EngineConfig) -> None:
    if missing := missing_packages(PACKAGES):
        raise BackendUnavailableError(
            f"the onnxruntime back end needs {', '.join(missing)}: run '{BASE}'"
        )
    if config.device == "cuda":
        raise UnsupportedModelError(f"the onnxruntime back end runs on the CPU; {USE_OTHER}")
    if config.dtype not in ("auto", "float32"):
        raise UnsupportedModelError(
            f"the onnxruntime back end runs a target in float32, not {config.dtype}: with other "
            f"types one pass over several tokens would not say what single passes say; {USE_OTHER}"
        )
