"""The room that a distillation takes: told before anything starts, and enough."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from engines.distill import DistillSpec
from engines.distill.pipeline import Distillation
from engines.distill.plan import Plan, make_plan, require_room
from engines.errors import EngineBuildError
from tests.engines.distill.conftest import float32_model

CPU = torch.device("cpu")
PLAN = Plan(16, 3, device_bytes=7_600_000_000, disk_bytes=2_340_000_000)


@pytest.fixture
def spec(plain_target: Path, tmp_path: Path) -> DistillSpec:
    return DistillSpec(str(tmp_path / "new" / "draft"), str(plain_target), num_layers=2)


def free_disk(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    usage = SimpleNamespace(total=10**12, used=0, free=num_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def free_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    memory = SimpleNamespace(total=10**12, available=num_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def test_a_full_disk_is_told_before_anything_starts(
    spec: DistillSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    free_disk(monkeypatch, 60_000_000)

    with pytest.raises(EngineBuildError) as caught:
        Distillation(spec)

    assert str(caught.value).startswith(
        f"distilling needs up to 0.1 GB in '{spec.output}', where 0.1 GB are free: make room"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_full_memory_is_told_before_anything_starts(
    spec: DistillSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    free_memory(monkeypatch, 1_000_000)

    with pytest.raises(EngineBuildError) as caught:
        Distillation(spec)

    assert str(caught.value).startswith(
        "distilling needs about 0.0 GB of this machine's memory, where 0.0 GB are free: "
    )
    assert list(tmp_path.iterdir()) == []


def test_the_sentence_says_how_much_is_needed_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    free_disk(monkeypatch, 2_339_000_000)
    with pytest.raises(EngineBuildError, match=r"needs up to 2.3 GB .* use fewer minutes$"):
        require_room(PLAN, tmp_path, CPU)

    free_disk(monkeypatch, 2_340_000_000)
    free_memory(monkeypatch, 7_599_999_999)
    with pytest.raises(EngineBuildError, match=r"needs about 7.6 GB .* a smaller target or"):
        require_room(PLAN, tmp_path, CPU)

    free_memory(monkeypatch, 7_600_000_000)
    require_room(PLAN, tmp_path, CPU)


def test_a_folder_that_is_not_there_has_its_parents_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Path] = []
    usage = shutil.disk_usage(tmp_path)

    def disk_usage(path: Path) -> object:
        asked.append(path)
        return usage

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    require_room(replace(PLAN, device_bytes=0, disk_bytes=0), tmp_path / "a" / "b", CPU)
    require_room(replace(PLAN, device_bytes=0, disk_bytes=0), Path("nowhere"), CPU)

    assert asked == [tmp_path, Path()]


def test_the_device_holds_at_least_the_target_and_the_students_training_state(spec: DistillSpec):
    model = float32_model(Path(spec.target))
    target_bytes = sum(4 * weight.numel() for weight in model.parameters())
    layer = sum(weight.numel() for weight in model.model.layers[0].parameters() if weight.ndim == 2)

    def device_bytes(num_layers: int) -> int:
        # Short sequences, so that writing takes less than training.
        small = replace(spec, num_layers=num_layers, sequence_length=32)
        return make_plan(small, model.config, CPU).device_bytes

    assert device_bytes(1) >= target_bytes + 16 * layer
    assert device_bytes(3) - device_bytes(1) >= 2 * 16 * layer


def test_more_minutes_need_more_disk_unless_the_tokens_are_limited(spec: DistillSpec):
    config = float32_model(Path(spec.target)).config

    def disk_bytes(minutes: float, max_tokens: int | None = None) -> int:
        longer = replace(spec, minutes=minutes, max_tokens=max_tokens)
        return make_plan(longer, config, CPU).disk_bytes

    seconds = 59 * 60 * 0.35  # of writing, at 5,000 tokens of five bytes each
    assert disk_bytes(60) - disk_bytes(1) == pytest.approx(seconds * 5000 * 5, abs=2)
    assert disk_bytes(60, 10_000) == disk_bytes(600, 10_000) < disk_bytes(60)
