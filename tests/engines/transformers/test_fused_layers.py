"""Fused layers: one compilation for all, one product for one input, a model that works on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from engines.transformers_backend.captured import CapturedPasses
from engines.transformers_backend.fused_layers import FusedLayers
from engines.transformers_backend.model import TransformersModel
from tests.engines.transformers.models import IDS, llama, qwen2, qwen3

BOTH = pytest.mark.parametrize("make", [llama, qwen2, qwen3])


def logits_of(model: Any) -> torch.Tensor:
    return TransformersModel(model, vocab_size=64).forward(IDS[:5], num_logits=5)


def fused_logits(model: Any, backend: Any, num_calls: int = 2) -> torch.Tensor:
    passes = CapturedPasses(model, capacity=64)
    torch.compiler.reset()
    counters.clear()
    with torch.inference_mode(), FusedLayers(model, backend=backend).running(passes._kv):
        for _ in range(num_calls):
            logits = passes.step(torch.tensor(IDS[:5]), torch.arange(5))
    return logits


@BOTH
def test_one_compilation_serves_all_layers_of_a_model(make: Callable[[], Any]):
    model = make()
    expected = logits_of(model)
    logits = fused_logits(model, "eager")  # traced, and not compiled further
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert all("forward" not in layer.__dict__ for layer in model.model.layers)


@BOTH
def test_layers_over_one_input_become_one_product(make: Callable[[], Any]):
    graphs = []

    def seen(graph: GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    fused_logits(make(), seen)
    products = [node for node in graphs[0].graph.nodes if node.target is torch._C._nn.linear]
    assert len(products) == 4  # of queries, keys and values; the output; gate and up; down
    outputs = next(node for node in graphs[0].graph.nodes if node.op == "output").args[0]
    assert len(outputs) == 1


@BOTH
def test_a_model_goes_on_as_before_with_its_weights_laid_together(make: Callable[[], Any]):
    model = make()
    expected, names = logits_of(model), list(model.state_dict())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    FusedLayers(model)
    assert torch.equal(logits_of(model), expected)
    assert list(model.state_dict()) == names
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    query, key = (getattr(model.model.layers[1].self_attn, name) for name in ("q_proj", "k_proj"))
    assert key.weight.data_ptr() == query.weight.data_ptr() + query.weight.nbytes


def test_layers_of_different_inputs_are_left_alone():
    model = llama()
    mlp = model.model.layers[0].mlp
    mlp.up_proj = torch.nn.Linear(mlp.up_proj.in_features, mlp.up_proj.out_features, bias=True)
    address = mlp.up_proj.weight.data_ptr()
    FusedLayers(model)
    assert mlp.up_proj.weight.data_ptr() == address


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own, at its import
def test_a_compiler_that_is_there_gives_the_same_logits():
    model = llama()
    expected = logits_of(model)
    torch.testing.assert_close(fused_logits(model, "inductor"), expected, atol=1e-5, rtol=1e-5)
