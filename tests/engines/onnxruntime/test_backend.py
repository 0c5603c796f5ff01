"""Builds: what they leave, what they refuse, and the check at their end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engines.config import EngineConfig
from engines.errors import (
    BackendUnavailableError,
    EngineBuildError,
    EngineError,
    UnsupportedModelError,
)
from engines.onnxruntime_backend import backend as backend_module, check as check_module
from engines.onnxruntime_backend.backend import OnnxRuntimeBackend
from engines.onnxruntime_backend.check import check, main as check_main
from engines.onnxruntime_backend.narrow_build import main as narrow_main
from engines.store import EngineStore
from engines.tensor_files import read_arrays, write_arrays
from tests.conftest import write_tiny_model
from tests.engines.onnxruntime.conftest import HEAD_DIM, config_of


def messages(backend: OnnxRuntimeBackend, config: EngineConfig) -> list[str]:
    return [progress.message for progress in backend.build(config) if progress.message]


def test_the_probe_says_what_it_runs(store: EngineStore):
    status = OnnxRuntimeBackend(store).probe()
    assert status.usable
    assert status.detail.endswith("Llamas only")
    assert status.devices[0].startswith("cpu")


def test_a_build_narrows_the_draft_once_and_checks(target: Path, draft: Path, store: EngineStore):
    backend = OnnxRuntimeBackend(store)
    first = messages(backend, config_of(target, draft))
    second = messages(backend, config_of(target, draft))
    assert [entry.name for entry in store.entries()] == ["wide-draft, 4 bits"]
    assert first[0] == "wide-target: a Llama of 2 layers, 32 wide"
    assert first[2].startswith("stored as wide-draft-4-bits-")
    assert second[2] == "built already"
    assert "passes over 5 and over all: logits differ by" in " ".join(first)


def test_a_draft_that_has_changed_is_narrowed_again(
    target: Path, store: EngineStore, tmp_path: Path
):
    folder = write_tiny_model(tmp_path / "mine", seed=7, num_layers=1, head_dim=HEAD_DIM)
    backend = OnnxRuntimeBackend(store)
    messages(backend, config_of(target, folder))
    write_tiny_model(folder, seed=8, num_layers=1, head_dim=HEAD_DIM)
    messages(backend, config_of(target, folder))
    assert len(store.entries()) == 2


def test_a_tied_draft_gets_a_narrow_head_of_its_own(
    target: Path, store: EngineStore, tmp_path: Path
):
    folder = write_tiny_model(
        tmp_path / "tied", seed=9, num_layers=1, head_dim=HEAD_DIM, tie_word_embeddings=True
    )
    backend = OnnxRuntimeBackend(store)
    messages(backend, config_of(target, folder))
    arrays = read_arrays(store.entries()[0].path / "narrow.safetensors")
    assert "lm_head.weight.values" in arrays
    assert not any("embed" in name for name in arrays)
    backend.load(config_of(target, folder)).close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"device": "cuda"}, "runs on the CPU; use the transformers back end"),
        ({"dtype": "bfloat16"}, "runs a target in float32, not bfloat16"),
    ],
)
def test_what_it_is_not_for_is_refused(target: Path, store: EngineStore, settings, reason: str):
    config = EngineConfig("onnxruntime", str(target), **settings)
    with pytest.raises(UnsupportedModelError, match=reason):
        list(OnnxRuntimeBackend(store).build(config))
    with pytest.raises(UnsupportedModelError, match=reason):
        OnnxRuntimeBackend(store).load(config)


def test_other_heads_are_refused_with_the_way_out(tiny_target: Path, store: EngineStore):
    with pytest.raises(EngineError, match="use the transformers back end"):
        messages(OnnxRuntimeBackend(store), config_of(tiny_target))


def test_a_missing_package_is_told_with_its_remedy(
    target: Path, store: EngineStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backend_module, "PACKAGES", ("numpy", "no-such-package"))
    backend = OnnxRuntimeBackend(store)
    status = backend.probe()
    assert not status.usable
    assert status.detail == "needs no-such-package: run 'pip install -r requirements.txt'"
    with pytest.raises(BackendUnavailableError, match="needs no-such-package"):
        backend.load(config_of(target))


# -- the check at the end of a build, in this process


def test_weights_that_are_not_numbers_are_found(target: Path, store: EngineStore, tmp_path: Path):
    folder = tmp_path / "broken"
    shutil.copytree(target, folder)
    arrays = {
        name: array.copy() for name, array in read_arrays(folder / "model.safetensors").items()
    }
    arrays["model.norm.weight"][:] = float("nan")
    write_arrays(arrays, folder / "model.safetensors")
    with pytest.raises(EngineBuildError, match="differ by nan in a logit"):
        check(store.root, str(folder), None)


def test_logits_that_move_between_passes_are_found(
    target: Path, store: EngineStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(check_module, "MAX_DEVIATION", 0.0)
    with pytest.raises(EngineBuildError, match="passes over 1 and over all differ by"):
        check(store.root, str(target), None)


@pytest.mark.parametrize("run", [check_main, narrow_main])
def test_the_child_processes_say_in_one_sentence_why_they_failed(
    run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    assert run([str(tmp_path), str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("error: ")
