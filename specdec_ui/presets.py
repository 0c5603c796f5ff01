"""Example prompts by kind, with the acceptance to expect, and the recorded run shown at load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RECORDINGS = Path(__file__).parent / "recordings"
FIRST_RECORDING = RECORDINGS / "repeat.jsonl"


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt that shows what drafting gains on its kind of text."""

    kind: str
    expectation: str
    prompt: str


EXAMPLES = (
    Example(
        "Repeat",
        "the answer repeats much of the prompt, so most drafts are kept",
        "Summarise this paragraph in two sentences:\n\n"
        "The lighthouse keeper climbed the stairs every evening at six. He trimmed the wick, "
        "filled the lamp with oil, and wrote the weather into the log book. Then he sat by the "
        "window and watched the ships pass, one after another, until the last of them had gone "
        "behind the island.",
    ),
    Example(
        "Code",
        "regular text: a draft model does well, prompt lookup seldom",
        "Write a Python function that checks if a number is prime.",
    ),
    Example(
        "Facts",
        "lists that repeat their own pattern: some drafts are kept",
        "List the planets of the solar system, one a line, each with one fact about it.",
    ),
    Example(
        "Story",
        "free text is hard to guess: few drafts are kept",
        "Tell the beginning of a story about a clock that runs backwards.",
    ),
)
