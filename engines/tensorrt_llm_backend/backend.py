"""TensorRTBackend: what can be used here, builds of both engines, loading with progress."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, closing
from functools import partial
from time import perf_counter

from engines.base import LOADING, Backend, BackendStatus, BuildProgress, Engine
from engines.building import Stage, run_stages
from engines.checkpoint_build import checkpoint_stages
from engines.config import EngineConfig
from engines.environment import gigabytes
from engines.errors import BackendUnavailableError
from engines.generators import finished
from engines.store import EngineStore
from engines.tensorrt_llm_backend.engine_build import build_lines
from engines.tensorrt_llm_backend.engine_plan import Role
from engines.tensorrt_llm_backend.gpus import Gpu, check_gpus, visible_gpus
from engines.tensorrt_llm_backend.installation import find_installation
from engines.tensorrt_llm_backend.setup import Setup, setup_of

NAME = "tensorrt_llm"


class TensorRTBackend(Backend):
    """Runs models through TensorRT-LLM, which lives in an interpreter of its own."""

    builds_on_device = True

    def __init__(self, store: EngineStore | None = None) -> None:
        self._store = store or EngineStore()

    def probe(self, config: EngineConfig | None = None) -> BackendStatus:
        python = config.tensorrt_llm.python if config is not None else None
        try:
            gpus = visible_gpus()
            installation = find_installation(python)
            gpus = _usable(gpus, installation.version)
            find_installation(python, is_imported=True)
        except BackendUnavailableError as exc:
            return BackendStatus(NAME, usable=False, detail=str(exc))
        detail = (
            f"TensorRT-LLM {installation.version} {' and '.join(installation.flows)}; "
            f"{installation.python}, Python {installation.python_version}, torch "
            f"{installation.torch_version}, driver {gpus[0].driver}"
        )
        return BackendStatus(NAME, True, detail, devices=tuple(_described(gpu) for gpu in gpus))

    def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
        setup = setup_of(config, self._store)
        with ExitStack() as cleanup:
            stages = checkpoint_stages(setup.references.values(), self._store, cleanup)
            stages.append(Stage("check the pair", partial(_check, setup)))
            if setup.flow == "engine":
                stages += [
                    Stage(f"build the {role} engine", partial(_build_engine, setup, role))
                    for role in setup.references
                ]
            yield from run_stages(stages)

    def load(self, config: EngineConfig) -> Engine:
        return finished(self.loading(config))

    def loading(self, config: EngineConfig) -> Generator[BuildProgress, None, Engine]:
        from engines.tensorrt_llm_backend.loading import load_engine_flow, load_pytorch_flow

        setup = setup_of(config, self._store)
        if setup.flow == "pytorch":
            return load_pytorch_flow(setup)
        started = perf_counter()
        with closing(load_engine_flow(setup)) as lines:
            while True:
                try:
                    line = next(lines)
                except StopIteration as ended:
                    engine: Engine = ended.value
                    return engine
                yield BuildProgress(1, 1, LOADING, perf_counter() - started, message=line)


def _usable(gpus: tuple[Gpu, ...], version: str) -> tuple[Gpu, ...]:
    """Return the GPUs that it runs on: a machine may have another for its screen.

    Raises:
        BackendUnavailableError: It runs on none; the text is about the first.
    """
    usable, refusals = [], []
    for gpu in gpus:
        try:
            check_gpus((gpu,), version)
        except BackendUnavailableError as exc:
            refusals.append(exc)
        else:
            usable.append(gpu)
    if not usable:
        raise refusals[0]
    return tuple(usable)


def _check(setup: Setup) -> Generator[str | None, None, None]:
    """Refuse what does not fit, before anything takes long."""
    from engines.pairs.compatibility import FITTING
    from engines.tensorrt_llm_backend.loading import load_text

    yield None
    _, warnings = load_text(setup)
    if len(setup.references) > 1:
        yield FITTING
    yield from warnings
    if setup.flow == "engine":
        for role in setup.references:
            yield f"{role}: {setup.plan(role).key}"


def _build_engine(setup: Setup, role: Role) -> Generator[str | None, None, None]:
    timeout_s = setup.config.tensorrt_llm.build_timeout_s
    yield from build_lines(setup.plan(role), setup.store, setup.installation, timeout_s=timeout_s)


def _described(gpu: Gpu) -> str:
    memory = ""
    if gpu.free_bytes is not None and gpu.total_bytes is not None:
        memory = f", {gigabytes(gpu.free_bytes)} of {gigabytes(gpu.total_bytes)} free"
    return f"{gpu.name} (compute capability {gpu.compute_capability}{memory})"
