"""What a person asked for, and one run or tuning as far as it has come. No Gradio in it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, Self, cast

from engines import (
    MAX_REPEATS,
    SIDES,
    BuildProgress,
    DraftKind,
    EngineConfig,
    GenerationRequest,
    GenerationStats,
    RunEvent,
    RunItem,
    RunRecord,
    SamplingParams,
    Side,
    Step,
    TensorRTOptions,
    WarmUp,
    check_prompt,
    distill,
)
from specdec_ui.highlight import step_html

DRAFTS = "~/specdec-drafts"  # holds the drafts whose folder nobody has named
TENSORRT_LLM = "tensorrt_llm"  # the back end that has options of its own
# Those of its options that the page has controls for, in their order there
TENSORRT_FIELDS = (
    "flow",
    "quantization",
    "max_draft_len",
    "max_seq_len",
    "acceptance",
    "tensor_parallel_size",
    "devices",
    "draft_tensor_parallel_size",
    "draft_devices",
    "python",
    "launcher",
)
MAX_LOSSES = 200  # of the curve: a longer training's is made of every second report, or fourth …


@dataclass(frozen=True, slots=True)
class RunForm:
    """The page's controls of a run and a build."""

    backend: str
    target: str
    draft_kind: DraftKind
    draft: str
    prompt: str
    chat_template: bool
    num_draft_tokens: int
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    baseline: bool
    repeats: int
    min_draft_prob: float | str | None = None  # None and "": as suits the engine
    dtype: str = "auto"
    tensorrt_llm: Mapping[str, Any] = field(default_factory=dict)  # see `tensorrt_options`

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the controls' names, in the order in which a handler gets their values."""
        own = (item.name for item in fields(cls) if item.name != "tensorrt_llm")
        return (*own, *TENSORRT_FIELDS)

    @classmethod
    def read(cls, *values: Any) -> Self:
        """Return the form of controls with these values. What is hidden counts for nothing."""
        given = dict(zip(cls.names(), values, strict=True))
        options = {name: given.pop(name) for name in TENSORRT_FIELDS}
        if given["backend"] != TENSORRT_LLM:
            return cls(**given | {"dtype": "auto"})
        return cls(**given, tensorrt_llm=options)

    def config(self) -> EngineConfig:
        """Return the engine to load. The draft model counts only where it is to draft.

        Raises:
            ValueError: A field is unusable; the text names it.
        """
        draft = None
        if self.draft_kind == "model":
            draft = _text("draft", self.draft).strip()
            if not draft:
                raise ValueError("the draft is empty: name a model, or choose another draft kind")
        target = _text("target", self.target).strip()
        return engine_config(self.backend, target, draft, self.dtype, self.tensorrt_llm)

    def request(self, prompt_token_ids: tuple[int, ...]) -> GenerationRequest:
        """Return the generation to run.

        Raises:
            ValueError: A field is unusable; the text names it.
        """
        is_plain = self.draft_kind == "none"
        return GenerationRequest(
            prompt_token_ids=prompt_token_ids,
            draft_kind=self.draft_kind,
            num_draft_tokens=0 if is_plain else _whole(self.num_draft_tokens),
            max_new_tokens=_whole(self.max_new_tokens),
            sampling=SamplingParams(
                temperature=self.temperature,
                top_k=_whole(self.top_k),
                top_p=self.top_p,
                seed=_whole(self.seed),
            ),
            min_draft_prob=_share("min_draft_prob", self.min_draft_prob),
        )

    def num_runs(self) -> int:
        """Return how often each side is run.

        Raises:
            ValueError: `repeats` is unusable.
        """
        repeats = _whole(self.repeats)
        if type(repeats) is not int or not 1 <= repeats <= MAX_REPEATS:
            raise ValueError(f"repeats is {self.repeats!r}: use 1 to {MAX_REPEATS}")
        return repeats

    def check(self) -> Self:
        """Refuse what can be refused before anything is loaded.

        Raises:
            ValueError: A field is unusable; the text names it.
        """
        check_prompt(_text("prompt", self.prompt))
        self.config()
        self.request((0,))
        self.num_runs()
        return self


