"""AutoBackend: the back end that suits a pair and this machine, or why it is another."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from time import perf_counter

from engines.base import Backend, BackendStatus, BuildProgress, Engine
from engines.config import AUTO, EngineConfig
from engines.errors import BackendUnavailableError, UnsupportedModelError
from engines.onnxruntime_backend.backend import OnnxRuntimeBackend
from engines.packages import WITH_TORCH, missing_packages
from engines.pairs.memory import MemoryNeed
from engines.store import EngineStore
from engines.text_engine import TextEngine
from engines.transformers_backend.backend import TransformersBackend

PASSED_ON = (UnsupportedModelError, BackendUnavailableError)
GPU_UNUSED = (
    "there is an NVIDIA GPU, but PyTorch, which would run the models on it, is not installed: "
    f"run '{WITH_TORCH}'"
)


class AutoBackend(Backend):
    """onnxruntime on a CPU, transformers on CUDA and for what onnxruntime cannot run."""

    def __init__(self, store: EngineStore | None = None) -> None:
        store = store or EngineStore()
        self._onnxruntime = OnnxRuntimeBackend(store)
        self._transformers = TransformersBackend(store)

    def probe(self, config: EngineConfig | None = None) -> BackendStatus:
        if _uses_cuda(config or EngineConfig()):
            return replace(self._transformers.probe(), name=AUTO)
        first = self._onnxruntime.probe()
        if not first.usable:
            return replace(self._transformers.probe(), name=AUTO)
        if missing := missing_packages(("torch",)):
            others = f"others need {', '.join(missing)}: run '{WITH_TORCH}'"
        else:
            others = "others through transformers"
        return replace(first, name=AUTO, detail=f"{first.detail}; {others}")

    def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
        if _uses_cuda(config):
            yield from self._transformers.build(config)
            return
        started = perf_counter()
        try:
            with closing(self._onnxruntime.build(config)) as progress:
                yield from progress
        except PASSED_ON as exc:
            yield BuildProgress(
                1, 1, "choose a back end", perf_counter() - started, message=f"{exc}"
            )
            with _reason_kept(exc):
                yield from self._transformers.build(config)

    def load(self, config: EngineConfig) -> Engine:
        if _uses_cuda(config):
            return self._transformers.load(config)
        try:
            engine = self._onnxruntime.load(config)
        except PASSED_ON as exc:
            with _reason_kept(exc):
                engine = self._transformers.load(config)
            note = str(exc)
        else:
            if not _has_nvidia_gpu():
                return engine
            note = GPU_UNUSED
        assert isinstance(engine, TextEngine)
        engine.add_note(note)
        return engine

    def memory_need(self, config: EngineConfig) -> MemoryNeed | None:
        try:
            need = None if _uses_cuda(config) else self._onnxruntime.memory_need(config)
            return need or self._transformers.memory_need(config)
        except PASSED_ON:
            return None


@contextmanager
def _reason_kept(reason: Exception) -> Iterator[None]:
    """Where the second back end is not there either, say what kept the first from it, too."""
    try:
        yield
    except BackendUnavailableError as exc:
        raise BackendUnavailableError(f"{reason}; {exc}") from exc


def _uses_cuda(config: EngineConfig) -> bool:
    """Return whether a config runs on a GPU here. PyTorch is only asked where there may be one."""
    if config.device != "auto":
        return config.device == "cuda"
    if not _has_nvidia_gpu() or missing_packages(("torch",)):
        return False
    import torch

    return torch.cuda.is_available()


def _has_nvidia_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None
