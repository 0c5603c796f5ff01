"""EngineSlot: at most one loaded engine, built where need be, used by one caller at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from threading import Lock
from time import perf_counter

from engines.backends import create_backend
from engines.base import LOADING, WAITING, Backend, BuildProgress, Engine
from engines.config import EngineConfig
from engines.errors import ModelNotBuiltError

HEARTBEAT_S = 0.25  # who waits for the engine may stop waiting this often


class EngineSlot:
    """The process's engine. Pages and commands ask for a config and get it loaded."""

    def __init__(self, create: Callable[[str], Backend] = create_backend) -> None:
        """Make an empty slot.

        Args:
            create: Makes a back end by name; tests and plug-ins bring their own.
        """
        self._create = create
        self._config: EngineConfig | None = None
        self._engine: Engine | None = None
        self._held_bytes = 0  # by that engine, as its back end reckons
        # A plain lock: a generator may be closed by another thread than it was begun on.
        self._in_use = Lock()

    def acquire(self) -> Generator[BuildProgress, None, None]:
        """Wait until nobody uses the engine, yielding meanwhile, then keep it until `release`.

        A run that was cancelled holds the engine until its last pass has ended.
        """
        started = perf_counter()
        while not self._in_use.acquire(timeout=HEARTBEAT_S):
            yield BuildProgress(1, 1, WAITING, perf_counter() - started)

    def release(self) -> None:
        """Let the next caller have the engine."""
        self._in_use.release()

    def ensure(self, config: EngineConfig) -> Generator[BuildProgress, None, Engine]:
        """Return the engine of a config, yielding progress while it is built and loaded.

        The engine that was loaded before is closed first, so that two never share the device. If
        the new one fails to load, the slot is empty and the next call loads what it is asked for.
        One that does not fit into the memory there is, is refused before the old one is closed.
        Where several callers share the slot, each calls between `acquire` and `release`.

        Raises:
            EngineError: It cannot be built or loaded.
        """
        if self._engine is not None and config == self._config and self._engine.is_open:
            return self._engine
        backend = self._create(config.backend)
        yield BuildProgress(1, 1, LOADING, 0.0)
        try:
            return (yield from self._load(backend, config))
        except ModelNotBuiltError:
            with closing(backend.build(config)) as progress:
                yield from progress
        yield BuildProgress(1, 1, LOADING, 0.0)
        return (yield from self._load(backend, config))

    def load(
        self, config: EngineConfig, on_progress: Callable[[BuildProgress], None] | None = None
    ) -> Engine:
        """Return the engine of a config, for callers who need not be able to stop.

        Raises:
            EngineError: It cannot be built or loaded.
        """
        steps = self.ensure(config)
        while True:
            try:
                progress = next(steps)
            except StopIteration as ended:
                engine: Engine = ended.value
                return engine
            if on_progress is not None:
                on_progress(progress)

    def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
        """Build without loading, yielding progress.

        An engine of the same config that is loaded is closed: its files may be new. Where a build
        needs the device, whatever is loaded goes first.
        """
        backend = self._create(config.backend)
        yield from self.acquire()
        try:
            if backend.builds_on_device:
                self.close()
            with closing(backend.build(config)) as progress:
                yield from progress
            if config == self._config:
                self.close()
        finally:
            self.release()

    def close(self) -> None:
        """Close the loaded engine, if any."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._config = None
        self._held_bytes = 0

    def _load(
        self, backend: Backend, config: EngineConfig
    ) -> Generator[BuildProgress, None, Engine]:
        need = backend.memory_need(config)
        if need is not None:
            need.require(freed_bytes=self._held_bytes)
        self.close()
        self._engine = yield from backend.loading(config)
        self._config = config
        self._held_bytes = 0 if need is None else need.num_bytes
        return self._engine
