"""How much is done at once on a device, and the room it takes: told before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engines.distill.spec import GENERATE_SHARE, DistillSpec
from engines.distill.writing import num_kept_values
from engines.environment import free_disk_bytes, gigabytes
from engines.errors import EngineBuildError
from engines.transformers_backend.device import device_name, free_memory_bytes

MAX_SEQUENCES = {"cuda": 4096, "cpu": 16}  # written at once
MIN_SEQUENCES = 8
MAX_POSITIONS, MIN_POSITIONS = {"cuda": 4096, "cpu": 1024}, 256
TRAIN_TOKENS = {"cuda": 32 * 1024, "cpu": 2048}  # of a training step
MEMORY_SHARE = 0.6  # of a CUDA device's memory that writing or training may take
# Generous bounds for the disk: tokens a second that no device here has reached, bytes a token.
TOKENS_PER_SECOND = {"cuda": 400_000, "cpu": 5_000}
BYTES_PER_TOKEN = 5  # an id of four bytes, and whether it is an answer's
SPARE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done at once."""

    num_sequences: int  # written together: a chunk
    num_train_sequences: int  # of a training step
    num_positions: int  # whose logits over the whole vocabulary are held together
    device_bytes: int  # needed, the models included
    disk_bytes: int  # needed in the output folder


def make_plan(spec: DistillSpec, config: Any, device: torch.device) -> Plan:
    """Return what fits the device. It depends on the kind of device, not on what is free.

    Args:
        spec: What is asked for.
        config: The target's.
        device: Where it is done.
    """
    kind = device.type
    weight_bytes = 2 if kind == "cuda" else 4
    head = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    layer = _layer_weights(config)
    target_bytes = weight_bytes * (head + layer * config.num_hidden_layers)
    student = layer * spec.num_layers
    room = math.inf
    if kind == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        room = MEMORY_SHARE * total_bytes - target_bytes

    # Keys and values of a whole text, and logits with noise of one position in float32.
    kept_bytes = num_kept_values(config) * weight_bytes
    sequence_bytes = spec.sequence_length * kept_bytes + 3 * 4 * config.vocab_size
    num_sequences = MAX_SEQUENCES[kind]
    while num_sequences > MIN_SEQUENCES and num_sequences * sequence_bytes > room:
        num_sequences //= 2

    # What the layers' backward passes need, and of some positions logits, probabilities, gradients.
    token_bytes: int = (
        spec.num_layers * weight_bytes * (20 * config.hidden_size + 8 * config.intermediate_size)
    )
    position_bytes: int = 10 * 4 * config.vocab_size
    student_bytes = 16 * student  # weights, gradients, two moments
    num_train_sequences = max(1, TRAIN_TOKENS[kind] // spec.sequence_length)
    num_positions = MAX_POSITIONS[kind]

    def training_bytes() -> int:
        train_tokens = num_train_sequences * spec.sequence_length
        return student_bytes + train_tokens * token_bytes + num_positions * position_bytes

    while num_positions > MIN_POSITIONS and training_bytes() > room:
        num_positions //= 2
    while num_train_sequences > 1 and training_bytes() > room:
        num_train_sequences //= 2
    evaluation_bytes = 4 * (2 * head + layer * (config.num_hidden_layers + spec.num_layers))
    working_bytes = max(num_sequences * sequence_bytes, training_bytes())
    return Plan(
        num_sequences=num_sequences,
        num_train_sequences=num_train_sequences,
        num_positions=num_positions,
        device_bytes=max(target_bytes + working_bytes, evaluation_bytes),
        disk_bytes=_disk_bytes(spec, kind, num_sequences, student, head),
    )


def _disk_bytes(spec: DistillSpec, kind: str, num_sequences: int, student: int, head: int) -> int:
    """Return what a run may take: text, checkpoint and draft, the latter two also written aside."""
    tokens = TOKENS_PER_SECOND[kind] * spec.minutes * 60 * GENERATE_SHARE
    if spec.max_tokens is not None:
        tokens = min(tokens, spec.max_tokens)
    tokens += num_sequences * spec.sequence_length  # a chunk is ended
    draft_bytes = 2 * (student + head)
    return int(tokens * BYTES_PER_TOKEN + 2 * 12 * student + 2 * draft_bytes + SPARE_BYTES)


def require_room(plan: Plan, folder: Path, device: torch.device) -> None:
    """Refuse to start what would not fit.

    Raises:
        EngineBuildError: The disk or the device is too full; the text says what is needed.
    """
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    needed = plan.disk_bytes - held  # less where a run is resumed
    free_disk = free_disk_bytes(folder)
    if free_disk < needed:
        raise EngineBuildError(
            f"distilling needs up to {gigabytes(needed)} in '{folder}', where "
            f"{gigabytes(free_disk)} are free: make room, name a folder on another disk, or use "
            "fewer minutes"
        )
    free_memory = free_memory_bytes(device)
    name = device_name(device) if device.type == "cuda" else "this machine's memory"
    if free_memory < plan.device_bytes:
        raise EngineBuildError(
            f"distilling needs about {gigabytes(plan.device_bytes)} of {name}, where "
            f"{gigabytes(free_memory)} are free: end what else uses it, take fewer layers, or "
            "choose a smaller target"
        )


def _layer_weights(config: Any) -> int:
    attention = config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    return int(config.hidden_size * (attention + 3 * config.intermediate_size))
