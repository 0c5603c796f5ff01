"""EngineSlot: at most one loaded engine, built first where need be."""

from __future__ import annotations

from collections.abc import Callable, Generator
from threading import Lock

from engines.backends import create_backend
from engines.base import LOADING, Backend, BuildProgress, Engine
from engines.config import EngineConfig
from engines.errors import ModelNotBuiltError


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
        self._lock = Lock()

    def ensure(self, config: EngineConfig) -> Generator[BuildProgress, None, Engine]:
        """Return the engine of a config, yielding progress while it is built and loaded.

        The engine that was loaded before is closed first, so that two never share the device. If
        the new one fails to load, the slot is empty and the next call loads what it is asked for.

        Raises:
            EngineError: It cannot be built or loaded.
        """
        with self._lock:
            if self._engine is not None and config == self._config:
                return self._engine
        backend = self._create(config.backend)
        yield BuildProgress(1, 1, LOADING, 0.0)
        try:
            return self._load(backend, config)
        except ModelNotBuiltError:
            yield from backend.build(config)
        yield BuildProgress(1, 1, LOADING, 0.0)
        return self._load(backend, config)

    def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
        """Build without loading, yielding progress."""
        yield from self._create(config.backend).build(config)

    def close(self) -> None:
        """Close the loaded engine, if any."""
        with self._lock:
            self._close()

    def _load(self, backend: Backend, config: EngineConfig) -> Engine:
        with self._lock:
            self._close()
            self._engine = backend.load(config)
            self._config = config
            return self._engine

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._config = None
