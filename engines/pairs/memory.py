"""MemoryNeed: what a loaded pair takes, by configurations alone, against what is free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engines.environment import gigabytes
from engines.errors import ModelLoadError
from engines.pairs.sizes import kv_values_per_token, num_params

CACHED_TOKENS = 2048  # prompt and output of a run: how long it will be, nobody says before
CACHES = f"KV caches of {CACHED_TOKENS} tokens"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One thing that takes memory."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a pair takes, and what there is."""

    parts: tuple[MemoryPart, ...]
    free_bytes: int
    device: str  # for people

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def text(self) -> str:
        """Return it as a clause: what is taken, by what, and what is free."""
        parts = ", ".join(f"{part.name} {size_text(part.num_bytes)}" for part in self.parts)
        return (
            f"about {size_text(self.num_bytes)} of {self.device} ({parts}); "
            f"{size_text(self.free_bytes)} are free"
        )

    def require(self, *, freed_bytes: int = 0) -> None:
        """Refuse a pair that does not fit, before a weight is read.

        Args:
            freed_bytes: What is given back before the pair is loaded.

        Raises:
            ModelLoadError: It does not; the text has both numbers and what would fit better.
        """
        missing = self.num_bytes - self.free_bytes - freed_bytes
        if missing <= 0:
            return
        more = f", and {size_text(freed_bytes)} more without the loaded pair" if freed_bytes else ""
        raise ModelLoadError(
            f"the pair takes {self.text}{more}: {size_text(missing)} are missing; choose a smaller "
            "target or draft, or the draft kind 'prompt_lookup', which takes none, or end what "
            "else runs there"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "num_bytes": self.num_bytes,
            "free_bytes": self.free_bytes,
            "parts": {part.name: part.num_bytes for part in self.parts},
        }


def weight_bytes(config: Mapping[str, Any], dtype: str) -> int | None:
    """Return what a model's weights take; None where the configuration does not tell.

    Args:
        config: Of the language model.
        dtype: Each weight's, by its name in PyTorch.
    """
    params = None if "quantization_config" in config else num_params(config)
    return None if params is None else params * BYTES[dtype]


def kv_bytes(caches: Iterable[tuple[Mapping[str, Any], str]]) -> int | None:
    """Return what KV caches take; None where a configuration does not tell.

    Args:
        caches: Each model's configuration, and the type of what it caches.
    """
    total = 0
    for config, dtype in caches:
        values = kv_values_per_token(config)
        if values is None:
            return None
        total += values * BYTES[dtype] * CACHED_TOKENS
    return total


def need_of(parts: Mapping[str, int | None], *, free_bytes: int, device: str) -> MemoryNeed | None:
    """Return the sum of parts; None where one is not known."""
    known = [MemoryPart(name, size) for name, size in parts.items() if size is not None]
    return MemoryNeed(tuple(known), free_bytes, device) if len(known) == len(parts) else None


def size_text(num_bytes: int) -> str:
    """Return a size for people, small ones in megabytes."""
    return gigabytes(num_bytes) if num_bytes >= 10**9 else f"{num_bytes / 1e6:.0f} MB"
