"""The bundled pair on this CPU: its steps, its runs, and runs by others, in turn in one process.

Everything is greedy, and outputs are compared. "decoding" leaves out the reading of the prompt,
"whole" does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

from engines import bundled
from engines.bench.llama_cpp import LlamaCpp, is_there
from engines.bench.passes import Passes
from engines.bench.runs import CODE, PROMPTS, Timed, timed_runs
from engines.bench.timing import Figure, Ratio, alternate, report
from engines.checkpoints import built_path, parse_reference
from engines.config import (
    BUNDLED,
    BUNDLED_DRAFT,
    DEFAULT_MIN_DRAFT_PROB,
    DEFAULT_NUM_DRAFT_TOKENS,
    EngineConfig,
    GenerationRequest,
)
from engines.drafting import CachedModel
from engines.onnxruntime_backend.backend import OnnxRuntimeBackend
from engines.onnxruntime_backend.engine import OnnxEngine
from engines.slot import EngineSlot
from engines.store import EngineStore

CONTEXT_TOKENS = 100  # read before a step is timed
STEPS = (1, 2, 3, 4, 5, 9)
STEP_REPEATS = 31


class RecordedEngine(OnnxEngine):
    """Writes down the passes of a run where it is asked to."""

    passes: Passes | None = None

    def open_target(self, capacity: int) -> Any:
        return self._recorded("target", super().open_target(capacity))

    def open_draft(self, capacity: int) -> Any:
        return self._recorded("draft", super().open_draft(capacity))

    def _recorded(self, name: str, model: CachedModel) -> CachedModel:
        return model if self.passes is None else self.passes.recording(name, model)


class Ways:
    """The ways of generating over all prompts, by the same loaded weights where they can be."""

    def __init__(self, engine: RecordedEngine, max_new_tokens: int) -> None:
        self._engine = engine
        self._max_new_tokens = max_new_tokens
        self._prompts = [engine.encode(prompt, chat_template=True) for prompt in PROMPTS]
        self._passes: dict[str, list[Passes]] = {}

    def request(self, ids: tuple[int, ...], kind: str) -> GenerationRequest:
        """Return the plain request of a prompt, the usual one, or that of a fixed number."""
        if kind == "plain":
            return GenerationRequest(ids, max_new_tokens=self._max_new_tokens)
        if kind == "speculative":
            number, min_draft_prob = DEFAULT_NUM_DRAFT_TOKENS["model"], None
        else:
            number, min_draft_prob = int(kind), 0.0
        return GenerationRequest(
            ids, "model", number, self._max_new_tokens, min_draft_prob=min_draft_prob
        )

    def ours(self, kind: str) -> Timed:
        """Run the loop."""
        return timed_runs(self._engine, [self.request(ids, kind) for ids in self._prompts])

    def note_passes(self, kind: str) -> None:
        """Run the loop once, and write down its passes for `bare`."""
        self._passes[kind] = []
        for ids in self._prompts:
            self._engine.passes = Passes()
            self._passes[kind].append(self._engine.passes)
            timed_runs(self._engine, [self.request(ids, kind)])
        self._engine.passes = None

    def bare(self, kind: str) -> Timed:
        """Make the very passes of the loop's run again, and nothing else."""
        timed = Timed()
        for ids, passes in zip(self._prompts, self._passes[kind], strict=True):
            capacity = len(ids) + self._max_new_tokens
            started = perf_counter()
            models = {"target": self._engine.open_target(capacity)}
            if kind != "plain":
                models["draft"] = self._engine.open_draft(capacity)
            passes.again(models)
            timed.whole_s += perf_counter() - started
        return timed

    def transformers(self, target: Any, draft: Any) -> Timed:
        """Generate by transformers, assisted where there is a draft, drafting like ours."""
        import torch

        options: dict[str, Any] = {}
        if draft is not None:
            options = {
                "assistant_model": draft,
                "num_assistant_tokens": DEFAULT_NUM_DRAFT_TOKENS["model"],
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": DEFAULT_MIN_DRAFT_PROB,
            }
        timed = Timed()
        for ids in self._prompts:
            prompt = torch.tensor([ids])
            started = perf_counter()
            output = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=self._max_new_tokens,
                **options,
            )
            timed.whole_s += perf_counter() - started
            timed.output_token_ids.append(tuple(output[0, len(ids) :].tolist()))
        return timed

    def llama_cpp(self, llama: LlamaCpp) -> Timed:
        """Generate by llama.cpp, timed by its own clock."""
        timed = Timed()
        for ids in self._prompts:
            started = perf_counter()
            num_tokens, seconds = llama.generate(ids, self._max_new_tokens)
            timed.whole_s += perf_counter() - started
            timed.output_token_ids.append((0,) * num_tokens)
            timed.decode_s.append(seconds)
        return timed


