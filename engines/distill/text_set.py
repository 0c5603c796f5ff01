"""The written text as training data: batches of a seeded shuffle, and a part kept apart."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engines.distill.spec import part_seed
from engines.distill.workspace import Workspace

MAX_VALIDATION_SEQUENCES = 128
VALIDATION_SHARE = 8  # one in so many of the first chunk's sequences at most

Batch = tuple[torch.Tensor, torch.Tensor]  # token ids and whether each is an answer's


def num_kept_apart(num_sequences: int) -> int:
    """Return how many of the first chunk's sequences are not trained on."""
    return max(1, min(MAX_VALIDATION_SEQUENCES, num_sequences // VALIDATION_SHARE))


class TextSet:
    """All chunks of one distillation, in memory."""

    def __init__(self, workspace: Workspace, num_chunks: int) -> None:
        """Read the chunks.

        Raises:
            ValueError: What is kept apart holds no answer to measure a student on.
        """
        chunks = [workspace.read_chunk(number) for number in range(num_chunks)]
        self._num_kept = num_kept_apart(len(chunks[0][0]))
        self._token_ids = torch.cat([token_ids for token_ids, _ in chunks])
        self._is_answer = torch.cat([is_answer for _, is_answer in chunks])
        if not self._is_answer[: self._num_kept, 1:].any():
            raise ValueError(
                f"sequence_length is {self._token_ids.shape[1]}, and no answer of the target's "
                "begins within it: use a longer one"
            )
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    def batch(self, step: int, size: int, *, seed: int) -> Batch:
        """Return what a training step learns from: the same for the same text, seed and step."""
        num_sequences = len(self._token_ids) - self._num_kept
        size = min(size, num_sequences)
        epoch, index = divmod(step, num_sequences // size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(part_seed(seed, epoch))
            self._order = torch.randperm(num_sequences, generator=generator) + self._num_kept
            self._epoch = epoch
        return self._rows(self._order[index * size : (index + 1) * size])

    def validation(self, size: int) -> Iterator[Batch]:
        """Yield the sequences that no training step sees, in batches."""
        for start in range(0, self._num_kept, size):
            yield self._rows(torch.arange(start, min(start + size, self._num_kept)))

    def _rows(self, rows: torch.Tensor) -> Batch:
        return self._token_ids[rows].long(), self._is_answer[rows]
