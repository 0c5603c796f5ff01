"""The transformers engine as it is on CUDA, and what it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.config import DraftKind, EngineConfig, GenerationRequest
from engines.transformers_backend.engine import TransformersEngine
from tests.conftest import load_engine


@pytest.fixture
def engine(tiny_target: Path, tiny_draft: Path) -> Iterator[TransformersEngine]:
    config = EngineConfig("transformers", str(tiny_target), str(tiny_draft), dtype="float32")
    with load_engine(config) as loaded:
        assert isinstance(loaded, TransformersEngine)
        loaded.is_capturing = True
        yield loaded


def ask(
    engine: TransformersEngine, kind: DraftKind, number: int, **settings: Any
) -> GenerationRequest:
    ids = engine.encode("one two one two one", chat_template=False)
    return GenerationRequest(ids, kind, number, 24, **settings)
