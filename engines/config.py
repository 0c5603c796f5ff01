"""What a caller asks for: EngineConfig, SamplingParams, GenerationRequest."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field, replace
from typing import Literal, Self, get_args

AUTO = "auto"  # the back end that suits a pair and this machine
BUNDLED = "bundled"  # the name of the target that the project brings
BUNDLED_DRAFT = "bundled-draft"  # and of its draft

DraftKind = Literal["model", "prompt_lookup", "none"]
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
Flow = Literal["auto", "engine", "pytorch"]
Quantization = Literal["auto", "none", "fp8", "int8", "int4"]
Acceptance = Literal["tokens", "logits"]

DRAFT_KINDS: tuple[DraftKind, ...] = get_args(DraftKind)
MAX_NUM_DRAFT_TOKENS = 32
# For a model by measurement, of the bundled pair on two CPU cores, see docs/performance.md
DEFAULT_NUM_DRAFT_TOKENS: dict[DraftKind, int] = {"model": 4, "prompt_lookup": 4, "none": 0}
DEFAULT_MIN_DRAFT_PROB = 0.4  # likewise, where stopping early costs nothing else
MAX_NUM_TOP_TOKENS = 5


def _require(condition: bool, field_name: str, value: object, remedy: str) -> None:
    if not condition:
        raise ValueError(f"{field_name} is {value!r}: {remedy}")


def _require_number(
    field_name: str, value: float, low: float, high: float, remedy: str, *, whole: bool = False
) -> None:
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    _require(is_number and math.isfinite(value) and low <= value <= high, field_name, value, remedy)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def check_prompt(prompt: str) -> None:
    """Refuse a prompt that no tokenizer could read.

    Raises:
        ValueError: It is empty or not valid text.
    """
    if not prompt.strip():
        raise ValueError("the prompt is empty: type some text")
    try:
        prompt.encode()
    except UnicodeEncodeError as exc:
        raise ValueError(
            f"the prompt is not valid text at character {exc.start}: give it as UTF-8"
        ) from exc


def resolve_draft(
    target: str, draft: str | None, draft_kind: DraftKind | None
) -> tuple[str | None, DraftKind]:
    """Return the draft model and the draft kind, where a caller leaves either open.

    A draft model that is named drafts; else the bundled target has its own; else no model does.
    """
    if draft_kind is None:
        draft_kind = "model" if draft or target == BUNDLED else "prompt_lookup"
    if draft_kind == "model" and not draft and target == BUNDLED:
        draft = BUNDLED_DRAFT
    return draft or None, draft_kind


@dataclass(frozen=True, slots=True)
class TensorRTOptions:
    """How TensorRT-LLM builds and runs a pair. The other back ends have no use for it."""

    python: str | None = None  # its interpreter; None: SPECDEC_TRTLLM_PYTHON, else this one
    flow: Flow = "auto"  # engine: built engines, our loop; pytorch: no build, the library's loop
    max_draft_len: int = 10  # the most drafts in a step that the target engine is built for
    max_seq_len: int = 2048  # prompt and output together, in tokens
    quantization: Quantization = "auto"  # of the target and the draft; auto: as each checkpoint is
    acceptance: Acceptance = "tokens"  # logits: also for sampling; both engines gather theirs
    tensor_parallel_size: int = 1  # GPUs that share the target
    draft_tensor_parallel_size: int = 1  # and the draft; in the PyTorch flow the target's counts
    devices: tuple[int, ...] = ()  # of the target; empty: the first ones
    draft_devices: tuple[int, ...] = ()
    launcher: str = ""  # put before the worker's command, such as mpirun with its options
    build_timeout_s: float = 14400.0  # for one engine
    start_timeout_s: float = 1800.0  # for importing the library and loading the models
    step_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("flow", get_args(Flow)),
            ("quantization", get_args(Quantization)),
            ("acceptance", get_args(Acceptance)),
        ):
            remedy = f"use one of {', '.join(allowed)}"
            _require(getattr(self, name) in allowed, name, getattr(self, name), remedy)
        for name, high in (
            ("max_draft_len", MAX_NUM_DRAFT_TOKENS),
            ("max_seq_len", 2**20),
            ("tensor_parallel_size", 1024),
            ("draft_tensor_parallel_size", 1024),
        ):
            _require_number(name, getattr(self, name), 1, high, f"use 1 to {high}", whole=True)
        for name in ("build_timeout_s", "start_timeout_s", "step_timeout_s"):
            _require_number(name, getattr(self, name), 0.1, 86400, "use seconds, up to a day")
        try:
            shlex.split(self.launcher)
        except ValueError as exc:
            raise ValueError(f"launcher is {self.launcher!r}: close its quotes") from exc
        for name, size in (
            ("devices", self.tensor_parallel_size),
            ("draft_devices", self.draft_tensor_parallel_size),
        ):
            devices = getattr(self, name)
            is_list = isinstance(devices, tuple) and all(type(item) is int for item in devices)
            is_right = is_list and len(set(devices)) == len(devices) and len(devices) in (0, size)
            _require(is_right, name, devices, f"name {size} different GPU(s), or none")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which models to load, and how. An equal config names the same engine.

    A model is named by `bundled` or `bundled-draft`, a local folder, a `.gguf` file, or a Hub id
    such as `org/name` or `org/name@revision`.
    """

    backend: str = AUTO
    target: str = BUNDLED
    draft: str | None = None  # None: the engine drafts without a model, or not at all
    dtype: DTypeName = "auto"  # auto: bfloat16 on CUDA; on CPU float32 for the target, and for
    # the draft, which decides nothing, what is quick: int4, or with transformers bfloat16
    device: DeviceName = "auto"
    tensorrt_llm: TensorRTOptions = field(default_factory=TensorRTOptions)

    def __post_init__(self) -> None:
        _require(_is_name(self.target), "target", self.target, "name a model")
        if self.draft is not None:
            _require(_is_name(self.draft), "draft", self.draft, "name a model, or leave it out")
        for name, value, allowed in (
            ("dtype", self.dtype, get_args(DTypeName)),
            ("device", self.device, get_args(DeviceName)),
        ):
            _require(value in allowed, name, value, f"use one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from a model's logits, for target and draft alike."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps every token
    top_p: float = 1.0  # 1 keeps every token
    seed: int = 0

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, 0, 10, "use 0 (greedy) to 10")
        _require_number("top_k", self.top_k, 0, 10**6, "use 0 (off) or more", whole=True)
        _require_number("top_p", self.top_p, 1e-6, 1, "use more than 0, up to 1 (off)")
        _require_number("seed", self.seed, 0, 2**53, "use a whole number from 0", whole=True)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation: the prompt's ids, how to draft, how to sample, when to stop."""

    prompt_token_ids: tuple[int, ...]
    draft_kind: DraftKind = "none"
    num_draft_tokens: int = 0  # drafted per step; 0 with the draft kind `none`, and only there
    max_new_tokens: int = 64
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_top_tokens: int = 0  # how many of the likeliest entries each token reports
    # A model's draft ends with the first token to which the model gives less than this itself.
    min_draft_prob: float | None = None  # 0: every draft is whole; None: as suits the engine

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("the prompt is empty: type some text")
        _require(
            self.draft_kind in DRAFT_KINDS,
            "draft_kind",
            self.draft_kind,
            f"use one of {', '.join(DRAFT_KINDS)}",
        )
        if self.draft_kind == "none":
            _require(
                self.num_draft_tokens == 0,
                "num_draft_tokens",
                self.num_draft_tokens,
                "the draft kind 'none' drafts nothing; use 0, or choose another kind",
            )
        else:
            _require_number(
                "num_draft_tokens",
                self.num_draft_tokens,
                1,
                MAX_NUM_DRAFT_TOKENS,
                f"use 1 to {MAX_NUM_DRAFT_TOKENS}, or the draft kind 'none' for plain decoding",
                whole=True,
            )
        _require_number(
            "max_new_tokens", self.max_new_tokens, 1, 10**6, "use a whole number from 1", whole=True
        )
        if self.min_draft_prob is not None:
            _require_number(
                "min_draft_prob", self.min_draft_prob, 0, 1, "use 0 (every draft is whole) to 1"
            )
        _require_number(
            "num_top_tokens",
            self.num_top_tokens,
            0,
            MAX_NUM_TOP_TOKENS,
            f"use 0 to {MAX_NUM_TOP_TOKENS}",
            whole=True,
        )

    def plain(self) -> Self:
        """Return the same request with nothing drafted: the baseline."""
        return replace(self, draft_kind="none", num_draft_tokens=0, min_draft_prob=None)
