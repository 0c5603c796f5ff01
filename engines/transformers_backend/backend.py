"""TransformersBackend: what can be used here, and builds as fetch, verify, convert, self-check."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from functools import partial

from engines.base import Backend, BackendStatus, BuildProgress, Engine
from engines.building import Stage, run_stages
from engines.checkpoint_build import checkpoint_stages
from engines.checkpoints import Reference, parse_reference
from engines.config import EngineConfig
from engines.errors import BackendUnavailableError
from engines.packages import WITH_TORCH, missing_packages, version_of
from engines.pairs.memory import MemoryNeed
from engines.pairs.reading import known_configs
from engines.store import EngineStore

PACKAGES = ("torch", "transformers", "accelerate", "gguf", "safetensors")


class TransformersBackend(Backend):
    """Runs models through PyTorch and transformers."""

    def __init__(self, store: EngineStore | None = None) -> None:
        self._store = store or EngineStore()

    def probe(self, config: EngineConfig | None = None) -> BackendStatus:
        missing = missing_packages(PACKAGES)
        if missing:
            detail = f"needs {', '.join(missing)}: run '{WITH_TORCH}'"
            return BackendStatus("transformers", usable=False, detail=detail)
        try:
            import torch
        except (ImportError, OSError) as exc:  # installed, but a library it needs is not
            detail = f"torch cannot be imported ({exc}): run '{WITH_TORCH}' again"
            return BackendStatus("transformers", usable=False, detail=detail)
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        versions = ", ".join(f"{name} {version_of(name)}" for name in PACKAGES[:2])
        return BackendStatus("transformers", True, versions, devices=(*gpus, "cpu"))

    def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
        _require_packages()
        references = [parse_reference(config.target)]
        if config.draft is not None:
            references.append(parse_reference(config.draft))
        with ExitStack() as cleanup:
            stages = checkpoint_stages(references, self._store, cleanup)
            stages.append(Stage("check", partial(self._check, references)))
            yield from run_stages(stages)

    def load(self, config: EngineConfig) -> Engine:
        _require_packages()
        from engines.transformers_backend.engine import TransformersEngine

        return TransformersEngine(config, self._store)

    def memory_need(self, config: EngineConfig) -> MemoryNeed | None:
        _require_packages()
        from engines.transformers_backend.memory import memory_need

        configs = known_configs(config, self._store)
        return None if configs is None else memory_need(config, *configs)

    def _check(self, references: Sequence[Reference]) -> Generator[str | None, None, None]:
        from engines.transformers_backend.checkpoint_check import check_checkpoints

        return check_checkpoints(references, self._store)


def _require_packages() -> None:
    if missing := missing_packages(PACKAGES):
        raise BackendUnavailableError(
            f"the transformers back end needs {', '.join(missing)}: run '{WITH_TORCH}'"
        )
