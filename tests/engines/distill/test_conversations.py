"""How conversations begin, and that a chunk of them is the same again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engines.distill.conversations import Conversations
from engines.distill.text_set import num_kept_apart
from engines.distill.writing import Text
from tests.engines.distill.conftest import float32_model, script_in


def prepare(folder: Path, prompts: Path | None, *, length: int = 96) -> Conversations:
    tokenizer, script = script_in(folder)
    return Conversations.prepare(
        tokenizer, script, None if prompts is None else str(prompts), length=length
    )


def chunk_of(folder: Path, conversations: Conversations, number: int, *, seed: int) -> Text:
    items = conversations.write_chunk(float32_model(folder), number, num_sequences=8, seed=seed)
    *_, text = items
    assert text is not None
    return text


def test_every_other_conversation_begins_as_people_do(chat_target: Path):
    conversations = prepare(chat_target, None)
    script, openings = conversations.script, conversations.openings

    text = chunk_of(chat_target, conversations, 1, seed=0)

    for row, token_ids in enumerate(text.token_ids.tolist()):
        opening = openings[4 + row // 2] if row % 2 == 0 else list(script.opening)
        assert token_ids[: len(opening)] == opening


def test_an_own_file_begins_every_conversation_in_turn(chat_target: Path, tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text("One\nTwo\n" + "x" * 48 + "\nThree\n")
    tokenizer, script = script_in(chat_target)
    conversations = prepare(chat_target, path)

    text = chunk_of(chat_target, conversations, 1, seed=0)  # conversations 8 to 15

    assert conversations.num_left_out == 1
    contents = []
    for token_ids in text.token_ids[:, len(script.opening) :].tolist():
        contents.append(tokenizer.decode(token_ids[: token_ids.index(script.end_id)]))
    assert contents == ["Three", "One", "Two", "Three", "One", "Two", "Three", "One"]
    start = len(conversations.openings[0])
    assert text.is_answer[1, start]
    assert not text.is_answer[1, :start].any()


def test_text_kept_apart_and_training_share_no_prompt_of_ones_own(
    chat_target: Path, tmp_path: Path
):
    path = tmp_path / "prompts.txt"
    names = [f"prompt {number}" for number in range(30)]
    path.write_text("\n".join([*names, *names[:20]]))  # some are said twice
    conversations = prepare(chat_target, path)
    apart, openings = conversations.apart, conversations.openings

    assert len(apart) == 3
    assert len(openings) == 27
    assert not [opening for opening in apart if opening in openings]
    for number in range(8):
        text = chunk_of(chat_target, conversations, number, seed=0)
        for row, token_ids in enumerate(text.token_ids.tolist()):
            is_apart = any(token_ids[: len(opening)] == opening for opening in apart)
            assert is_apart == (number == 0 and row < num_kept_apart(8))


def test_more_sequences_than_prompts_kept_apart_take_them_in_turn(
    chat_target: Path, tmp_path: Path
):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"prompt {number}" for number in range(10, 34)))
    conversations = prepare(chat_target, path)
    model = float32_model(chat_target)

    *_, text = conversations.write_chunk(model, 0, num_sequences=32, seed=0)

    assert text is not None
    assert len(conversations.apart) == 3
    length = len(conversations.apart[0])
    rows = [token_ids[:length] for token_ids in text.token_ids[:5].tolist()]
    assert rows == [*conversations.apart, conversations.apart[0], conversations.openings[4]]


@pytest.mark.parametrize(("num_prompts", "num_apart"), [(7, 0), (8, 1), (15, 1), (2000, 128)])
def test_one_prompt_of_eight_is_kept_apart_at_most(
    chat_target: Path, tmp_path: Path, num_prompts: int, num_apart: int
):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(map(str, range(num_prompts))))
    conversations = prepare(chat_target, path)

    assert len(conversations.apart) == num_apart
    assert len(conversations.openings) == num_prompts - num_apart


def test_plain_text_begins_with_nothing_unless_a_file_says_so(plain_target: Path, tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"beginning": "ab"}))
    tokenizer, _ = script_in(plain_target)

    assert prepare(plain_target, None).openings == [[0]]
    assert prepare(plain_target, path).openings == [[0, *tokenizer("ab").input_ids]]


def test_prompts_that_are_all_too_long_are_refused(chat_target: Path, tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text("x" * 48)

    with pytest.raises(ValueError, match=f"every prompt in '{path}' has more than 48 tokens"):
        prepare(chat_target, path)


def test_a_chunk_is_the_same_for_the_same_number_and_seed_only(chat_target: Path):
    conversations = prepare(chat_target, None)
    first = chunk_of(chat_target, conversations, 0, seed=5)
    again = chunk_of(chat_target, conversations, 0, seed=5)
    others = [
        chunk_of(chat_target, conversations, number, seed=seed)
        for number, seed in ((1, 5), (0, 6), (0, 2**53))
    ]

    assert torch.equal(first.token_ids, again.token_ids)
    assert torch.equal(first.is_answer, again.is_answer)
    assert not any(torch.equal(first.token_ids, other.token_ids) for other in others)


def test_a_short_sequence_has_room_for_an_answer(chat_target: Path):
    text = chunk_of(chat_target, prepare(chat_target, None), 0, seed=0)

    assert text.is_answer.any(dim=1).all()  # though this target ends a turn once in a long time
