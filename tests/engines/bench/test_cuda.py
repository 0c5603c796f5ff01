"""The CUDA benchmark, over a tiny pair on a CPU: every way says the same, one of them is eager."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.bench.cuda import EAGER, PLAIN, main, measure, uncaptured
from engines.config import EngineConfig
from engines.transformers_backend.captured import CapturedModel
from engines.transformers_backend.engine import TransformersEngine
from tests.conftest import load_engine


def test_all_ways_are_run_in_turn_and_agree(
    tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("engines.bench.cuda.PROMPTS", ("one two", "three one"))
    config = EngineConfig("transformers", str(tiny_target), str(tiny_draft), dtype="float32")
    with load_engine(config) as engine:
        assert isinstance(engine, TransformersEngine)
        engine.is_capturing, engine.default_min_draft_prob = True, 0.0
        runs = measure(engine, 6, 1)
        assert isinstance(engine.open_target(20), CapturedModel)
        with uncaptured(engine):
            assert not isinstance(engine.open_target(20), CapturedModel)
    assert list(runs) == [EAGER, PLAIN, *(f"K {number}" for number in range(1, 9))]
    outputs = {tuple(run.output_token_ids) for timed in runs.values() for run in timed}
    assert len(outputs) == 1
    assert [len(ids) for ids in outputs.pop()] == [6, 6]


def test_where_there_is_no_gpu_it_says_so(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 1
    assert "PyTorch sees no CUDA device here" in capsys.readouterr().err
