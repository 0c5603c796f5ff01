"""Runs of an engine over five prompts of five kinds: their outputs and their speeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter

from engines.base import Engine
from engines.config import GenerationRequest
from engines.stats import stats_of

# One of each kind: code, fact, story, email, sum
PROMPTS = (
    "Write a Python function that checks if a number is prime.",
    "Why is the sky blue?",
    "Tell a short story about a lighthouse keeper and a lost ship.",
    "Write a short email that thanks a colleague for their help.",
    "A baker has 24 rolls and sells 9 of them. How many are left? Explain.",
)
CODE = 0


@dataclass(slots=True)
class Timed:
    """One run over all prompts."""

    output_token_ids: list[tuple[int, ...]] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)  # of each prompt
    whole_s: float = 0.0

    def decoding(self, *prompts: int) -> float:
        """Return tokens per second over some prompts, all where none is named."""
        chosen = prompts or range(len(self.decode_s))
        num_tokens = sum(len(self.output_token_ids[prompt]) for prompt in chosen)
        return num_tokens / sum(self.decode_s[prompt] for prompt in chosen)

    def whole(self) -> float:
        """Return tokens per second, the reading of the prompts included."""
        return sum(map(len, self.output_token_ids)) / self.whole_s


def timed_runs(engine: Engine, requests: Iterable[GenerationRequest]) -> Timed:
    """Run one request after the other."""
    timed = Timed()
    for request in requests:
        started = perf_counter()
        stats = stats_of(engine.generate(request))
        timed.whole_s += perf_counter() - started
        timed.output_token_ids.append(tuple(stats.output_token_ids))
        timed.decode_s.append(stats.decode_s)
    return timed
