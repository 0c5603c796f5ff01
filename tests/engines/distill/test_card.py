"""The command in a card makes the same draft again."""

from __future__ import annotations

from typing import Any

import pytest

from engines.distill import DistillSpec
from engines.distill.card import command_of


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"target": "org/name", "seed": 5}, ""),
        ({"layers": (0, 3)}, " --take 0,3"),
        ({"sequence_length": 64}, " --sequence-length 64"),
        ({"max_tokens": 1000}, " --max-tokens 1000"),
        ({"prompts": "/home/me/own.txt"}, " --prompts own.txt"),
        ({"evaluation": "/home/me/spec.jsonl"}, " --evaluate spec.jsonl"),
    ],
    ids=str,
)
def test_a_command_names_what_makes_the_draft_and_no_home(changes: dict[str, Any], words: str):
    spec = DistillSpec("/home/me/draft", num_layers=2, minutes=2.5, **changes)

    command = command_of(spec)

    assert command.startswith(f"python -m engines distill --target {spec.target} --layers 2")
    assert f" --minutes 2.5 --seed {spec.seed}" in command
    assert words in command
    assert command.endswith(" --output draft")
    assert command.count("--") == 5 + bool(words)
    assert "/home" not in command
