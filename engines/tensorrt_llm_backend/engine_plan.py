"""What an engine is to be: its limits, its identity in the store, and how it is built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engines.checkpoints import Reference, checkpoint_identity
from engines.config import MAX_NUM_DRAFT_TOKENS, EngineConfig
from engines.errors import (
    BackendUnavailableError,
    IncompatibleModelsError,
    ModelLoadError,
    translate_errors,
)
from engines.store import engine_key
from engines.tensorrt_llm_backend.gpus import Gpu, chosen
from engines.tensorrt_llm_backend.installation import Installation

KIND = "tensorrt_llm engine"
BUILD_VERSION = 1  # part of every key: raised when the way of building changes
Role = Literal["target", "draft"]
QUANT_CONFIG = "hf_quant_config.json"  # what NVIDIA's ready-made FP8 folders carry
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "GraniteForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
)
MISREAD = ("llava", "vila", "exaone")  # in the path of a folder, these change how it is loaded
CALIBRATED = {"fp8": "FP8"}
WEIGHT_ONLY = {"int8": "W8A16", "int4": "W4A16"}


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine: of a checkpoint, in a role, for a version and a kind of GPU."""

    role: Role
    name: str  # of the model
    checkpoint: Path
    identity: Mapping[str, Any]  # everything that changes the engine
    devices: tuple[int, ...]  # that run it; the first one builds it

    @property
    def key(self) -> str:
        """Return the store's key: a part of the path that the library reads the model from."""
        name = "model" if misread_word(self.name) else self.name
        return engine_key(f"{name} {self.role}", self.identity)

    @property
    def needs_calibration(self) -> bool:
        quantization = self.identity["quantization"]
        return quantization is not None and bool(quantization["needs_calibration"])

    @property
    def title(self) -> str:
        return f"{self.name} ({self.role}, TensorRT-LLM {self.identity['tensorrt_llm']})"

    def build_spec(self, checkpoint: Path, output: Path, timing_cache: Path) -> dict[str, Any]:
        """Return what `runtime/build_engine.py` is told."""
        return {
            **{name: self.identity[name] for name in BUILD_FIELDS},
            "checkpoint": str(checkpoint),
            "output": str(output),
            "timing_cache": str(timing_cache),
        }


BUILD_FIELDS = (
    "dtype",
    "quantization",
    "tensor_parallel_size",
    "max_seq_len",
    "max_draft_len",
    "gather_generation_logits",
)


def engine_plan(
    config: EngineConfig,
    role: Role,
    reference: Reference,
    checkpoint: Path,
    installation: Installation,
    gpus: tuple[Gpu, ...],
) -> EnginePlan:
    """Return the plan of one of a pair's engines.

    Raises:
        EngineError: The model or the machine does not suit the library.
        ValueError: An option does not suit the machine.
    """
    options = config.tensorrt_llm
    is_target = role == "target"
    devices = devices_of(config, role)
    gpu, *others = chosen(gpus, devices)
    if other := next((other for other in others if other.name != gpu.name), None):
        raise BackendUnavailableError(
            f"GPUs of two kinds ({gpu.name}, {other.name}) cannot share an engine: name others in "
            f"{'devices' if is_target else 'draft_devices'}"
        )
    model = model_config(checkpoint, reference.name)
    _check_model(model, reference.name, size=len(devices), max_seq_len=options.max_seq_len)
    identity = {
        "kind": KIND,
        "build_version": BUILD_VERSION,
        "role": role,
        "checkpoint": checkpoint_identity(reference, checkpoint),
        "dtype": engine_dtype(config),
        "quantization": quantization_of(config, checkpoint),
        "tensor_parallel_size": len(devices),
        "max_draft_len": options.max_draft_len if is_target else 0,
        "max_seq_len": engine_seq_len(options.max_seq_len, options.max_draft_len, role),
        "gather_generation_logits": options.acceptance == "logits",
        "tensorrt_llm": installation.version,
        "gpu": gpu.name,
        "compute_capability": gpu.compute_capability,
    }
    return EnginePlan(role, reference.name, checkpoint, identity, devices)


def misread_word(path: str) -> str | None:
    """Return the word in a path by which the library takes a model for another, None without."""
    return next((word for word in MISREAD if word in path.lower()), None)


def engine_seq_len(max_seq_len: int, max_draft_len: int, role: Role) -> int:
    """Return the longest text that an engine has to hold: prompt, output, and a step's drafts.

    A draft engine is built for the longest drafts there are, so that one serves every target.
    """
    return max_seq_len + 1 + (max_draft_len if role == "target" else MAX_NUM_DRAFT_TOKENS)


def devices_of(config: EngineConfig, role: Role) -> tuple[int, ...]:
    """Return the numbers of the GPUs that a model runs on."""
    options = config.tensorrt_llm
    if role == "target":
        return options.devices or tuple(range(options.tensor_parallel_size))
    return options.draft_devices or tuple(range(options.draft_tensor_parallel_size))


def engine_dtype(config: EngineConfig) -> str:
    """Return the dtype of the weights that are not quantised.

    Raises:
        BackendUnavailableError: The library does not run it.
    """
    if config.device == "cpu":
        raise BackendUnavailableError("TensorRT-LLM runs on NVIDIA GPUs: set device to 'auto'")
    if config.dtype == "float32":
        raise BackendUnavailableError(
            "TensorRT-LLM cannot verify drafts in float32 (its attention with block reuse runs in "
            "16 bits): use bfloat16 or float16"
        )
    return "bfloat16" if config.dtype == "auto" else config.dtype


