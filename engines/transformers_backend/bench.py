"""`make bench`: what the loop costs, and how it stands beside transformers' own generation.

One process, one pair, several prompts; the ways of generating alternate, and each figure is a
median over the repeats of total tokens ÷ total seconds, the prompt's reading included for all.

- bare: the very passes that a run of ours made, and nothing else
- ours: the loop with its events
- transformers: `generate`, plain or assisted with the same draft kind
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import DynamicCache

from engines.config import BUNDLED, DraftKind, EngineConfig, GenerationRequest
from engines.environment import environment
from engines.events import Step
from engines.slot import EngineSlot
from engines.stats import stats_of
from engines.transformers_backend.engine import TransformersEngine
from engines.transformers_backend.model import cache_argument

PROMPTS = (
    "Repeat this three times: the ship sails at dawn, and the tide waits for none.",
    "Write a Python function that checks if a number is prime.",
    "Tell the beginning of a story about a clock that runs backwards.",
)
Generate = Callable[[tuple[int, ...]], int]  # prompt ids -> number of new tokens


class Ways:
    """The ways of generating, each a function from a prompt to the number of new tokens."""

    def __init__(self, engine: TransformersEngine, args: argparse.Namespace) -> None:
        self._engine = engine
        self._args = args
        self._passes: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}

    def all(self) -> dict[str, Generate]:
        ways = {
            "plain, ours": lambda ids: self._ours("plain", ids),
            "plain, bare": lambda ids: self._bare("plain", ids),
            "plain, transformers": lambda ids: self._transformers("plain", ids),
            "speculative, ours": lambda ids: self._ours("speculative", ids),
            "speculative, transformers": lambda ids: self._transformers("speculative", ids),
        }
        if not self._args.draft:  # a draft model's own passes would have to be repeated as well
            ways["speculative, bare"] = lambda ids: self._bare("speculative", ids)
        return ways

    def _request(self, side: str, ids: tuple[int, ...]) -> GenerationRequest:
        args = self._args
        kind: DraftKind = "model" if args.draft else "prompt_lookup"
        drafted = GenerationRequest(ids, kind, args.num_draft_tokens, args.max_new_tokens)
        return drafted.plain() if side == "plain" else drafted

    def _ours(self, side: str, ids: tuple[int, ...]) -> int:
        events = list(self._engine.generate(self._request(side, ids)))
        steps = [event for event in events if isinstance(event, Step)]
        # Tokens read by each pass, and how many of them stay in the cache.
        self._passes[side, ids] = [
            ((step.num_draft_tokens or 0) + 1, len(step.tokens)) for step in steps
        ]
        return stats_of(events).num_output_tokens

    @torch.inference_mode()
    def _bare(self, side: str, ids: tuple[int, ...]) -> int:
        """Repeat the passes of our last run: same shapes, same cache, an argmax each."""
        call = self._engine.target_model
        cache = DynamicCache(config=call.config)
        cached = {cache_argument(call): cache}

        def forward(token_ids: Sequence[int], num_logits: int) -> torch.Tensor:
            output = call(
                torch.tensor([list(token_ids)], device=call.device),
                use_cache=True,
                logits_to_keep=num_logits,
                **cached,
            )
            best: torch.Tensor = output.logits[0].argmax(-1).cpu()
            return best

        forward(ids[:-1], 1)
        num_tokens = 0
        for num_read, num_kept in self._passes[side, ids]:
            forward([ids[-1]] * num_read, num_read)
            if num_read > num_kept:
                cache.crop(num_kept - num_read)
            num_tokens += num_kept
        return num_tokens

    def _transformers(self, side: str, ids: tuple[int, ...]) -> int:
        options: dict[str, Any] = {}
        if side == "speculative" and self._args.draft:
            options = {
                "assistant_model": self._engine.draft_model,
                "num_assistant_tokens": self._args.num_draft_tokens,
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0,
            }
        elif side == "speculative":
            options = {"prompt_lookup_num_tokens": self._args.num_draft_tokens}
        prompt = torch.tensor([list(ids)], device=self._engine.target_model.device)
        output = self._engine.target_model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=self._args.max_new_tokens,
            **options,
        )
        return int(output.shape[1] - prompt.shape[1])


def measure(
    ways: dict[str, Generate], prompts: list[tuple[int, ...]], repeats: int
) -> dict[str, Any]:
    """Return the median tokens per second of each way, with their lowest and highest."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for repeat in range(-1, repeats):  # the first round warms up and does not count
        turned = names[repeat % len(names) :] + names[: repeat % len(names)]
        # A bare run repeats the passes of ours, so ours goes first in the round that warms up.
        for name in names if repeat < 0 else turned:
            started = perf_counter()
            num_tokens = sum(ways[name](ids) for ids in prompts)
            if repeat >= 0:
                speeds[name].append(num_tokens / (perf_counter() - started))
    return {
        name: {"median": median(values), "low": min(values), "high": max(values)}
        for name, values in speeds.items()
    }


def main() -> int:
    """Print a table, and then one line of JSON."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--target", default=BUNDLED)
    parser.add_argument("--draft")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    engine = EngineSlot().load(EngineConfig(target=args.target, draft=args.draft))
    assert isinstance(engine, TransformersEngine)
    prompts = [engine.encode(prompt, chat_template=True) for prompt in PROMPTS]
    speeds = measure(Ways(engine, args).all(), prompts, args.repeats)

    out = sys.stdout.write
    out(f"{'tokens/s, prompt included':28}{'median':>8}{'low':>8}{'high':>8}\n")
    for name, speed in speeds.items():
        out(f"{name:28}" + "".join(f"{value:8.1f}" for value in speed.values()) + "\n")
    overhead = {
        side: speeds[f"{side}, bare"]["median"] / speeds[f"{side}, ours"]["median"] - 1
        for side in ("plain", "speculative")
        if f"{side}, bare" in speeds
    }
    for side, share in overhead.items():
        out(f"the loop and its events over bare passes, {side}: {share:+.1%}\n")
    report = {"speeds": speeds, "overhead": overhead, "environment": environment()}
    out(json.dumps({**vars(args), **report}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
