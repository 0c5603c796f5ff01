"""A config on this machine: which interpreter, which flow, which GPUs, which models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines.checkpoints import Reference, built_path, parse_reference
from engines.config import EngineConfig
from engines.errors import BackendUnavailableError
from engines.store import EngineStore
from engines.tensorrt_llm_backend.engine_plan import (
    EnginePlan,
    Role,
    devices_of,
    engine_dtype,
    engine_plan,
    engine_seq_len,
)
from engines.tensorrt_llm_backend.gpus import Gpu, check_gpus, chosen, only, visible_gpus
from engines.tensorrt_llm_backend.installation import Installation, find_installation
from engines.tensorrt_llm_backend.worker_process import Worker

LOGS = ".logs"  # in the store


@dataclass(frozen=True, slots=True)
class Setup:
    """What runs a config here."""

    config: EngineConfig
    store: EngineStore
    installation: Installation
    gpus: tuple[Gpu, ...]  # that are visible
    flow: Literal["engine", "pytorch"]
    references: Mapping[Role, Reference]  # the target, and the draft where there is one

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the numbers of the GPUs in use. A launcher may bring those of other machines."""
        roles: list[Role] = ["target"] if self.flow == "pytorch" else list(self.references)
        used = dict.fromkeys(device for role in roles for device in devices_of(self.config, role))
        if self.config.tensorrt_llm.launcher:
            return tuple(device for device in used if device < len(self.gpus))
        return tuple(used)

    @property
    def longest_text(self) -> int:
        """Return how many tokens the target must hold: prompt, output, and a step's drafts."""
        options = self.config.tensorrt_llm
        return engine_seq_len(options.max_seq_len, options.max_draft_len, "target")

    def used_gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs in use, with what is free there now."""
        return chosen(visible_gpus(), self.devices)

    def checkpoint(self, role: Role) -> Path:
        """Return the folder of a model.

        Raises:
            ModelNotBuiltError: It must be fetched or converted first.
        """
        return built_path(self.references[role], self.store)

    def plan(self, role: Role) -> EnginePlan:
        """Return what a model's engine is to be.

        Raises:
            EngineError: The model or the machine does not suit the library.
        """
        return engine_plan(
            self.config,
            role,
            self.references[role],
            self.checkpoint(role),
            self.installation,
            self.gpus,
        )

    def worker(self) -> Worker:
        """Return a worker, not started yet. It sees the GPUs in use, numbered from 0.

        What a launcher starts sees what the launcher lets it.
        """
        launcher = self.config.tensorrt_llm.launcher
        return Worker(
            self.installation.python,
            logs=self.store.root / LOGS,
            launcher=launcher,
            env={} if launcher else only(self.devices),
        )

    def worker_devices(self, role: Role) -> list[int] | None:
        """Return the numbers by which the worker knows a model's GPUs.

        None where one GPU does for all: then the worker runs the models itself.
        """
        if len(self.devices) == 1:
            return None
        return [self.devices.index(device) for device in devices_of(self.config, role)]


def setup_of(config: EngineConfig, store: EngineStore) -> Setup:
    """Return what runs a config here.

    Raises:
        EngineError: Nothing does, or a model is named that cannot be; the text says what to do.
        ValueError: An option does not suit the machine.
    """
    references: dict[Role, Reference] = {"target": parse_reference(config.target)}
    if config.draft is not None:
        references["draft"] = parse_reference(config.draft)
    engine_dtype(config)
    gpus = visible_gpus()  # first: without one there is nothing to install
    installation = find_installation(config.tensorrt_llm.python)
    flow = _flow(config, installation)
    if flow == "pytorch":
        _check_pytorch(config)
    elif config.tensorrt_llm.launcher:
        raise ValueError(
            f"launcher is '{config.tensorrt_llm.launcher}', and the engine flow starts its own "
            "processes: leave it out, or set flow to 'pytorch'"
        )
    setup = Setup(config, store, installation, gpus, flow, references)
    if not setup.devices:
        raise ValueError(
            f"devices name none of the {len(gpus)} GPUs here: the worker itself needs one"
        )
    check_gpus(chosen(gpus, setup.devices), installation.version)
    return setup


def _check_pytorch(config: EngineConfig) -> None:
    """Refuse what only engines are built for."""
    options = config.tensorrt_llm
    if options.quantization not in ("auto", "none"):
        raise ValueError(
            f"quantization is '{options.quantization}', and the PyTorch flow quantises nothing: "
            "use a checkpoint that is quantised, or set flow to 'engine'"
        )
    if options.acceptance == "logits":
        raise ValueError(
            "acceptance is 'logits', which engines are built for: set flow to 'engine', or "
            "acceptance to 'tokens'"
        )


def _flow(config: EngineConfig, installation: Installation) -> Literal["engine", "pytorch"]:
    asked = config.tensorrt_llm.flow
    has_engines = installation.builds_engines and installation.runs_engines
    if asked != "pytorch" and has_engines:
        return "engine"
    if asked == "engine":
        raise BackendUnavailableError(
            f"TensorRT-LLM {installation.version} has no TensorRT engines (the last release with "
            "them is 1.2.1): set flow to 'pytorch', or run 'make trtllm'"
        )
    if not installation.runs_pytorch:
        raise BackendUnavailableError(
            f"TensorRT-LLM {installation.version} has no PyTorch flow: set flow to 'engine', or "
            "run 'make trtllm'"
        )
    return "pytorch"
