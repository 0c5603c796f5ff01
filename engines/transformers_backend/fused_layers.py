"""FusedLayers: a model's layers compiled, once for all of them, their weights handed in.

Linear layers that read the same input become one product, which a device does quicker than two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch.nn import Linear, Module
from torch.nn.functional import linear

from engines.transformers_backend.model import cache_argument
from engines.transformers_backend.static_cache import LayerKv, StaticKv

# Linear layers over one input, as transformers names them in every model that is built like a Llama
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
MAX_VERSIONS = 64  # of the compiled layer: one for each model and number of tokens
# Of torch.compile: a model that cannot be traced, no compiler for what it generates
FUSING_ERRORS = (
    torch._dynamo.exc.TorchDynamoException,
    torch._dynamo.exc.FailOnRecompileLimitHit,
)


class FusedLayers:
    """The layers of a model, which may run compiled."""

    @torch.inference_mode(False)  # what it makes becomes a part of the model
    @torch.no_grad()
    def __init__(self, model: Any, *, backend: str = "inductor") -> None:
        """Lay the weights of merged products together; the model itself goes on using them.

        Args:
            model: One whose layers are all built alike, with their caches named by the layer.
            backend: Of torch.compile.
        """
        self._layers = model.base_model.layers
        self._argument = cache_argument(model)
        configs = {
            id(part.config): part.config
            for part in self._layers[0].modules()
            if hasattr(part, "config")
        }
        self._template = deepcopy(self._layers[0], configs).to("meta")
        self._merged = [Merged.into(parent, names) for parent, names in _groups(self._template)]
        for layer in self._layers:
            for parent, names in _groups(layer):
                lay_together([getattr(parent, name) for name in names])
        self._weights = [self._weights_of(layer) for layer in self._layers]
        self._fused = torch.compile(self._run, backend=backend, dynamic=False, fullgraph=True)

    @contextmanager
    def running(self, kv: StaticKv) -> Iterator[None]:
        """Let the model run so meanwhile, over a cache whose positions are those of the pass."""
        try:
            for number, layer in enumerate(self._layers):
                layer.forward = self._through(number, kv)
            with torch._dynamo.config.patch(recompile_limit=MAX_VERSIONS):
                yield
        finally:
            for layer in self._layers:
                layer.__dict__.pop("forward", None)

    def _through(self, number: int, kv: StaticKv) -> Callable[..., Any]:
        part, weights = kv.part(number), self._weights[number]

        def forward(*args: Any, **options: Any) -> Any:
            options.pop(self._argument, None)
            part.positions = kv.positions
            return self._fused(weights, part, args, options)

        return forward

    def _run(
        self, weights: dict[str, torch.Tensor], part: LayerKv, args: Any, options: dict[str, Any]
    ) -> Any:
        cached = {**options, self._argument: part}
        output = torch.func.functional_call(self._template, weights, args, cached)
        for merged in self._merged:
            merged.parts = ()  # or they would be outputs of what is compiled
        return output

    def _weights_of(self, layer: Any) -> dict[str, torch.Tensor]:
        weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        names = {id(part): name for name, part in layer.named_modules()}
        for parent, group in _groups(layer):
            for kind in ("weight", "bias"):
                keys = [f"{names[id(parent)]}.{name}.{kind}" for name in group]
                parts = [weights.pop(key, None) for key in keys]
                if parts[0] is not None:
                    weights[keys[0]] = whole_of(parts)
        return weights


class Merged(Module):
    """Stands for the first of several linear layers over one input, and does the work of all."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        shape = (sum(self.sizes), layers[0].in_features)
        self.weight = torch.nn.Parameter(layers[0].weight.new_empty(shape), requires_grad=False)
        self.bias = None
        if layers[0].bias is not None:
            bias = layers[0].bias.new_empty(shape[:1])
            self.bias = torch.nn.Parameter(bias, requires_grad=False)
        self.parts: tuple[torch.Tensor, ...] = ()

    @classmethod
    def into(cls, parent: Module, names: Sequence[str]) -> Merged:
        """Put one where a module has several linear layers; the others hand on their part."""
        merged = cls([getattr(parent, name) for name in names])
        setattr(parent, names[0], merged)
        for number, name in enumerate(names[1:], start=1):
            setattr(parent, name, _Part(merged, number))
        return merged

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        product = linear(values, self.weight, self.bias)
        self.parts = torch.split(product, self.sizes, dim=-1)
        return self.parts[0]


class _Part(Module):
    def __init__(self, merged: Merged, number: int) -> None:
        super().__init__()
        self._merged = (merged,)  # in a tuple, so that it is not a submodule of this one
        self._number = number

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self._merged[0].parts[self._number]


def lay_together(layers: Sequence[Linear]) -> None:
    """Move the weights of linear layers into one buffer, in order; the layers keep working."""
    for kind in ("weight", "bias"):
        parts = [getattr(layer, kind) for layer in layers]
        if parts[0] is None:
            continue
        whole = torch.cat([part.data for part in parts])
        start = 0
        for part in parts:
            part.data = whole[start : start + part.shape[0]]
            start += part.shape[0]


def whole_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the buffer that tensors lie in one behind the other, after `lay_together`."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return parts[0].data.as_strided(shape, parts[0].stride())


def _groups(layer: Module) -> list[tuple[Module, tuple[str, ...]]]:
    """Return the linear layers over one input, as the module that has them and their names."""
    return [
        (parent, names)
        for parent in layer.modules()
        for names in SAME_INPUT
        if _is_group([getattr(parent, name, None) for name in names])
    ]


def _is_group(layers: Sequence[Any]) -> bool:
    return all(type(layer) is Linear for layer in layers) and (
        len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
    )