def quantization_of(config: EngineConfig, checkpoint: Path) -> dict[str, Any] | None:
    """Return how the weights are quantised, None where they are not.

    Raises:
        ModelLoadError: The checkpoint is quantised in a way that the library does not read.
    """
    asked = config.tensorrt_llm.quantization
    ready_made = _ready_made(checkpoint)
    if ready_made is not None:
        algorithm = ready_made["quant_algo"]
        if asked not in ("auto", str(algorithm).lower()):
            raise ModelLoadError(
                f"'{checkpoint.name}' is quantised already, to {algorithm}: set quantization to "
                "'auto'"
            )
        if not algorithm:
            raise ModelLoadError(
                f"'{checkpoint / QUANT_CONFIG}' names no quant_algo: choose another checkpoint"
            )
        return {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": ready_made.get("kv_cache_quant_algo"),
            "exclude_modules": ready_made.get("exclude_modules"),
            "needs_calibration": False,
        }
    if "quantization_config" in model_config(checkpoint, checkpoint.name):
        raise ModelLoadError(
            f"'{checkpoint.name}' is quantised in a way that TensorRT-LLM's engines do not read: "
            "use the model in 16 bits, or an FP8 folder of NVIDIA's"
        )
    if asked in CALIBRATED:
        return {"quant_algo": CALIBRATED[asked], "needs_calibration": True}
    if asked in WEIGHT_ONLY:
        return {"quant_algo": WEIGHT_ONLY[asked], "needs_calibration": False}
    return None


def ready_made_algorithm(checkpoint: Path, name: str) -> str | None:
    """Return by what a checkpoint's weights are quantised already, None where they are not."""
    ready_made = _ready_made(checkpoint)
    if ready_made is not None:
        return str(ready_made["quant_algo"])
    found = model_config(checkpoint, name).get("quantization_config") or {}
    method = found.get("quant_algo") or found.get("quant_method")
    return None if method is None else str(method)


def _ready_made(checkpoint: Path) -> dict[str, Any] | None:
    """Return what NVIDIA's file says of a checkpoint's quantisation, None without that file."""
    file = checkpoint / QUANT_CONFIG
    if not file.is_file():
        return None
    unreadable = dict.fromkeys((OSError, ValueError, KeyError, TypeError), ModelLoadError)
    with translate_errors(f"'{file}' cannot be read", unreadable):
        found = json.loads(file.read_text(encoding="utf-8"))["quantization"]
        return {**found, "quant_algo": found["quant_algo"]}


def model_config(checkpoint: Path, name: str) -> dict[str, Any]:
    """Return a checkpoint's config.json.

    Raises:
        ModelLoadError: It cannot be read, or is not of a model but of an engine.
    """
    file = checkpoint / "config.json"
    unreadable = dict.fromkeys((OSError, ValueError, TypeError), ModelLoadError)
    with translate_errors(f"the model '{name}' cannot be read ({file})", unreadable):
        config = dict(json.loads(file.read_text(encoding="utf-8")))
    if "build_config" in config and "pretrained_config" in config:
        raise ModelLoadError(
            f"'{name}' is a built TensorRT-LLM engine: name the model's folder, from which engines "
            "are built into the store"
        )
    if "architecture" in config and "architectures" not in config:
        raise ModelLoadError(
            f"'{name}' is a TensorRT-LLM checkpoint: name the Hugging Face folder it was made of"
        )
    return config


def check_draft_width(target: Path, target_name: str, draft: Path, draft_name: str) -> None:
    """Refuse a draft that may propose ids for which the target has no row.

    Raises:
        IncompatibleModelsError: So it is.
    """
    sizes = [
        int(model_config(path, name).get("vocab_size", 0))
        for path, name in ((target, target_name), (draft, draft_name))
    ]
    if sizes[1] > sizes[0]:
        raise IncompatibleModelsError(
            f"'{draft_name}' has {sizes[1]:,} rows of vocabulary and '{target_name}' {sizes[0]:,}: "
            "it could propose what the target cannot read; choose another draft"
        )


def _check_model(model: Mapping[str, Any], name: str, *, size: int, max_seq_len: int) -> None:
    architecture = next(iter(model.get("architectures") or ["none"]))
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"'{name}' is a {architecture}, which TensorRT-LLM builds no engine of: use one of "
            f"{', '.join(ARCHITECTURES)}, or the PyTorch flow"
        )
    heads, kv_heads = (model.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    for kind, number, can_be_copied in (
        ("attention", heads, False),
        ("key/value", kv_heads or heads, True),
    ):
        if isinstance(number, int) and number % size and not (can_be_copied and size % number == 0):
            raise ModelLoadError(
                f"'{name}' has {number} {kind} heads, which {size} GPUs cannot share: use a tensor "
                "parallel size that divides them"
            )
    longest = model.get("max_position_embeddings")
    if isinstance(longest, int) and max_seq_len > longest:
        raise ModelLoadError(
            f"max_seq_len is {max_seq_len:,}, and '{name}' reads {longest:,} tokens at most: use "
            "that or less"
        )
