"""The draft as a model: some of the target's own layers between its embeddings and its head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engines.errors import IncompatibleModelsError

ARCHITECTURE = "llama"  # transformers' model_type


def check_architecture(config: Any, name: str) -> None:
    """Refuse a target that this tool cannot cut layers out of.

    Raises:
        IncompatibleModelsError: It is of another architecture.
    """
    if config.model_type != ARCHITECTURE:
        raise IncompatibleModelsError(
            f"'{name}' cannot be distilled: it is a '{config.model_type}' model, and drafts are "
            f"made of the '{ARCHITECTURE}' architecture only"
        )


def make_student(target: Any, layers: Sequence[int]) -> Any:
    """Return a model of copies of the target's layers, in float32, ready to be trained.

    Embeddings and head are the target's own, not copies, and stay as they are.

    Args:
        target: A Llama of transformers.
        layers: Which of its layers, in the order they are to have.
    """
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [target.config.layer_types[layer] for layer in layers]
    with torch.device("meta"):
        student = type(target)(config)
    student.model.layers = nn.ModuleList(
        copy.deepcopy(target.model.layers[layer]).float() for layer in layers
    )
    for index, layer in enumerate(student.model.layers):
        layer.self_attn.layer_idx = index
        layer.self_attn.config = config
    student.model.norm = copy.deepcopy(target.model.norm).float()
    student.model.rotary_emb = copy.deepcopy(target.model.rotary_emb)
    student.model.embed_tokens = target.model.embed_tokens
    student.lm_head = target.lm_head
    student.requires_grad_(False)
    for parameter in trained_parameters(student).values():
        parameter.requires_grad_(True)
    student.set_attn_implementation(target.config._attn_implementation)
    return student.eval()  # nothing is dropped out


def trained_parameters(student: Any) -> dict[str, nn.Parameter]:
    """Return the layers' and the last norm's weights by name: all but embeddings and head."""
    return {
        name: parameter
        for name, parameter in student.named_parameters()
        if name.startswith(("model.layers.", "model.norm."))
    }


def save_student(student: Any, folder: Path) -> None:
    """Write a student as a checkpoint of its own, embeddings included, in bfloat16."""
    weights = {
        name: weight.detach().to(torch.bfloat16).cpu()
        for name, weight in student.state_dict().items()
    }
    if student.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    student.config.dtype = torch.bfloat16
    student.save_pretrained(folder, state_dict=weights)
