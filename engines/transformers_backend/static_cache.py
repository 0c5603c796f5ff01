"""StaticKv: keys and values of one sequence in buffers whose addresses never change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class LayerKv:
    """The part of one layer: [1, num_kv_heads, capacity, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor  # [num_tokens], where the next ones are written

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_args: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, num_kv_heads, num_tokens, head_dim] at `positions`; return whole buffers."""
        self.keys.index_copy_(2, self.positions, keys)
        self.values.index_copy_(2, self.positions, values)
        return self.keys, self.values


class StaticKv:
    """What a model of full attention takes for its cache, written at given positions.

    Rows from the current length on hold what earlier passes left and must be masked, so that
    forgetting tokens is a smaller length and nothing else.
    """

    is_compileable = True  # transformers asks: shapes and addresses stay as they are

    def __init__(
        self, config: Any, *, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or heads
        shape = (1, num_kv_heads, capacity, head_dim)
        self.positions = torch.zeros(1, dtype=torch.int64, device=device)
        self._columns = torch.arange(capacity, device=device)
        self._parts = [
            LayerKv(
                torch.zeros(shape, dtype=dtype, device=device),
                torch.zeros(shape, dtype=dtype, device=device),
                self.positions,
            )
            for _ in range(config.num_hidden_layers)
        ]

    def mask(self, positions: torch.Tensor) -> torch.Tensor:
        """Return [1, 1, num_tokens, capacity]: True up to each of `positions` [num_tokens]."""
        return (self._columns[None, :] <= positions[:, None])[None, None]

    def part(self, layer: int) -> LayerKv:
        """Return that of one layer."""
        return self._parts[layer]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_args: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values at `positions`, as `LayerKv.update`."""
        part = self._parts[layer]
        part.positions = self.positions
        return part.update(keys, values)

    def get_seq_length(self, *_args: Any) -> int:
        return 0  # positions and masks are passed in, never derived from a length