def engine_config(
    backend: str, target: str, draft: str | None, dtype: str, tensorrt_llm: Mapping[str, Any]
) -> EngineConfig:
    """Return the engine to load.

    Raises:
        ValueError: A value is unusable, or options are given that the back end does not have.
    """
    if tensorrt_llm and backend != TENSORRT_LLM:
        raise ValueError(
            f"tensorrt_llm is given for the back end '{backend}': leave it out, or use the back "
            f"end '{TENSORRT_LLM}'"
        )
    return EngineConfig(
        backend=backend,
        target=target,
        draft=draft,
        dtype=cast(Any, dtype),  # judged there
        tensorrt_llm=tensorrt_options(tensorrt_llm),
    )


def tensorrt_options(given: Mapping[str, Any]) -> TensorRTOptions:
    """Return options of TensorRT-LLM from what a page or a client gives; the rest is as usual.

    Args:
        given: Values by the names of `TensorRTOptions`. GPUs may come as text such as 0,1.

    Raises:
        ValueError: There is no such option, or a value is unusable; the text names it.
    """
    known = [item.name for item in fields(TensorRTOptions)]
    if not isinstance(given, Mapping):
        raise ValueError(f"tensorrt_llm is {given!r}: name options, some of {', '.join(known)}")
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"tensorrt_llm has no option {name!r}: use some of {', '.join(known)}")
        if name in ("devices", "draft_devices"):
            options[name] = _devices(name, value)
        elif name == "python":
            options[name] = _text(name, value).strip() or None
        elif name == "launcher":
            options[name] = _text(name, value).strip()
        else:
            options[name] = _whole(value)
    return TensorRTOptions(**options)


@dataclass(frozen=True, slots=True)
class TuneForm:
    """The controls of a tuning, in the order in which a handler gets their values."""

    target: str
    num_layers: int
    minutes: float
    output: str  # empty: a new folder
    prompts: str  # empty: none
    seed: int
    resume: bool

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(item.name for item in fields(cls))

    def spec(self) -> distill.DistillSpec:
        """Return the tuning to do. A folder is chosen here where none is named.

        Raises:
            ValueError: A field is unusable; the text names it.
        """
        target = _text("target", self.target).strip()
        output = _text("output", self.output).strip()
        if self.resume and not output:
            raise ValueError("output is empty: name the folder of the tuning to resume")
        return distill.DistillSpec(
            output=output or new_draft_folder(target),
            target=target,
            num_layers=_whole(self.num_layers),
            minutes=self.minutes,
            prompts=_text("prompts", self.prompts).strip() or None,
            seed=_whole(self.seed),
            resume=self.resume,
        )


def new_draft_folder(target: str) -> str:
    """Return a folder that is not there yet, named after a target."""
    name = Path(target).name.removesuffix(".gguf")
    name = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.") or "draft"
    numbered = (f"{DRAFTS}/{name}-{number}" for number in count(2))
    folders = chain((f"{DRAFTS}/{name}",), numbered)
    return next(folder for folder in folders if not Path(folder).expanduser().exists())


def _text(name: str, value: Any) -> str:
    """Return a text field; an empty one may come as None."""
    if not isinstance(value, str | None):
        raise ValueError(f"{name} is {value!r}: type some text")
    return value or ""


def _devices(name: str, value: Any) -> Any:
    """Return the numbers of GPUs, typed as 0,1 or given as a list; () for none."""
    if not isinstance(value, str | None):
        return tuple(map(_whole, value)) if isinstance(value, list | tuple) else value
    parts = (value or "").replace(",", " ").split()
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{name} is {value!r}: type the numbers of GPUs with commas, as in 0,1")
    return tuple(map(int, parts))


def _share(name: str, value: object) -> float | None:
    """Return a number that may be left out; a control for text gives it as such."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        return float(cast(Any, value))
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} is {value!r}: use a number from 0 to 1, or leave it out"
        ) from None


def _whole(value: Any) -> Any:
    """Return a number field's 4.0 as 4; anything else is judged where it is used."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(slots=True)
class Lane:
    """One side's latest repeat: its tokens as HTML that only grows, and its figures."""

    html: str = ""
    stats: GenerationStats = field(default_factory=GenerationStats)
    repeat: int = 0


