"""The text as batches: a part kept apart, every other sequence once an epoch, in a seeded order."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from engines.distill.text_set import TextSet
from engines.distill.workspace import Workspace


def text_set(folder: Path, *chunk_sizes: int, length: int = 4) -> TextSet:
    """Make a text whose sequences say their own number."""
    workspace = Workspace(folder)
    workspace.work.mkdir(exist_ok=True)
    start = 0
    for number, size in enumerate(chunk_sizes):
        rows = torch.arange(start, start + size)[:, None].expand(size, length)
        workspace.write_chunk(number, rows.clone(), (rows + torch.arange(length)) % 2 == 0)
        start += size
    return TextSet(workspace, len(chunk_sizes))


def numbers(token_ids: torch.Tensor) -> list[int]:
    return [int(row[0]) for row in token_ids]


@pytest.mark.parametrize(("first", "num_kept"), [(8, 1), (9, 1), (16, 2), (4096, 128)])
def test_the_first_sequences_are_kept_apart_and_never_trained_on(
    tmp_path: Path, first: int, num_kept: int
):
    text = text_set(tmp_path, first, first)

    kept = [number for ids, _ in text.validation(3) for number in numbers(ids)]
    trained = {
        number for step in range(5) for number in numbers(text.batch(step, first, seed=0)[0])
    }

    assert kept == list(range(num_kept))
    assert trained.isdisjoint(kept)


def test_every_other_sequence_comes_once_an_epoch_in_another_order(tmp_path: Path):
    text = text_set(tmp_path, 16, 16)  # 30 to train on: 6 batches of 5
    epochs = [
        [number for step in range(6 * epoch, 6 * epoch + 6)
         for number in numbers(text.batch(step, 5, seed=0)[0])]
        for epoch in range(3)
    ]  # fmt: skip

    for epoch in epochs:
        assert Counter(epoch) == Counter(range(2, 32))
    assert epochs[0] != epochs[1] != epochs[2]


def test_one_seed_gives_one_order_wherever_it_is_taken_up(tmp_path: Path):
    text, again = text_set(tmp_path, 16), text_set(tmp_path, 16)
    order = [numbers(text.batch(step, 4, seed=7)[0]) for step in range(9)]

    assert [numbers(again.batch(step, 4, seed=7)[0]) for step in (8, 2, 5)] == [
        order[8], order[2], order[5],
    ]  # fmt: skip
    assert [numbers(text.batch(step, 4, seed=8)[0]) for step in range(9)] != order
    assert len(again.batch(0, 4, seed=2**53)[0]) == 4


def test_a_batch_holds_each_sequence_with_its_marks(tmp_path: Path):
    token_ids, is_answer = text_set(tmp_path, 8).batch(3, 2, seed=0)

    assert token_ids.dtype == torch.int64
    assert torch.equal(is_answer, (token_ids + torch.arange(4)) % 2 == 0)


def test_a_batch_is_no_larger_than_the_text(tmp_path: Path):
    token_ids, _ = text_set(tmp_path, 8).batch(0, 100, seed=0)

    assert sorted(numbers(token_ids)) == list(range(1, 8))


def test_a_text_without_an_answer_to_measure_on_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"sequence_length is 1, and no answer .* use a longer"):
        text_set(tmp_path, 8, length=1)
