"""What NVIDIA has published of TensorRT-LLM with a draft model: to stand beside a measurement.

Output tokens per second over the whole time, that to the first token included; FP8, H200. None of
it was measured by this project.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_POST = (
    "https://developer.nvidia.com/blog/"
    "tensorrt-llm-speculative-decoding-boosts-inference-throughput-by-up-to-3-6x/"
)
SECOND_POST = (
    "https://developer.nvidia.com/blog/boost-llama-3-3-70b-inference-throughput-3x-with-nvidia-"
    "tensorrt-llm-speculative-decoding/"
)


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """One row of a published table."""

    target: str  # as Hub ids spell it, without what follows the size
    draft: str
    num_gpus: int
    tokens_per_second: float
    baseline_tokens_per_second: float
    source: str

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.baseline_tokens_per_second


PUBLISHED = (
    PublishedFigure("Llama-3.1-405B", "Llama 3.2 1B", 4, 111.34, 33.46, FIRST_POST),
    PublishedFigure("Llama-3.1-405B", "Llama 3.2 3B", 4, 120.75, 33.46, FIRST_POST),
    PublishedFigure("Llama-3.1-70B", "Llama 3.2 1B", 1, 146.05, 51.14, FIRST_POST),
    PublishedFigure("Llama-3.1-70B", "Llama 3.2 3B", 1, 140.49, 51.14, FIRST_POST),
    PublishedFigure("Llama-3.1-70B", "Llama 3.1 8B", 1, 113.84, 51.14, FIRST_POST),
    PublishedFigure("Llama-3.3-70B", "Llama 3.2 1B", 1, 181.74, 51.14, SECOND_POST),
    PublishedFigure("Llama-3.3-70B", "Llama 3.2 3B", 1, 161.53, 51.14, SECOND_POST),
    PublishedFigure("Llama-3.3-70B", "Llama 3.1 8B", 1, 134.38, 51.14, SECOND_POST),
)


def published_figures(target: str) -> tuple[PublishedFigure, ...]:
    """Return what was published for a target, () for most."""
    name = target.rpartition("/")[2].lower()
    return tuple(figure for figure in PUBLISHED if figure.target.lower() in name)