def step_times(engine: OnnxEngine, ids: Sequence[int]) -> dict[str, list[float]]:
    """Return milliseconds of passes over some tokens, target and draft in turn as in a run."""
    context = [ids[at % len(ids)] for at in range(CONTEXT_TOKENS)]
    capacity = CONTEXT_TOKENS + max(STEPS)
    models: dict[str, CachedModel] = {
        "target": engine.open_target(capacity),
        "draft": engine.open_draft(capacity),
    }
    for model in models.values():
        model.forward(context, num_logits=1)

    def step(name: str, num_tokens: int) -> Callable[[], float]:
        def timed() -> float:
            started = perf_counter()
            models[name].forward(context[:num_tokens], num_logits=num_tokens)
            seconds = perf_counter() - started
            models[name].truncate(CONTEXT_TOKENS)
            return seconds * 1000

        return timed

    ways = {}
    for num_tokens in STEPS:
        ways[f"target step of {num_tokens}"] = step("target", num_tokens)
        # Twice, since the first draft step after a target's finds its own weights gone.
        ways[f"draft step, first (before {num_tokens})"] = step("draft", 1)
        ways[f"draft step (before {num_tokens})"] = step("draft", 1)
    values = alternate(ways, STEP_REPEATS)
    steps = {f"target step of {number}": values[f"target step of {number}"] for number in STEPS}
    for name in ("draft step, first", "draft step"):
        steps[name] = [
            median(values[f"{name} (before {number})"][repeat] for number in STEPS)
            for repeat in range(STEP_REPEATS)
        ]
    return steps


