"""Files of prompts: what is read, and what is told of a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.distill.prompts import BEGINNINGS, NO_CATEGORY, Prompt, read_prompts


def test_a_text_file_holds_a_prompt_a_line(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text("Hello!\n\n  {not JSON}  \r\nA 🙂\n", encoding="utf-8")

    assert read_prompts(path) == [Prompt("Hello!"), Prompt("{not JSON}"), Prompt("A 🙂")]


def test_a_jsonl_file_holds_an_object_a_line(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "Hello!"},
        {"turns": ["First", "Second"], "category": "writing", "question_id": 81},
        {"beginning": "Translate:", "category": "translate"},
        {"prompt": "One\u2028 and\x85 two"},  # what Python takes for line ends, JSON does not
    ]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text(text, encoding="utf-8")

    assert read_prompts(str(path)) == [
        Prompt("Hello!", NO_CATEGORY),
        Prompt("First", "writing"),
        Prompt("Translate:", "translate", is_whole=False),
        Prompt("One\u2028 and\x85 two"),
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "is not JSON: "),
        ("hello", "is not JSON: "),
        ("[1]", "is no prompt: give an object with 'prompt', 'turns' or 'beginning'"),
        ("{}", "is no prompt: "),
        ('{"prompt": ""}', "is no prompt: "),
        ('{"prompt": 3}', "is no prompt: "),
        ('{"turns": []}', "is no prompt: "),
        ('{"turns": [{"role": "user"}]}', "is no prompt: "),
        ('{"beginning": " "}', "is no prompt: "),
        ('{"prompt": "a", "category": 1}', "is no prompt: "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, told: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')

    with pytest.raises(ValueError, match=f"^line 3 of '{path}' {told}"):
        read_prompts(path)


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_text(" \n\n")

    with pytest.raises(ValueError, match=f"'{path}' is empty: write one prompt a line"):
        read_prompts(path)


@pytest.mark.parametrize("content", [None, "é".encode("latin-1")], ids=["missing", "not UTF-8"])
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes | None):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ValueError, match=f"the prompt file '{path}' cannot be read: "):
        read_prompts(path)


def test_the_beginnings_are_readable_and_go_on_without_a_space():
    prompts = read_prompts(BEGINNINGS)

    assert len(prompts) == len(set(prompts)) > 100
    assert not any(prompt.is_whole for prompt in prompts)
    assert not any(prompt.text.endswith(" ") for prompt in prompts)
    assert NO_CATEGORY not in {prompt.category for prompt in prompts}
