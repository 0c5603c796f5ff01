"""What a distillation is asked for, and what it reports: DistillSpec, DistillProgress."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from engines.config import BUNDLED, DeviceName

Phase = Literal["prepare", "generate", "train", "evaluate", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)

DEFAULT_NUM_LAYERS = 6
DEFAULT_SEQUENCE_LENGTH = 640
RECORD = "distill.json"  # in the output folder: how the draft was made, for programs
NUM_END_LAYERS = 2  # taken of either end before any from between
MAX_MINUTES = 7 * 24 * 60.0
# Of the minutes; the rest goes to training. Evaluating and saving come on top.
GENERATE_SHARE = 0.35
MIN_SEQUENCE_LENGTH, MAX_SEQUENCE_LENGTH = 32, 4096


@dataclass(frozen=True, slots=True)
class DistillSpec:
    """Which target, how many of its layers, how long, and where the draft goes."""

    output: str  # a folder: new, empty, or one that holds an interrupted run (`resume`)
    target: str = BUNDLED
    num_layers: int = DEFAULT_NUM_LAYERS
    minutes: float = 10.0  # for generating and training together
    layers: tuple[int, ...] | None = None  # of the target, from 0; None: `chosen_layers`
    prompts: str | None = None  # a file whose lines open the conversations
    evaluation: str | None = None  # a file of prompts to evaluate on; None: text kept apart
    seed: int = 0
    device: DeviceName = "auto"
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH  # tokens of a conversation
    max_tokens: int | None = None  # generated at most; None: as many as the minutes allow
    resume: bool = False

    def __post_init__(self) -> None:
        if not self.output.strip():
            raise ValueError("output is empty: name a folder for the draft")
        for path in (self.output, self.prompts, self.evaluation):
            try:
                Path(path or ".").expanduser()
            except RuntimeError as exc:  # the home folder of a user who does not exist
                raise ValueError(f"there is no folder '{path}': {exc}") from exc
        if not self.target.strip():
            raise ValueError("target is empty: name a model")
        _whole("num_layers", self.num_layers, 1, 1000)
        _whole("seed", self.seed, 0, 2**53)
        _whole("sequence_length", self.sequence_length, MIN_SEQUENCE_LENGTH, MAX_SEQUENCE_LENGTH)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 10**12)
        is_number = isinstance(self.minutes, (int, float)) and math.isfinite(self.minutes)
        if not is_number or not 0 < self.minutes <= MAX_MINUTES:
            raise ValueError(
                f"minutes is {self.minutes!r}: use more than 0, up to {MAX_MINUTES:,.0f}"
            )
        if self.device not in get_args(DeviceName):
            raise ValueError(
                f"device is {self.device!r}: use one of {', '.join(get_args(DeviceName))}"
            )
        if self.layers is not None and len(self.layers) != self.num_layers:
            raise ValueError(
                f"layers names {len(self.layers)} layers and num_layers is {self.num_layers}: "
                "make them equal, or leave one out"
            )

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        if values.get("layers") is not None:
            values["layers"] = tuple(values["layers"])
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def without_paths(self) -> dict[str, Any]:
        """Return the fields for a record that others read: files and folders by name alone."""
        values = asdict(self)
        for name in ("output", "prompts", "evaluation"):
            if values[name] is not None:
                values[name] = Path(values[name]).name
        if Path(self.target).expanduser().exists():
            values["target"] = Path(self.target).name
        return values

    @property
    def folder(self) -> Path:
        return Path(self.output).expanduser()


def part_seed(seed: int, part: int) -> int:
    """Return the seed of one chunk or epoch: within what PyTorch's generators take."""
    return (seed * 1_000_003 + part) % 2**63


def _whole(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}: use a whole number from {low} to {high:,}")


def chosen_layers(spec: DistillSpec, num_target_layers: int) -> tuple[int, ...]:
    """Return which of the target's layers the draft begins as: in order, from 0.

    By default two of the first, two of the last, and the others evenly between: the first read the
    tokens, the last speak the head's language.

    Raises:
        ValueError: There are not so many, or a layer is not one of the target's.
    """
    if spec.num_layers > num_target_layers:
        raise ValueError(
            f"num_layers is {spec.num_layers}, and the target has {num_target_layers}: "
            f"use 1 to {num_target_layers}"
        )
    if spec.layers is None:
        first = min((spec.num_layers + 1) // 2, NUM_END_LAYERS)
        last = min(spec.num_layers // 2, NUM_END_LAYERS)
        num_between = spec.num_layers - first - last
        low, high = first - 1, num_target_layers - last
        between = (
            low + round(number * (high - low) / (num_between + 1))
            for number in range(1, num_between + 1)
        )
        return (*range(first), *between, *range(high, num_target_layers))
    if list(spec.layers) != sorted(set(spec.layers)):
        raise ValueError(
            f"layers is {','.join(map(str, spec.layers))}: name each once, the lowest first"
        )
    if any(type(layer) is not int or not 0 <= layer < num_target_layers for layer in spec.layers):
        raise ValueError(
            f"layers is {','.join(map(str, spec.layers))}: use numbers from 0 to "
            f"{num_target_layers - 1}"
        )
    return spec.layers


@dataclass(frozen=True, slots=True)
class DistillProgress:
    """Where a distillation stands. What does not concern the phase is None."""

    phase: Phase
    elapsed_s: float  # of the phase, earlier runs of the same folder included
    fraction: float | None = None  # of the phase, 0 to 1
    remaining_s: float | None = None  # of the whole, an estimate
    num_tokens: int | None = None  # generated, or trained on, so far
    tokens_per_second: float | None = None
    loss: float | None = None  # of training, a mean since the last report
    agreement: float | None = None  # greedy, on text kept apart from training, 0 to 1
    overlap: float | None = None  # acceptance rate at temperature 1 there, 0 to 1
    message: str | None = None  # a log line

    def to_json(self) -> str:
        return json.dumps({key: value for key, value in asdict(self).items() if value is not None})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})
