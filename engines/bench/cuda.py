"""The bundled pair on a CUDA device through PyTorch: plain, and every num_draft_tokens of 1 to 8.

Everything is greedy, and outputs are compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from engines.bench.runs import PROMPTS, Timed, timed_runs
from engines.bench.timing import Figure, Ratio, alternate, report
from engines.config import (
    BUNDLED,
    BUNDLED_DRAFT,
    DraftKind,
    DTypeName,
    EngineConfig,
    GenerationRequest,
)
from engines.errors import EngineError
from engines.slot import EngineSlot
from engines.store import EngineStore
from engines.transformers_backend.engine import TransformersEngine

NUMS_DRAFT_TOKENS = range(1, 9)
DTYPES: tuple[DTypeName, ...] = ("float32", "bfloat16")
PLAIN, EAGER = "plain", "plain, not captured"


def measure(
    engine: TransformersEngine, max_new_tokens: int, repeats: int
) -> dict[str, list[Timed]]:
    """Return each way's runs over all prompts."""
    prompts = [engine.encode(prompt, chat_template=True) for prompt in PROMPTS]

    def requests(number: int) -> list[GenerationRequest]:
        kind: DraftKind = "model" if number else "none"
        return [GenerationRequest(ids, kind, number, max_new_tokens) for ids in prompts]

    def run(number: int) -> Timed:
        return timed_runs(engine, requests(number))

    def eager() -> Timed:
        with uncaptured(engine):
            return run(0)

    for number in (0, *NUMS_DRAFT_TOKENS):
        for request in requests(number):
            for message in engine.prepare(request):
                if message:
                    sys.stderr.write(f"{message}\n")
    ways: dict[str, Callable[[], Timed]] = {EAGER: eager, PLAIN: lambda: run(0)}
    for number in NUMS_DRAFT_TOKENS:
        ways[f"K {number}"] = lambda number=number: run(number)  # type: ignore[misc]
    return alternate(ways, repeats)


@contextmanager
def uncaptured(engine: TransformersEngine) -> Iterator[None]:
    """Let an engine run as it would where nothing can be captured."""
    engine.is_capturing = False
    try:
        yield
    finally:
        engine.is_capturing = True


def main(args: Sequence[str]) -> int:
    """Print tables, and then one line of JSON; 1 where float32 outputs are not identical."""
    parser = argparse.ArgumentParser(prog='make bench ARGS="cuda ..."', description=__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(args)

    figures: list[Figure] = []
    ratios: list[Ratio] = []
    identical: dict[str, dict[str, int]] = {}
    notes: list[str] = []
    device = ""
    try:
        for dtype in DTYPES:
            config = EngineConfig(
                "transformers", BUNDLED, BUNDLED_DRAFT, dtype=dtype, device="cuda"
            )
            for _ in EngineSlot().build(config):
                pass
            with TransformersEngine(config, EngineStore()) as engine:
                runs = measure(engine, given.max_new_tokens, given.repeats)
                device = engine.info.device
                notes += [f"{dtype}: {note}" for note in engine.info.notes]
            expected = runs[PLAIN][0].output_token_ids
            speeds = {name: [run.decoding() for run in timed] for name, timed in runs.items()}
            for name, values in speeds.items():
                figures.append(Figure.of(f"{dtype}, {name}, decoding", values, "tokens/s"))
                if name.startswith("K "):
                    ratio = median(values) / median(speeds[PLAIN])
                    ratios.append(Ratio(f"{dtype}, {name} / plain", ratio))
            identical[dtype] = {
                name: min(sum(map(tuple.__eq__, run.output_token_ids, expected)) for run in timed)
                for name, timed in runs.items()
            }
    except EngineError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    settings = {
        "benchmark": "cuda",
        "device": device,
        **vars(given),
        "prompts": len(PROMPTS),
        "prompts_identical_to_plain": identical,
        "notes": notes,
    }
    report(figures, ratios, settings)
    return 0 if set(identical["float32"].values()) == {len(PROMPTS)} else 1
