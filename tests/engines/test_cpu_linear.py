"""CpuLinear gives the plain layer's products for every number of rows, and keeps parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from engines.transformers_backend.cpu_linear import CpuLinear, use_cpu_linear

CAPABILITIES = ("AVX512", "AVX2")


@pytest.fixture(autouse=True, params=CAPABILITIES)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What PyTorch says of the CPU. oneDNN itself looks for what there really is."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        pytest.skip("this PyTorch has no MKL or no oneDNN")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    return str(request.param)


def tiny_llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **settings)).eval()


def assert_equal_but_for_rounding(
    layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None, input: torch.Tensor
) -> None:
    with torch.inference_mode():
        expected, actual = linear(input, weight, bias), layer(input)
        magnitude = linear(input.abs(), weight.abs(), None if bias is None else bias.abs())
        # Two sums of products, each rounded once for every term.
        bound = 2 * (weight.shape[1] + 1) * torch.finfo(torch.float32).eps * magnitude
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    assert ((actual - expected).abs() <= bound).all()
    # The bound is for the worst case; the error grows with the root of the number of terms.
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [*range(1, 21), 64])
def test_every_number_of_rows_gives_what_the_plain_layer_gives(num_rows: int, bias: bool):
    torch.manual_seed(num_rows)
    layer = use_cpu_linear(nn.Sequential(nn.Linear(576, 192, bias=bias)))[0]
    assert type(layer) is CpuLinear

    input = torch.randn(1, num_rows, 576)
    assert_equal_but_for_rounding(layer, layer.weight, layer.bias, input)


@pytest.mark.parametrize(
    "input",
    [
        torch.ones(24),
        torch.ones(0, 24),
        torch.ones(3, 24),
        torch.ones(2, 3, 24),
        torch.ones(2, 0, 24),
        torch.arange(24.0 * 7).reshape(24, 7).T,
        torch.arange(24.0 * 3).reshape(24, 3).T,
        torch.ones(1, 24).expand(9, 24),
    ],
    ids=[
        "vector",
        "none",
        "rows",
        "batch",
        "empty batch",
        "turned",
        "turned, few",
        "one, repeated",
    ],
)
def test_every_shape_of_input_is_taken(input: torch.Tensor):
    layer = use_cpu_linear(nn.Sequential(nn.Linear(24, 5)))[0]
    assert_equal_but_for_rounding(layer, layer.weight, layer.bias, input)


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 40])
def test_a_models_logits_are_the_same_but_for_rounding(num_tokens: int):
    model = tiny_llama(initializer_range=0.4)
    fast = use_cpu_linear(copy.deepcopy(model))
    ids = torch.arange(num_tokens)[None]

    with torch.inference_mode():
        torch.testing.assert_close(fast(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_keep_their_names_and_tied_ones_stay_tied(tied: bool):
    model = tiny_llama(tie_word_embeddings=tied)
    before = {name: weight.data_ptr() for name, weight in model.state_dict().items()}
    fast = use_cpu_linear(model)

    assert fast is model
    assert type(model.lm_head) is CpuLinear
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert {name: weight.data_ptr() for name, weight in model.state_dict().items()} == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_keep_the_plain_layer(dtype: torch.dtype):
    model = use_cpu_linear(tiny_llama().to(dtype))
    assert not any(isinstance(module, CpuLinear) for module in model.modules())


def test_layers_of_another_kind_keep_it():
    class OtherLinear(nn.Linear):
        pass

    model = use_cpu_linear(nn.Sequential(OtherLinear(2, 2), nn.Linear(2, 2, device="meta")))
    assert [type(module) for module in model] == [OtherLinear, nn.Linear]


@pytest.mark.parametrize("num_rows", [1, 9])
def test_gradients_are_those_of_the_plain_layer(num_rows: int):
    plain = nn.Linear(24, 5)
    fast = use_cpu_linear(nn.Sequential(copy.deepcopy(plain)))[0]
    input = torch.randn(num_rows, 24)
    for layer in (plain, fast):
        layer(input).square().sum().backward()

    torch.testing.assert_close(fast.weight.grad, plain.weight.grad)