@dataclass(slots=True)
class RunState:
    """One run, as far as it has come. Owned by the handler that runs it."""

    record: RunRecord
    lanes: dict[Side, Lane] = field(default_factory=lambda: {side: Lane() for side in SIDES})
    current: Side | None = None
    warming_up: Side | None = None  # or loading
    warming_line: str = ""  # of the log of that
    warming_since: float = field(default=0.0, compare=False)  # by the clock `time.monotonic`

    @classmethod
    def replayed(cls, record: RunRecord) -> Self:
        """Return a recorded run in its final state."""
        state = cls(replace(record, runs={}))
        for side, repeats in record.runs.items():
            for repeat, events in enumerate(repeats):
                for event in events:
                    state.apply(RunEvent(side, repeat, event))
        return state

    def apply(self, item: RunItem) -> None:
        """Take in one more item of the run."""
        self.record.apply(item)
        if isinstance(item, WarmUp):
            self._apply_warm_up(item)
        if not isinstance(item, RunEvent):
            return
        self.current, self.warming_up = item.side, None
        lane = self.lanes[item.side]
        if item.repeat != lane.repeat:
            lane = self.lanes[item.side] = Lane(repeat=item.repeat)
        lane.stats.apply(item.event)
        if isinstance(item.event, Step):
            lane.html += step_html(item.event)

    def _apply_warm_up(self, item: WarmUp) -> None:
        if item.side != self.warming_up:
            self.warming_up, self.warming_since = item.side, time.monotonic()
            self.warming_line = ""
        self.warming_line = item.message or self.warming_line


@dataclass(slots=True)
class BuildLog:
    """What building and loading have said. Owned by the handler that runs them."""

    lines: list[str] = field(default_factory=list)
    latest: BuildProgress | None = None
    said: str = ""  # the last line of the stage that goes on

    def apply(self, progress: BuildProgress) -> bool:
        """Take in one more report, and return whether a stage begins with it."""
        before, self.latest = self.latest, progress
        is_new = before is None or (before.stage, before.name) != (progress.stage, progress.name)
        if is_new:
            self.said = ""
        if progress.message:
            self.lines.append(progress.message)
            self.said = progress.message
        return is_new


@dataclass(frozen=True, slots=True)
class Validation:
    """How a draft did on text kept apart from training."""

    minutes: float  # of training so far
    agreement: float  # greedy, 0 to 1
    overlap: float  # acceptance rate at temperature 1, 0 to 1


@dataclass(slots=True)
class TuneState:
    """One tuning, as far as it has come. Owned by the handler that runs it."""

    spec: distill.DistillSpec
    latest: distill.DistillProgress | None = None
    log: list[str] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)  # minutes of training, loss
    validations: list[Validation] = field(default_factory=list)
    num_losses: int = 0  # reported; `losses` has every so many-th of them
    losses_stride: int = 1

    @property
    def phase(self) -> str:
        return "prepare" if self.latest is None else self.latest.phase

    @property
    def has_begun(self) -> bool:
        """Whether it has got as far as its output folder."""
        return self.latest is not None

    @property
    def is_done(self) -> bool:
        return self.phase == "save"

    @property
    def num_points(self) -> int:
        """How much was reported for the curve."""
        return self.num_losses + len(self.validations)

    def apply(self, progress: distill.DistillProgress) -> None:
        """Take in one more report."""
        self.latest = progress
        if progress.message:
            self.log.append(f"{progress.phase}: {progress.message}")
        if progress.phase != "train":
            return
        minutes = progress.elapsed_s / 60
        if progress.loss is not None:
            if self.num_losses % self.losses_stride == 0:
                self.losses.append((minutes, progress.loss))
            self.num_losses += 1
            if len(self.losses) > MAX_LOSSES:
                del self.losses[1::2]
                self.losses_stride *= 2
        if progress.agreement is not None and progress.overlap is not None:
            self.validations.append(Validation(minutes, progress.agreement, progress.overlap))


@dataclass(slots=True)
class Session:
    """What one browser tab keeps. Gradio copies it at the start: no engine, tensor or lock."""

    run: RunState | None = None  # the latest, finished or not
    tuning: TuneState | None = None  # likewise, where it came after the latest run
    is_working: bool = False  # a handler of this tab is on its way
    is_stopped: bool = False  # by the person, since the last click on Run, Build or Tune
    export_folder: str | None = None  # holds the recording of the run
