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

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# As their configurations say.
TINY_LLAMA = SimpleNamespace(
    hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
    num_key_value_heads=4, head_dim=64, vocab_size=32000, tie_word_embeddings=False,
)  # fmt: skip
LLAMA_1B = SimpleNamespace(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, vocab_size=128256, tie_word_embeddings=True,
)  # fmt: skip
SMOLLM2 = SimpleNamespace(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, vocab_size=49152, tie_word_embeddings=True,
)  # fmt: skip
PLAN = Plan(16, 3, 1024, device_bytes=7_600_000_000, disk_bytes=2_340_000_000)


@pytest.fixture
def spec(plain_target: Path, tmp_path: Path) -> DistillSpec:
    return DistillSpec(
        str(tmp_path / "new" / "draft"), str(plain_target), num_layers=2, sequence_length=48
    )


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
    with pytest.raises(EngineBuildError, match=r"needs about 7.6 GB .* a smaller target$"):
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


def total_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    properties = SimpleNamespace(total_memory=int(num_bytes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


@pytest.mark.parametrize("num_bytes", [24e9, 48e9, 150e9])
@pytest.mark.parametrize("config", [TINY_LLAMA, LLAMA_1B, SMOLLM2], ids=["tiny", "1b", "smollm2"])
def test_a_gpu_is_given_what_fits_it(
    config: SimpleNamespace, num_bytes: float, monkeypatch: pytest.MonkeyPatch
):
    total_memory(monkeypatch, num_bytes)

    plan = make_plan(DistillSpec("draft", num_layers=6), config, CUDA)

    assert plan.device_bytes < num_bytes
    assert plan.num_sequences >= 64  # still many at once
    assert plan.num_train_sequences >= 2
    assert plan.num_positions >= 256


def test_a_large_gpu_does_as_much_at_once_as_is_of_use(monkeypatch: pytest.MonkeyPatch):
    total_memory(monkeypatch, 150e9)

    plan = make_plan(DistillSpec("draft", num_layers=6), SMOLLM2, CUDA)

    numbers = (plan.num_sequences, plan.num_train_sequences, plan.num_positions)
    assert numbers == (4096, 51, 4096)


def test_a_smaller_gpu_does_no_more_at_once_than_a_larger(monkeypatch: pytest.MonkeyPatch):
    plans = []
    for num_bytes in (4e9, 8e9, 16e9, 24e9, 48e9, 96e9, 192e9):
        total_memory(monkeypatch, num_bytes)
        plans.append(make_plan(DistillSpec("draft", num_layers=6), LLAMA_1B, CUDA))

    for name in ("num_sequences", "num_train_sequences", "num_positions", "device_bytes"):
        values = [getattr(plan, name) for plan in plans]
        assert values == sorted(values)
    assert plans[0].device_bytes > 4e9  # never less than a few at once: refused, not tried
    assert plans[0].num_sequences == 8


def test_a_resumed_run_needs_less_disk_by_what_its_folder_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = replace(PLAN, device_bytes=0, disk_bytes=1_000_000)
    free_disk(monkeypatch, 900_000)
    with pytest.raises(EngineBuildError, match=r"needs up to 0.0 GB"):
        require_room(plan, tmp_path, CPU)

    (tmp_path / "distill").mkdir()
    (tmp_path / "distill" / "text-00000.npz").write_bytes(bytes(60_000))
    (tmp_path / "model.safetensors").write_bytes(bytes(39_999))
    with pytest.raises(EngineBuildError):
        require_room(plan, tmp_path, CPU)
    (tmp_path / "model.safetensors").write_bytes(bytes(40_000))
    require_room(plan, tmp_path, CPU)

    (tmp_path / "model.safetensors").write_bytes(bytes(2_000_000))
    free_disk(monkeypatch, 0)
    require_room(plan, tmp_path, CPU)


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
