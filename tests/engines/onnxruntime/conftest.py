"""Tiny random Llamas that onnxruntime can run: their heads have 16 dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.base import Engine
from engines.config import EngineConfig
from engines.onnxruntime_backend.backend import OnnxRuntimeBackend
from engines.slot import EngineSlot
from engines.store import EngineStore
from tests.conftest import write_tiny_model

HEAD_DIM = 16


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "wide-target"
    return write_tiny_model(folder, seed=1, head_dim=HEAD_DIM)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "wide-draft"
    return write_tiny_model(folder, seed=2, num_layers=1, head_dim=HEAD_DIM)


def config_of(target: Path, draft: Path | None = None) -> EngineConfig:
    return EngineConfig("onnxruntime", str(target), None if draft is None else str(draft))


def load(store: EngineStore, config: EngineConfig) -> Engine:
    """Build and load a pair from a store of the test's own."""
    return EngineSlot(lambda name: OnnxRuntimeBackend(store)).load(config)


@pytest.fixture(scope="module")
def engine(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with load(EngineStore(tmp_path_factory.mktemp("store")), config_of(target, draft)) as loaded:
        yield loaded
