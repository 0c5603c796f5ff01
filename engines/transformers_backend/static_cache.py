"""StaticKv: keys and values of one sequence in buffers whose addresses never change."""

from __future__ import annotations

from typing import Any

import torch


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
        shape = (config.num_hidden_layers, 1, num_kv_heads, capacity, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.positions = torch.zeros(1, dtype=torch.int64, device=device)

    def mask(self, positions: torch.Tensor) -> torch.Tensor:
        """Return [1, 1, num_tokens, capacity]: True up to each of `positions` [num_tokens]."""
        columns = torch.arange(self.keys.shape[3], device=self.keys.device)
        return (columns[None, :] <= positions[:, None])[None, None]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_args: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, num_kv_heads, num_tokens, head_dim] at `positions`; return whole buffers."""
        self.keys[layer].index_copy_(2, self.positions, keys)
        self.values[layer].index_copy_(2, self.positions, values)
        return self.keys[layer], self.values[layer]

    def get_seq_length(self, *_args: Any) -> int:
        return 0  # positions and masks are passed in, never derived from a length
