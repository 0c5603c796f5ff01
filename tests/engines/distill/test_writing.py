"""Writing in lock-step: each sequence as if alone, turns that follow each other, true draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.distill.script import Script, Turn
from engines.distill.writing import Text, write
from tests.engines.distill.conftest import float32_model
from tests.frequencies import assert_follows

END_ID = 1
OPENINGS = [[0], [0, 40, 41, 42], [0, *range(60, 90)], [0, 100]]
PLAIN = Script((0,), END_ID, frozenset({END_ID}), (Turn(is_answer=True, switch=(0,)),))
# A fifth of what this target samples ends a turn, so that turns of all lengths are seen.
CHAT = Script(
    (0, 7),
    END_ID,
    frozenset({END_ID, *range(200, 250)}),
    (Turn(is_answer=False, switch=(5, 6, 7)), Turn(is_answer=True, switch=(8,))),
)


@pytest.fixture(scope="module")
def model(plain_target: Path) -> Any:
    return float32_model(plain_target)


def written(
    model: Any,
    script: Script,
    *,
    openings: Sequence[Sequence[int]],
    length: int,
    temperature: float | Sequence[Sequence[float]],
    seed: int = 0,
    max_turn_tokens: int | None = None,
) -> Text:
    shape = len(openings), len(script.turns)
    temperatures = (
        torch.full(shape, temperature)
        if isinstance(temperature, (int, float))
        else torch.tensor(temperature)
    )
    *nothing, text = write(
        model,
        script,
        openings=openings,
        length=length,
        temperatures=temperatures,
        generator=torch.Generator().manual_seed(seed),
        max_turn_tokens=max_turn_tokens,
    )
    assert nothing == [None] * length
    assert text is not None
    return text


@pytest.mark.parametrize("opening", OPENINGS, ids=len)
def test_a_greedy_sequence_is_what_transformers_generates(model: Any, opening: list[int]):
    length = 64
    expected = model.generate(
        torch.tensor([opening]),
        attention_mask=torch.ones(1, len(opening), dtype=torch.long),
        max_new_tokens=length - len(opening),
        do_sample=False,
        pad_token_id=END_ID,
    )[0].tolist()

    alone = written(model, PLAIN, openings=[opening], length=length, temperature=0)
    together = written(model, PLAIN, openings=OPENINGS, length=length, temperature=0)

    assert alone.token_ids[0, : len(expected)].tolist() == expected
    assert len(expected) > len(opening) + 8  # not ended at once
    row = OPENINGS.index(opening)
    assert together.token_ids[row].tolist() == alone.token_ids[0].tolist()


def test_what_others_draw_does_not_reach_a_greedy_sequence(model: Any):
    greedy = written(model, CHAT, openings=[[0, 7]] * 3, length=48, temperature=0)
    mixed = [
        written(
            model,
            CHAT,
            openings=[[0, 7]] * 3,
            length=48,
            temperature=[[0, 0], [1, 1], [0.5, 0]],
            seed=seed,
        )
        for seed in (1, 2)
    ]

    for text in mixed:
        assert text.token_ids[0].tolist() == greedy.token_ids[0].tolist()
    for row in (1, 2):
        assert mixed[0].token_ids[row].tolist() != mixed[1].token_ids[row].tolist()


def test_one_seed_writes_one_text_and_another_another(model: Any):
    first, again, other = (
        written(model, CHAT, openings=[[0, 7]] * 4, length=32, temperature=1, seed=seed)
        for seed in (3, 3, 4)
    )

    assert torch.equal(first.token_ids, again.token_ids)
    assert torch.equal(first.is_answer, again.is_answer)
    assert not torch.equal(first.token_ids, other.token_ids)


@pytest.mark.parametrize("max_turn_tokens", [None, 1, 4])
def test_every_end_stays_as_drawn_leads_to_the_next_turn_and_answers_are_marked(
    model: Any, max_turn_tokens: int | None
):
    finished = [*CHAT.opening, 50, 51, END_ID, *CHAT.turns[0].switch]  # the answer is next
    begun = [*CHAT.opening, 50, 51]
    openings = [list(CHAT.opening), begun, finished] * 8
    text = written(
        model,
        CHAT,
        openings=openings,
        length=64,
        temperature=1,
        max_turn_tokens=max_turn_tokens,
    )

    turn_lengths: Counter[int] = Counter()
    end_ids: Counter[int] = Counter()
    rows = zip(openings, text.token_ids.tolist(), text.is_answer.tolist(), strict=True)
    for opening, token_ids, is_answer in rows:
        expected_ids, expected_marks = list(opening), [False] * len(opening)
        turn, num_sampled = (1 if opening is finished else 0), 0
        while len(expected_ids) < 64:
            # What was sampled is taken as it is; what follows an end is not free.
            token_id = token_ids[len(expected_ids)]
            num_sampled += 1
            expected_ids.append(token_id)
            expected_marks.append(CHAT.turns[turn].is_answer)
            if token_id in CHAT.stop_ids:
                end_ids[token_id] += 1
                switch = CHAT.turns[turn].switch
                expected_ids += switch
                expected_marks += [False] * len(switch)
                turn_lengths[num_sampled] += 1
                turn, num_sampled = 1 - turn, 0
            else:
                assert max_turn_tokens is None or num_sampled < max_turn_tokens
        assert token_ids == expected_ids[:64]
        assert is_answer == expected_marks[:64]
    assert turn_lengths.total() > 100
    assert len(end_ids) > 10  # other than the template's own: not read as it
    if max_turn_tokens is None:
        assert len(turn_lengths) > 8
    else:
        assert max(turn_lengths) == max_turn_tokens
        assert turn_lengths[max_turn_tokens] > turn_lengths.total() / 4  # counted anew each turn


def test_each_kind_of_turn_has_its_own_temperature(model: Any):
    script = Script(CHAT.opening, END_ID, frozenset({END_ID}), CHAT.turns)
    text = written(
        model,
        script,
        openings=[[0, 7]] * 4,
        length=64,
        temperature=[[1, 0]] * 4,  # users vary, answers are greedy
        max_turn_tokens=10,
    )
    with torch.no_grad():
        greedy_ids = model(text.token_ids).logits.argmax(-1)

    is_greedy = text.token_ids[:, 1:] == greedy_ids[:, :-1]
    is_end = text.token_ids[:, 1:] == END_ID  # of the turn's limit
    assert is_greedy[text.is_answer[:, 1:] & ~is_end].all()
    assert text.is_answer.sum() > 40
    assert not is_greedy[:, 1:10].all(dim=1).any()  # the user's first turn


def test_turns_with_nothing_between_follow_at_once(model: Any):
    script = Script((1,), 1, frozenset({1}), (Turn(is_answer=True, switch=()),))

    text = written(model, script, openings=[[1]], length=16, temperature=1, max_turn_tokens=3)

    assert text.token_ids[0, 3::3].tolist() == [1] * 5
    assert text.is_answer[0].tolist() == [False] + [True] * 15


def test_an_opening_may_be_all_there_is(model: Any):
    text = written(model, PLAIN, openings=[[0, 9, 9, 9]], length=3, temperature=1)

    assert text.token_ids.tolist() == [[0, 9, 9]]
    assert not text.is_answer.any()


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_a_draw_follows_the_softmax_of_the_logits(model: Any, temperature: float):
    num_sequences = 4000
    text = written(
        model,
        PLAIN,
        openings=[[0, 30]] * num_sequences,
        length=3,
        temperature=temperature,
    )
    with torch.no_grad():
        logits = model(torch.tensor([[0, 30]])).logits[0, -1]
    probs = torch.softmax(logits / temperature, dim=-1).tolist()

    # What is too rare for a normal distribution of its count is counted together.
    cells = [id_ if prob * num_sequences >= 20 else -1 for id_, prob in enumerate(probs)]
    expected = dict.fromkeys(cells, 0.0)
    for cell, prob in zip(cells, probs, strict=True):
        expected[cell] += prob
    assert len(expected) > 5
    assert_follows(Counter(cells[id_] for id_ in text.token_ids[:, 2].tolist()), expected)


def test_a_model_attends_as_before_between_two_positions(model: Any):
    before = model.config._attn_implementation
    items = write(
        model,
        PLAIN,
        openings=[[0]],
        length=8,
        temperatures=torch.ones(1, 1),
        generator=torch.Generator(),
    )
    for _ in range(3):
        next(items)
        assert model.config._attn_implementation == before
    items.close()
    assert not torch.is_inference_mode_enabled()
