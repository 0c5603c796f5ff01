"""A pair by its shapes alone on a device: the costs of real passes and rounds, none of its words.

Weights are random and acceptance is forced, so that the costs of a large pair can be measured where
it was never downloaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter

import torch

from engines.bench.random_models import FP8, SHAPES, random_model, read_bytes, shape_name
from engines.bench.timing import Figure, Ratio, alternate, report
from engines.config import MAX_NUM_DRAFT_TOKENS, DraftKind, GenerationRequest
from engines.drafting import ModelProposer, NoProposer
from engines.errors import EngineError, GenerationError, translate_errors
from engines.events import Step
from engines.generation import Vocabulary, generate_events
from engines.rejection import Verdict
from engines.speculative import (
    PrefillChunk,
    RoundMaker,
    StepwiseRounds,
    VerifiedDraft,
    decode,
)
from engines.transformers_backend.captured import CapturedModel, CapturedPasses
from engines.transformers_backend.captured_round import (
    NUM_LAST_TOKENS,
    CapturedRound,
    CapturedRounds,
    RoundShape,
)
from engines.transformers_backend.device import (
    device_name,
    device_of,
    dtype_name,
    mark,
    seconds_between,
)

LABEL = "random weights, forced acceptance"
# Of the weights' memory, in bytes per second, by the makers' data sheets
BANDWIDTHS = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12, "L40S": 0.864e12}
NUM_REPLAYS = 10  # of a pass between two readings of the clock
COPIED_BYTES = 2**30
VOCABULARY = Vocabulary(lambda ids: "x" * len(ids), frozenset(), frozenset())


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured."""

    target: str = "llama-8b"
    draft: str = "llama-1b"
    num_draft_tokens: int = 4
    num_accepted_tokens: int = 3  # of every draft, whatever the two models say
    context: int = 512
    rounds: int = 16  # of a run
    repeats: int = 5


class ForcedRounds:
    """Rounds whose verdicts are replaced: so many of each draft are kept."""

    def __init__(self, rounds: RoundMaker, num_accepted_tokens: int) -> None:
        self._rounds = rounds
        self._num_accepted_tokens = num_accepted_tokens

    def prefill(self, token_ids: Sequence[int]) -> Iterator[PrefillChunk]:
        return self._rounds.prefill(token_ids)

    def make(self, context_token_ids: Sequence[int], num_wanted: int) -> VerifiedDraft:
        made = self._rounds.make(context_token_ids, num_wanted)
        num_accepted = min(self._num_accepted_tokens, len(made.draft.token_ids))
        verdict = Verdict(num_accepted, made.verification.verdict.next_token_id)
        probs = (0.0,) * (len(made.draft.token_ids) + 1)
        verification = replace(made.verification, verdict=verdict, target_probs=probs)
        return replace(made, verification=verification)

    def keep(self, num_tokens: int) -> None:
        self._rounds.keep(num_tokens)