def reference_models() -> tuple[Any, Any]:
    """Return the pair as transformers loads it: the target in float32, nothing exchanged in it."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from engines.transformers_backend.cpu_linear import has_wide_onednn

    logging.disable_progress_bar()
    dtypes = (torch.float32, torch.bfloat16 if has_wide_onednn() else torch.float32)
    paths = (built_path(parse_reference(name), EngineStore()) for name in (BUNDLED, BUNDLED_DRAFT))
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
        for path, dtype in zip(paths, dtypes, strict=True)
    )
    return target, draft


def measure(ways: Ways, repeats: int) -> dict[str, list[Timed]]:
    """Run every way once to warm up, then `repeats` times, in turn."""
    target, draft = reference_models()
    runs: dict[str, Callable[[], Timed]] = {
        "plain": lambda: ways.ours("plain"),
        "plain, bare passes": lambda: ways.bare("plain"),
        "speculative": lambda: ways.ours("speculative"),
        "speculative, bare passes": lambda: ways.bare("speculative"),
        "K 4": lambda: ways.ours("4"),
        "transformers, plain": lambda: ways.transformers(target, None),
        "transformers, assisted": lambda: ways.transformers(target, draft),
    }
    file = bundled.local_copy()
    if file is not None and is_there():
        llama = LlamaCpp(file)
        runs["llama.cpp, Q4_1, plain"] = lambda: ways.llama_cpp(llama)
    for kind in ("plain", "speculative"):
        ways.note_passes(kind)
    return alternate(runs, repeats)


def ratios_of(steps: dict[str, list[float]], runs: dict[str, list[Timed]]) -> list[Ratio]:
    """Return what is held to, from medians."""

    def step(name: str) -> float:
        return median(steps[name])

    def decoding(name: str, *prompts: int) -> float:
        return median(timed.decoding(*prompts) for timed in runs[name])

    def whole(name: str) -> float:
        return median(timed.whole() for timed in runs[name])

    def overhead(name: str) -> float:
        # Of each repeat, since its two sides were timed within the same seconds.
        pairs = zip(runs[name], runs[f"{name}, bare passes"], strict=True)
        return (median(ours.whole_s / bare.whole_s for ours, bare in pairs) - 1) * 100

    target = step("target step of 1")
    return [
        Ratio("target step of 5 / of 1", step("target step of 5") / target, 1.35, 1.15),
        Ratio("draft step / target step", step("draft step") / target, 0.12, 0.06),
        Ratio(
            "plain / transformers eager float32 plain, whole",
            whole("plain") / whole("transformers, plain"),
            2.3,
            3,
            at_most=False,
        ),
        Ratio(
            "speculative / plain, five prompts pooled, default drafting",
            decoding("speculative") / decoding("plain"),
            1.3,
            1.6,
            at_most=False,
        ),
        Ratio(
            "speculative / plain, code prompt, num_draft_tokens 4, whole drafts",
            decoding("K 4", CODE) / decoding("plain", CODE),
            1.7,
            2.2,
            at_most=False,
        ),
        Ratio(
            "speculative / transformers assisted generation, whole",
            whole("speculative") / whole("transformers, assisted"),
            2,
            3,
            at_most=False,
        ),
        Ratio("loop and events over bare passes, plain, %", overhead("plain"), 3, 1),
        Ratio("loop and events over bare passes, speculative, %", overhead("speculative"), 3, 1),
    ]


def figures_of(steps: dict[str, list[float]], runs: dict[str, list[Timed]]) -> list[Figure]:
    """Return every measured quantity with its range."""
    figures = [Figure.of(name, values, "ms") for name, values in steps.items()]
    for name, timed in runs.items():
        if timed[0].decode_s:
            speeds = [run.decoding() for run in timed]
            figures.append(Figure.of(f"{name}, decoding", speeds, "tokens/s"))
            if name in ("plain", "K 4"):
                speeds = [run.decoding(CODE) for run in timed]
                figures.append(Figure.of(f"{name}, code prompt, decoding", speeds, "tokens/s"))
        if timed[0].output_token_ids:
            figures.append(Figure.of(f"{name}, whole", [run.whole() for run in timed], "tokens/s"))
        else:
            figures.append(Figure.of(name, [run.whole_s for run in timed], "s"))
    return figures


def main(args: Sequence[str]) -> int:
    """Print tables, and then one line of JSON; 1 where outputs that must be identical are not."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(args)

    config = EngineConfig("onnxruntime", BUNDLED, BUNDLED_DRAFT)
    for _ in EngineSlot(lambda name: OnnxRuntimeBackend()).build(config):
        pass
    with RecordedEngine(config, EngineStore()) as engine:
        steps = step_times(engine, engine.encode(PROMPTS[CODE], chat_template=True))
        runs = measure(Ways(engine, given.max_new_tokens), given.repeats)
    expected = runs["plain"][0].output_token_ids
    identical = {
        name: all(run.output_token_ids == expected for run in runs[name])
        for name in ("plain", "speculative", "K 4", "transformers, plain", "transformers, assisted")
    }
    settings = {
        "benchmark": "cpu",
        "num_draft_tokens": DEFAULT_NUM_DRAFT_TOKENS["model"],
        "min_draft_prob": DEFAULT_MIN_DRAFT_PROB,
        **vars(given),
        "identical_to_plain": identical,
    }
    report(figures_of(steps, runs), ratios_of(steps, runs), settings)
    return 0 if all(identical[name] for name in ("plain", "speculative", "K 4")) else 1
