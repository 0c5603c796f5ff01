"""The back end that is chosen for a pair, and the reason where it is not the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import auto_backend
from engines.auto_backend import AutoBackend
from engines.backends import BACKEND_CHOICES, create_backend
from engines.base import Engine
from engines.config import AUTO, EngineConfig
from engines.errors import BackendUnavailableError
from engines.onnxruntime_backend import backend as onnxruntime_module
from engines.slot import EngineSlot
from engines.store import EngineStore
from engines.transformers_backend import backend as transformers_module
from tests.conftest import write_tiny_model


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "wide", seed=1, head_dim=16)


def load(store: EngineStore, config: EngineConfig) -> Engine:
    return EngineSlot(lambda name: AutoBackend(store)).load(config)


def test_it_is_the_default_and_one_of_the_choices(store: EngineStore):
    assert EngineConfig().backend == AUTO == BACKEND_CHOICES[0]
    assert isinstance(create_backend(AUTO, store), AutoBackend)


def test_a_llama_on_a_cpu_runs_on_onnxruntime(wide: Path, store: EngineStore):
    with load(store, EngineConfig(target=str(wide))) as engine:
        assert engine.info.backend == "onnxruntime"
        assert engine.info.notes == ()


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {}], ids=["dtype", "heads"])
def test_what_onnxruntime_cannot_run_falls_back_with_the_reason(
    tiny_target: Path, wide: Path, store: EngineStore, settings
):
    target = wide if settings else tiny_target
    with load(store, EngineConfig(target=str(target), **settings)) as engine:
        assert engine.info.backend == "transformers"
        assert "use the transformers back end" in engine.info.notes[0]


def test_a_build_that_falls_back_says_so_and_goes_on(tiny_target: Path, store: EngineStore):
    progress = list(AutoBackend(store).build(EngineConfig(target=str(tiny_target))))
    messages = [item.message for item in progress if item.message]
    assert any("its heads have 8 dimensions" in message for message in messages)
    assert messages[-1].startswith(f"{tiny_target.name}: llama")


def test_without_onnxruntime_transformers_is_named(
    wide: Path, store: EngineStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(onnxruntime_module, "PACKAGES", ("no-such-package",))
    assert AutoBackend(store).probe().detail.startswith("torch ")
    with load(store, EngineConfig(target=str(wide))) as engine:
        assert engine.info.backend == "transformers"
        assert "needs no-such-package" in engine.info.notes[0]


def test_without_either_both_reasons_are_told(
    tiny_target: Path, store: EngineStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transformers_module, "PACKAGES", ("no-such-torch",))
    backend, config = AutoBackend(store), EngineConfig(target=str(tiny_target))
    sentence = r"its heads have 8 dimensions.*needs no-such-torch: run 'pip install -r"
    with pytest.raises(BackendUnavailableError, match=sentence):
        backend.load(config)
    with pytest.raises(BackendUnavailableError, match=sentence):
        list(backend.build(config))


def test_the_probe_says_what_other_models_need(store: EngineStore, monkeypatch: pytest.MonkeyPatch):
    assert AutoBackend(store).probe().detail.endswith("Llamas only; others through transformers")
    monkeypatch.setattr(auto_backend, "missing_packages", lambda names: ["torch"])
    status = AutoBackend(store).probe()
    assert status.usable
    assert status.name == AUTO
    assert status.detail.endswith("others need torch: run 'pip install -r requirements-torch.txt'")


def test_a_gpu_that_is_not_used_is_told(
    wide: Path, store: EngineStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(auto_backend, "_has_nvidia_gpu", lambda: True)
    with load(store, EngineConfig(target=str(wide))) as engine:
        assert engine.info.backend == "onnxruntime"  # PyTorch sees none here
        assert "there is an NVIDIA GPU" in engine.info.notes[0]


def test_a_gpu_that_is_asked_for_is_transformers_business(wide: Path, store: EngineStore):
    config = EngineConfig(target=str(wide), device="cuda")
    with pytest.raises(BackendUnavailableError, match="PyTorch sees no CUDA device here"):
        AutoBackend(store).load(config)
