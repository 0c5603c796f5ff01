"""The parts of a conversation that nobody writes: what opens it, and what lies between turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

# Unlikely in a template, and untouched by one that trims or capitalises.
_CONTENTS = ("0first0", "1second1", "2third2")


@dataclass(frozen=True, slots=True)
class Turn:
    """One speaker's turn."""

    is_answer: bool  # the target's own part, which a draft is to guess
    switch: tuple[int, ...]  # token ids behind the token that ends the turn, up to the next one


@dataclass(frozen=True, slots=True)
class Script:
    """How a target talks to itself: turns that follow each other in a circle."""

    opening: tuple[int, ...]  # token ids before the first turn's text
    end_id: int  # the token that ends a turn in the template
    stop_ids: frozenset[int]  # those that the target may end a turn with, `end_id` among them
    turns: tuple[Turn, ...]


def script_of(tokenizer: Any, stop_ids: frozenset[int]) -> Script:
    """Return how a target talks to itself, by its chat template.

    A target without one, or whose template ends a turn by nothing that can be sampled, writes
    plain text: one turn that is all answer, over and over.

    Args:
        tokenizer: The target's.
        stop_ids: Ids that end its answers.

    Raises:
        ValueError: The target has no token that ends or begins a text.
    """
    pieces = _pieces(tokenizer)
    if pieces is not None:
        opening, after_user, after_answer = pieces
        ends = {after_user[:1], after_answer[:1]}
        if len(ends) == 1 and after_user and after_user[0] in stop_ids:
            return Script(
                opening=opening,
                end_id=after_user[0],
                stop_ids=stop_ids,
                turns=(
                    Turn(is_answer=False, switch=after_user[1:]),
                    Turn(is_answer=True, switch=after_answer[1:]),
                ),
            )
    begin_id = tokenizer.bos_token_id
    if begin_id is None:
        begin_id = tokenizer.eos_token_id
    if begin_id is None or not stop_ids:
        raise ValueError(
            "the target cannot write text by itself: its tokenizer names no token that begins or "
            "ends one"
        )
    end_id = min(stop_ids)
    switch = () if begin_id == end_id else (begin_id,)
    return Script((begin_id,), end_id, stop_ids, (Turn(is_answer=True, switch=switch),))


def _pieces(tokenizer: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return the template's ids before the user's text, behind it, and behind the answer."""
    if tokenizer.chat_template is None:
        return None
    roles = ("user", "assistant", "user")
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, _CONTENTS, strict=True)
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except TemplateError:
        return None
    texts = []
    for content in _CONTENTS:
        before, found, text = text.partition(content)
        if not found:
            return None
        texts.append(before)
    return tuple(tuple(tokenizer(part, add_special_tokens=False).input_ids) for part in texts)
