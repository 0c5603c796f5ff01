"""Reads a file of prompts: a prompt a line, or JSON Lines as benchmarks publish them.

`beginnings.jsonl` beside this holds the first words of what people ask of an assistant. Left to
itself, a small target asks about little else than projects and plans.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NO_CATEGORY = "all"
BEGINNINGS = Path(__file__).parent / "beginnings.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user says first, and what kind of question it is."""

    text: str
    category: str = NO_CATEGORY
    is_whole: bool = True  # False: a beginning, which the target continues


def read_prompts(path: str | Path) -> list[Prompt]:
    """Return the prompts of a file.

    In a `.jsonl` file every line is an object with `prompt`, with `turns` of which the first
    counts, or with `beginning`, and perhaps a `category`. Any other file holds one prompt a line.

    Raises:
        ValueError: It cannot be read, or holds no prompt; the text names the line.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, RuntimeError, UnicodeDecodeError) as exc:
        raise ValueError(f"the prompt file '{path}' cannot be read: {exc}") from exc
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if str(path).endswith(".jsonl"):
        prompts = [_parse(line, f"line {number} of '{path}'") for number, line in numbered]
    else:
        prompts = [Prompt(line.strip()) for _, line in numbered]
    if not prompts:
        raise ValueError(f"the prompt file '{path}' is empty: write one prompt a line")
    return prompts


def _parse(line: str, place: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as exc:
        raise ValueError(f"{place} is not JSON: {exc}") from exc
    remedy = "give an object with 'prompt', 'turns' or 'beginning', and 'category' if you like"
    if not isinstance(value, dict):
        raise ValueError(f"{place} is no prompt: {remedy}")
    turns = value.get("turns")
    is_whole = "beginning" not in value
    text = value.get("prompt") if is_whole else value["beginning"]
    if isinstance(turns, list) and turns:
        text = turns[0]
    category = value.get("category", NO_CATEGORY)
    if not isinstance(text, str) or not text.strip() or not isinstance(category, str):
        raise ValueError(f"{place} is no prompt: {remedy}")
    return Prompt(text, category, is_whole)
