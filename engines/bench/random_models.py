"""Models by their shapes alone, with random weights: made on the device, nothing to download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import Linear, Module, Parameter
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from engines.environment import gigabytes
from engines.errors import EngineError
from engines.transformers_backend.device import free_memory_bytes

STANDARD_DEVIATION = 0.02
FP8 = "-fp8"  # behind a name: the layers' matrices in 8 bits
LARGEST_FP8 = 448.0  # of float8_e4m3fn
ROOM_BYTES = 2 * 2**30  # for the caches, graphs and logits of a pair
_LLAMA: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "max_position_embeddings": 8192,
}
# As their cards give them: Llama 3.2 1B, Llama 3.1 8B, Llama 3.3 70B
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "llama-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
}


class Fp8Linear(Module):
    """A linear layer of 8-bit weights and values, with one scale for each of the two."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        weight = torch.empty((out_features, in_features), dtype=torch.float8_e4m3fn)
        self.weight = Parameter(weight, requires_grad=False)
        self.scale = Parameter(torch.empty((), dtype=torch.float32), requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        rows = values.flatten(0, -2)
        scale = rows.abs().amax().float().clamp(min=1e-12) / LARGEST_FP8
        product: torch.Tensor = torch._scaled_mm(
            (rows / scale).to(torch.float8_e4m3fn),
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale,
            out_dtype=values.dtype,
        )
        return product.reshape(*values.shape[:-1], -1)


def random_model(shape: str, *, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a causal language model with random weights.

    Args:
        shape: A name of `SHAPES`, with `-fp8` behind it where the layers' matrices shall have 8
            bits; or the path of a model's config.json, or of the folder that holds one.
        dtype: Of all other weights, and of what is computed.
        device: Where it is made.

    Raises:
        EngineError: There is no such shape, or too little memory.
    """
    config = _config_of(shape.removesuffix(FP8))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if shape.endswith(FP8):
            _narrow(model.base_model.layers)
    needed, free = _num_bytes(model.parameters()), free_memory_bytes(device)
    if needed + ROOM_BYTES > free:
        raise EngineError(
            f"'{shape}' needs {gigabytes(needed)} for its weights, and {gigabytes(free)} are free "
            "there: choose a smaller shape, or one in 8 bits ('-fp8')"
        )
    model.to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for weight in model.parameters():
            _fill(weight)
    for part in model.modules():  # tables of rotations are computed, not weights
        if hasattr(part, "inv_freq"):
            _renew(part, config, device)
    return model.eval()


def shape_name(shape: str) -> str:
    """Return what to call a shape where others read it: of a path no more than its last folder."""
    if shape.removesuffix(FP8) in SHAPES:
        return shape
    path = Path(shape)
    return path.parent.name if path.suffix else path.name


def read_bytes(model: Any) -> int:
    """Return how many bytes of weights a pass over a few tokens reads.

    All but the embeddings, of which it reads a few rows, unless they are the output's, too.
    """
    embeddings, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = [weight for weight in model.parameters() if weight is not embeddings]
    return _num_bytes(weights) + (embeddings.nbytes if embeddings is output else 0)


def _config_of(shape: str) -> Any:
    if shape in SHAPES:
        return LlamaConfig(**SHAPES[shape])
    path = Path(shape)
    if not path.exists():
        names = ", ".join(SHAPES)
        raise EngineError(f"there is no shape '{shape}': use {names}, or the path of a config.json")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as exc:
        raise EngineError(f"'{path}' is no model's configuration: {exc}") from exc


def _narrow(layers: Module) -> None:
    for parent in list(layers.modules()):
        for name, part in list(parent.named_children()):
            if type(part) is Linear and part.bias is None:
                setattr(parent, name, Fp8Linear(part.in_features, part.out_features))


def _fill(weight: torch.Tensor) -> None:
    if weight.dtype == torch.float8_e4m3fn:
        values = torch.empty_like(weight, dtype=torch.bfloat16)
        weight.copy_(values.normal_(0, STANDARD_DEVIATION))
    elif weight.ndim < 2:
        weight.fill_(1.0)  # norms and scales
    else:
        weight.normal_(0, STANDARD_DEVIATION)


def _renew(part: Any, config: Any, device: torch.device) -> None:
    with device:
        tables = dict(type(part)(config=config).named_buffers())
    for name, table in tables.items():
        setattr(part, name, table)


def _num_bytes(weights: Any) -> int:
    return sum(weight.nbytes for weight in weights)
