"""Shapes: random models of the right size, verdicts that are forced, and a whole benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from engines.bench.random_models import (
    SHAPES,
    Fp8Linear,
    random_model,
    read_bytes,
    shape_name,
)
from engines.bench.shapes import ForcedRounds, bandwidth_of, main
from engines.config import GenerationRequest
from engines.drafting import ModelProposer
from engines.errors import EngineError
from engines.speculative import Round, StepwiseRounds, decode
from tests.conftest import TableModel
from tests.engines.transformers.models import SIZES

CPU = torch.device("cpu")


@pytest.fixture
def tiny_config(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    LlamaConfig(**SIZES).save_pretrained(folder)
    return folder


def test_a_random_model_is_of_its_configuration_and_says_numbers(tiny_config: Path):
    for shape in (tiny_config, tiny_config / "config.json"):
        model = random_model(str(shape), dtype=torch.bfloat16, device=CPU)
        with torch.inference_mode():
            logits = model(torch.tensor([[1, 2, 3]])).logits
        assert logits.shape == (1, 3, 64)
        assert logits.dtype == torch.bfloat16
        assert 0 < float(logits.float().std()) < 10


def test_its_rotations_are_those_of_a_loaded_model(tmp_path: Path):
    config = Qwen3Config(**SIZES, head_dim=8)
    config.save_pretrained(tmp_path)
    model = random_model(str(tmp_path), dtype=torch.float32, device=CPU)
    rotations = type(model.model.rotary_emb)(config=config)
    assert torch.equal(model.model.rotary_emb.inv_freq, rotations.inv_freq)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_pass_reads_all_weights_but_embeddings_that_are_not_the_output(
    tmp_path: Path, is_tied: bool
):
    LlamaConfig(**SIZES, tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    model = random_model(str(tmp_path), dtype=torch.bfloat16, device=CPU)
    hidden, inner, layers = 32, 48, 3
    of_a_layer = 2 * hidden * hidden + 2 * hidden * 16 + 3 * hidden * inner + 2 * hidden
    assert read_bytes(model) == 2 * (layers * of_a_layer + hidden + 64 * hidden)


def test_matrices_of_8_bits_are_half_as_large(tiny_config: Path):
    whole, narrow = (
        random_model(str(tiny_config) + ending, dtype=torch.bfloat16, device=CPU)
        for ending in ("", "-fp8")
    )
    matrices = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    scales = 3 * 7 * 4
    assert read_bytes(whole) - read_bytes(narrow) == matrices - scales


def test_a_product_of_8_bits_is_the_product():
    torch.manual_seed(0)
    weight, values = torch.randn(48, 32) / 6, torch.randn(2, 3, 32)
    layer = Fp8Linear(32, 48)
    layer.weight.data.copy_(weight * 100)
    layer.scale.data.fill_(0.01)
    expected = values @ weight.T
    product = layer(values.bfloat16()).float()
    assert product.shape == (2, 3, 48)
    assert float((product - expected).norm() / expected.norm()) < 0.06


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ("llama-7b", "there is no shape 'llama-7b': use llama-1b, llama-8b, llama-70b"),
        ("llama-70b", "needs 141.1 GB for its weights, and 8.0 GB are free there"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(shape: str, text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engines.bench.random_models.free_memory_bytes", lambda _: 8 * 10**9)
    with pytest.raises(EngineError, match=text):
        random_model(shape, dtype=torch.bfloat16, device=CPU)


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(EngineError, match="is no model's configuration"):
        random_model(str(tmp_path), dtype=torch.bfloat16, device=CPU)


def test_a_shape_is_named_without_its_folders(tmp_path: Path):
    assert {shape_name(shape) for shape in SHAPES} == SHAPES.keys()
    assert shape_name("llama-70b-fp8") == "llama-70b-fp8"
    assert shape_name("/home/someone/mine/config.json") == "mine"
    assert shape_name("/home/someone/mine") == "mine"


def test_a_forced_verdict_keeps_so_many_of_every_draft():
    request = GenerationRequest((0, 1), "model", 4, 41)
    stepwise = StepwiseRounds(TableModel.random(0), ModelProposer(TableModel.random(1)), request)
    items = decode(
        ForcedRounds(stepwise, 3), request, stop_token_ids=frozenset(), context_length=100
    )
    rounds = [item for item in items if isinstance(item, Round)]
    assert [len(round_.output_token_ids) for round_ in rounds] == [4] * 10 + [1]
    assert all(round_.output_token_ids[:3] == round_.draft.token_ids[:3] for round_ in rounds[:10])


def test_a_known_device_has_the_bandwidth_of_its_data_sheet():
    assert bandwidth_of("NVIDIA H200") == 4.8e12
    assert bandwidth_of("some other GPU") is None


def test_a_whole_benchmark_says_what_it_is(tiny_config: Path, capsys: pytest.CaptureFixture[str]):
    config = str(tiny_config)
    args = ["--target", config, "--draft", config, "--device", "cpu", "--context", "8"]
    assert main([*args, "--rounds", "3", "--repeats", "1", "--bandwidth", "0.05"]) == 0
    title, *_, line = capsys.readouterr().out.splitlines()
    assert title.startswith("random weights, forced acceptance: tiny with tiny, bfloat16, on ")
    result = json.loads(line)
    assert result["label"] == "random weights, forced acceptance"
    assert (result["bandwidth_bytes_per_s"], result["bandwidth_source"]) == (0.05e12, "given")
    assert config not in line
    figures = {figure["name"]: figure["median"] for figure in result["figures"]}
    assert figures["target step of 5"] > 0
    tokens_per_round = {"plain": 1, "speculative": 4}
    for name, num_tokens in tokens_per_round.items():
        rate = figures[f"{name}, decoding"] * figures[f"{name}, round"] / 1000
        assert rate == pytest.approx(num_tokens)
    assert {ratio["verdict"] for ratio in result["ratios"]} == {"shown"}


@pytest.mark.parametrize(
    "args",
    [
        ["--num-draft-tokens", "0"],
        ["--num-accepted-tokens", "5"],
        ["--context", "1"],
        ["--repeats", "0"],
        ["--bandwidth", "0"],
    ],
)
def test_bad_numbers_are_refused(args: list[str]):
    with pytest.raises(SystemExit) as raised:
        main(args)
    assert raised.value.code == 2


def test_where_there_is_no_gpu_it_says_so(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 1
    assert "PyTorch sees no CUDA device here" in capsys.readouterr().err