class Pair:
    """Two models of random weights, with the passes and rounds that are measured."""

    def __init__(self, settings: Settings, *, dtype: torch.dtype, device: torch.device) -> None:
        """Make and capture them.

        Raises:
            EngineError: A shape is unknown, or memory is short.
        """
        self.settings, self.dtype, self.device = settings, dtype, device
        number = settings.num_draft_tokens
        self.sizes = {"target": (1, 2, number + 1, 9), "draft": (1, 2)}
        capacity = settings.context + (settings.rounds + 2) * (number + 1) + 9
        self.read_bytes: dict[str, int] = {}
        self.capture_s: dict[str, float] = {}
        self.notes: list[str] = []
        self._passes: dict[str, CapturedPasses] = {}
        for role, name in (("target", settings.target), ("draft", settings.draft)):
            model = random_model(name, dtype=dtype, device=device)
            started = perf_counter()
            passes = CapturedPasses(model, capacity=capacity)
            for size in self.sizes[role]:
                passes.capture(size)
            self.capture_s[role] = perf_counter() - started
            if passes.unfused_reason is not None:
                self.notes.append(f"{role}: torch.compile failed ({passes.unfused_reason})")
            self.read_bytes[role] = read_bytes(model)
            self._passes[role] = passes
        self._vocab_size = min(passes.vocab_size for passes in self._passes.values())
        self._ids = tuple((7919 * place) % self._vocab_size for place in range(settings.context))
        self._rounds = {num: self._captured(num) for num in (0, number)}

    def step_ms(self, role: str, num_tokens: int) -> float:
        """Return the time of a pass behind the context, by the device's clock where it has one."""
        passes = self._passes[role]
        passes.read(self._ids[-num_tokens:], self.settings.context)
        started = mark(self.device)
        for _ in range(NUM_REPLAYS):
            passes.again(num_tokens)
        return seconds_between(started, mark(self.device)) * 1000 / NUM_REPLAYS

    def run(self, num_draft_tokens: int) -> tuple[float, float]:
        """Decode for some rounds, events and all.

        Returns:
            Milliseconds a round, and tokens per second, from the first round's end to the last's.
        """
        settings = self.settings
        num_rounds = settings.rounds + 1
        request = self._request(num_draft_tokens, (num_rounds + 1) * (num_draft_tokens + 1))
        rounds = decode(
            ForcedRounds(self._maker(request), settings.num_accepted_tokens),
            request,
            stop_token_ids=frozenset(),
            context_length=2**20,
        )
        steps: list[Step] = []
        with closing(generate_events(rounds, request, VOCABULARY)) as events:
            for event in events:
                if isinstance(event, Step):
                    steps.append(event)
                if len(steps) == num_rounds:
                    break
        seconds = steps[-1].elapsed_s - steps[0].elapsed_s
        num_tokens = sum(len(step.tokens) for step in steps[1:])
        return seconds * 1000 / settings.rounds, num_tokens / seconds

    def _request(self, num_draft_tokens: int, max_new_tokens: int) -> GenerationRequest:
        kind: DraftKind = "model" if num_draft_tokens else "none"
        return GenerationRequest(self._ids, kind, num_draft_tokens, max_new_tokens)

    def _captured(self, num_draft_tokens: int) -> CapturedRound:
        shape = RoundShape.of(self._request(num_draft_tokens, 1))
        draft = self._passes["draft"] if num_draft_tokens else None
        return CapturedRound(self._passes["target"], draft, shape, vocab_size=self._vocab_size)

    def _maker(self, request: GenerationRequest) -> RoundMaker:
        target, draft = (
            CapturedModel(self._passes[role], vocab_size=self._vocab_size)
            for role in ("target", "draft")
        )
        captured = self._rounds[request.num_draft_tokens]
        if request.num_draft_tokens == 0:
            return CapturedRounds(
                captured, None, target, StepwiseRounds(target, NoProposer(), request)
            )
        stepwise = StepwiseRounds(target, ModelProposer(draft), request)
        return CapturedRounds(captured, draft, target, stepwise)


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes per second that a large copy reads and writes."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = []
    for _ in range(5):
        started = mark(device)
        target.copy_(source)
        rates.append(2 * COPIED_BYTES / seconds_between(started, mark(device)))
    return median(rates)


def bandwidth_of(name: str) -> float | None:
    """Return a device's bandwidth by its maker's data sheet; None where that is not known here."""
    return next((rate for known, rate in BANDWIDTHS.items() if known in name), None)


def measure(pair: Pair) -> tuple[dict[str, list[float]], dict[str, list[tuple[float, float]]]]:
    """Return the times of passes in ms, and of each run its ms a round and its tokens/s."""
    ways: dict[str, Callable[[], float]] = {
        f"{role} step of {size}": lambda role=role, size=size: pair.step_ms(role, size)  # type: ignore[misc]
        for role, sizes in pair.sizes.items()
        for size in sizes
    }
    steps = alternate(ways, pair.settings.repeats)
    runs = alternate(
        {
            "plain": lambda: pair.run(0),
            "speculative": lambda: pair.run(pair.settings.num_draft_tokens),
        },
        pair.settings.repeats,
    )
    return steps, runs


def figures_of(
    pair: Pair,
    steps: dict[str, list[float]],
    runs: dict[str, list[tuple[float, float]]],
    bandwidth: float,
) -> list[Figure]:
    """Return every measured quantity with its range."""
    figures = [
        Figure.of(f"{role}, floor", [num_bytes / bandwidth * 1000], "ms")
        for role, num_bytes in pair.read_bytes.items()
    ]
    figures += [Figure.of(name, values, "ms") for name, values in steps.items()]
    for name, values in runs.items():
        figures.append(Figure.of(f"{name}, round", [value[0] for value in values], "ms"))
        figures.append(Figure.of(f"{name}, decoding", [value[1] for value in values], "tokens/s"))
    seconds = sum(pair.capture_s.values())
    return [*figures, Figure.of("compiling and capturing", [seconds], "s")]


