"""What lies between the turns, by the target's chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.base import Engine
from engines.checkpoints import built_path, parse_reference
from engines.distill.conversations import opening_of
from engines.distill.prompts import Prompt
from engines.distill.script import Script, Turn, script_of
from engines.store import EngineStore
from engines.tokenizer import encode_prompt
from tests.engines.distill.conftest import script_in

PROMPTS = ["Hello!", "Two\nlines, one 🙂", "1 + 1 =", "x" * 40]
PLAIN = Script((0,), 1, frozenset({1}), (Turn(is_answer=True, switch=(0,)),))


def conversation(tokenizer: Any, *contents: str) -> tuple[int, ...]:
    """Return the template's ids of turns that alternate, up to where the next one is written."""
    messages = [
        {"role": role, "content": content}
        for role, content in zip(["user", "assistant"] * len(contents), contents, strict=False)
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_opening_is_what_the_chat_template_makes_of_a_prompt(chat_target: Path, prompt: str):
    tokenizer, script = script_in(chat_target)

    expected = encode_prompt(tokenizer, prompt, chat_template=True)

    assert tuple(opening_of(tokenizer, script, Prompt(prompt))) == expected


def test_a_conversation_is_what_the_chat_template_makes_of_its_turns(chat_target: Path):
    tokenizer, script = script_in(chat_target)
    user, answer = script.turns
    first, second, third = (
        tuple(tokenizer(text, add_special_tokens=False).input_ids)
        for text in ("Hello!", "Hi.", "Bye.")
    )

    assert (user.is_answer, answer.is_answer) == (False, True)
    assert script.stop_ids == {script.end_id} == {tokenizer.eos_token_id}
    assert (
        *(*script.opening, *first, script.end_id, *user.switch),
        *(*second, script.end_id, *answer.switch),
        *(*third, script.end_id, *user.switch),
    ) == conversation(tokenizer, "Hello!", "Hi.", "Bye.")


@pytest.mark.bundled
@pytest.mark.usefixtures("bundled_engine")
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_bundled_target_talks_as_its_own_chat_template_says(
    bundled_engine: Engine, prompt: str
):
    path = built_path(parse_reference("bundled"), EngineStore())
    tokenizer, script = script_in(path)

    assert tuple(opening_of(tokenizer, script, Prompt(prompt))) == bundled_engine.encode(
        prompt, chat_template=True
    )
    assert tokenizer.decode(script.turns[1].switch) == "\n<|im_start|>user\n"


@pytest.mark.parametrize("mark", ["<|im_end|>", "<|im_start|>"])
def test_a_mark_of_the_template_is_text_where_a_prompt_says_it(chat_target: Path, mark: str):
    tokenizer, script = script_in(chat_target)
    mark_id = tokenizer.convert_tokens_to_ids(mark)
    plain = opening_of(tokenizer, script, Prompt("What is it?"))

    for is_whole in (True, False):
        prompt = Prompt(f"What is {mark} for?", is_whole=is_whole)
        opening = opening_of(tokenizer, script, prompt)
        frame = plain if is_whole else [*script.opening]
        assert opening.count(mark_id) == frame.count(mark_id)
        assert prompt.text in tokenizer.decode(opening)


def test_a_beginning_is_left_for_the_target_to_continue(chat_target: Path):
    tokenizer, script = script_in(chat_target)

    opening = opening_of(tokenizer, script, Prompt("Translate", is_whole=False))

    assert opening == [*script.opening, *tokenizer("Translate").input_ids]


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",  # no token ends a turn
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %}[/INST]"
        "{% else %}</s>{% endif %}{% endfor %}",  # the user's turns end otherwise
        "{{ messages[0]['content'] }}</s>",  # not of several turns
        "{{ raise_exception('one turn only') }}",
    ],
    ids=["none", "no end", "two ends", "one turn", "refuses"],
)
def test_a_target_whose_template_gives_no_turns_writes_plain_text(
    plain_target: Path, template: str | None
):
    tokenizer, _ = script_in(plain_target)
    tokenizer.chat_template = template

    assert script_of(tokenizer, frozenset({1})) == PLAIN
    assert opening_of(tokenizer, PLAIN, Prompt("ab")) == [0, *tokenizer("ab").input_ids]


def test_a_token_that_both_begins_and_ends_a_text_is_not_said_twice(plain_target: Path):
    tokenizer, _ = script_in(plain_target)
    tokenizer.bos_token = None

    script = script_of(tokenizer, frozenset({1}))

    assert (script.opening, script.end_id, script.turns[0].switch) == ((1,), 1, ())


@pytest.mark.parametrize(("eos", "stop_ids"), [(None, {1}), ("</s>", set())])
def test_a_target_that_cannot_begin_or_end_a_text_is_refused(
    plain_target: Path, eos: str | None, stop_ids: set[int]
):
    tokenizer, _ = script_in(plain_target)
    tokenizer.bos_token = None
    tokenizer.eos_token = eos

    with pytest.raises(ValueError, match="cannot write text by itself: its tokenizer names no"):
        script_of(tokenizer, frozenset(stop_ids))