def ratios_of(
    pair: Pair,
    steps: dict[str, list[float]],
    runs: dict[str, list[tuple[float, float]]],
    bandwidth: float,
) -> list[Ratio]:
    """Return what is held to for the usual pair, and shown for others."""
    settings = pair.settings
    number = settings.num_draft_tokens
    floor = {role: size / bandwidth * 1000 for role, size in pair.read_bytes.items()}
    plain, verify = median(steps["target step of 1"]), median(steps[f"target step of {number + 1}"])
    draft = median(steps["draft step of 1"])
    round_ms, speed = (median(run[at] for run in runs["speculative"]) for at in (0, 1))
    plain_speed = median(run[1] for run in runs["plain"])
    kept = f"{settings.num_accepted_tokens} of {number} accepted"
    ratios = [
        Ratio("plain step / floor", plain / floor["target"], 1.6, 1.25),
        Ratio(f"verify of {number + 1} / plain step", verify / plain, 1.12, 1.05),
        Ratio(
            f"round / ({number} draft steps + verify), each alone",
            round_ms / (number * draft + verify),
            1.05,
            1.02,
        ),
        Ratio("draft step / floor", draft / floor["draft"], 2.2, 1.5),
        Ratio(f"speculative / plain, {kept}", speed / plain_speed, 2.2, 2.6, at_most=False),
    ]
    usual = Settings(rounds=settings.rounds, repeats=settings.repeats)
    if settings == usual and pair.dtype == torch.bfloat16 and pair.device.type == "cuda":
        return ratios
    return [replace(ratio, hold=None, aim=None) for ratio in ratios]


def parse(args: Sequence[str]) -> tuple[Settings, torch.dtype, str, float | None]:
    """Return what is measured, in what, on what, and the bandwidth in bytes per second if given."""
    usual = Settings()
    parser = argparse.ArgumentParser(prog='make bench ARGS="shapes ..."', description=__doc__)
    text = f"a shape ({', '.join(SHAPES)}; '{FP8}' behind it: 8 bits) or a config.json"
    parser.add_argument("--target", default=usual.target, help=text)
    parser.add_argument("--draft", default=usual.draft, help="likewise")
    for name, text in (
        ("num_draft_tokens", "drafted in each round"),
        ("num_accepted_tokens", "kept of each draft"),
        ("context", "tokens read before"),
        ("rounds", "of each run"),
        ("repeats", "of everything"),
    ):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(usual, name), help=text)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--bandwidth", type=float, help="of the memory, TB/s; else the data sheet's, or a copy's"
    )
    given = vars(parser.parse_args(args))
    dtype, device, bandwidth = (given.pop(name) for name in ("dtype", "device", "bandwidth"))
    settings = Settings(**given)
    if not 1 <= settings.num_draft_tokens <= MAX_NUM_DRAFT_TOKENS:
        parser.error(f"--num-draft-tokens: use 1 to {MAX_NUM_DRAFT_TOKENS}")
    if not 0 <= settings.num_accepted_tokens <= settings.num_draft_tokens:
        parser.error("--num-accepted-tokens: no more than are drafted")
    if settings.context < NUM_LAST_TOKENS or min(settings.rounds, settings.repeats) < 1:
        parser.error("--context must be 2 or more, --rounds and --repeats 1 or more")
    if bandwidth is not None and bandwidth <= 0:
        parser.error("--bandwidth: more than 0")
    return settings, getattr(torch, dtype), device, bandwidth and bandwidth * 1e12


def main(args: Sequence[str]) -> int:
    """Print tables, and then one line of JSON; 1 with a sentence where that cannot be done."""
    settings, dtype, device_kind, bandwidth = parse(args)
    try:
        with translate_errors("measuring failed", {RuntimeError: GenerationError}):
            device = device_of(device_kind)
            device_called = device_name(device)
            pair = Pair(settings, dtype=dtype, device=device)
            copied = copy_bandwidth(device)
            steps, runs = measure(pair)
    except EngineError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    by_source = {
        "given": bandwidth,
        "data sheet": bandwidth_of(device_called),
        "copy": copied,
    }
    source, rate = next((name, rate) for name, rate in by_source.items() if rate is not None)
    figures = figures_of(pair, steps, runs, rate)
    figures.append(Figure.of("a copy's bandwidth", [copied / 1e12], "TB/s"))
    names = {role: shape_name(getattr(settings, role)) for role in ("target", "draft")}
    title = (
        f"{LABEL}: {names['target']} with {names['draft']}, {dtype_name(dtype)}, on {device_called}"
    )
    sys.stdout.write(f"{title}\n\n")
    described = {
        "benchmark": "shapes",
        "label": LABEL,
        **asdict(settings),
        **names,
        "dtype": dtype_name(dtype),
        "device": device_called,
        "bandwidth_bytes_per_s": rate,
        "bandwidth_source": source,
        "notes": pair.notes,
    }
    report(figures, ratios_of(pair, steps, runs, rate), described)
    return 0
