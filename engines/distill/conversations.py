"""Which conversations a distillation writes: how each begins, and how freely it is continued."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engines.distill.prompts import BEGINNINGS, Prompt, read_prompts
from engines.distill.script import Script
from engines.distill.spec import part_seed
from engines.distill.text_set import (
    MAX_VALIDATION_SEQUENCES,
    VALIDATION_SHARE,
    num_kept_apart,
)
from engines.distill.writing import Text, write

USER_TEMPERATURES = (0.7, 1.0)  # what users say must vary, or all conversations would be one
GREEDY_SHARE = 0.6  # of the conversations whose answers are greedy; the others' go up to 1
MAX_TURN_TOKENS = 200  # a small target's long answers say the same again and again
MAX_OPENING_SHARE = 0.5  # of a sequence that an opening may take
MAX_TURN_SHARE = 1 / 3  # likewise a turn, so that a short sequence has room for an answer


def opening_of(tokenizer: Any, script: Script, prompt: Prompt) -> list[int]:
    """Return the ids of a conversation up to where the target goes on: mostly with the answer."""
    # A token that ends a turn is text where a user has typed it.
    content = tokenizer(prompt.text, add_special_tokens=False, split_special_tokens=True).input_ids
    first = script.turns[0]
    if first.is_answer or not prompt.is_whole:  # plain text, or a beginning: it is continued
        return [*script.opening, *content]
    return [*script.opening, *content, script.end_id, *first.switch]


@dataclass(frozen=True, slots=True)
class Conversations:
    """An endless number of them, in chunks."""

    script: Script
    openings: list[list[int]]  # ids, taken in turn
    num_left_out: int  # prompts that are too long
    apart: list[list[int]]  # likewise, of the conversations that are not trained on; none: the same
    every: int  # one conversation in so many has such an opening; the others begin as they like
    length: int  # tokens of each

    @classmethod
    def prepare(
        cls, tokenizer: Any, script: Script, prompts: str | None, *, length: int
    ) -> Conversations:
        """Read the prompts that conversations begin with.

        Args:
            tokenizer: The target's.
            script: Likewise.
            prompts: A file. None: every other conversation begins with words of `BEGINNINGS`, or
                none does where the target writes plain text.
            length: Tokens of a conversation.

        Raises:
            ValueError: The file cannot be read, or all of its prompts are too long.
        """
        if prompts is None and script.turns[0].is_answer:
            return cls(script, [list(script.opening)], 0, [], every=1, length=length)
        file = BEGINNINGS if prompts is None else Path(prompts)
        openings = [opening_of(tokenizer, script, prompt) for prompt in read_prompts(file)]
        longest = int(length * MAX_OPENING_SHARE)
        kept = [opening for opening in openings if len(opening) <= longest]
        if not kept:
            raise ValueError(
                f"every prompt in '{file}' has more than {longest} tokens: use shorter ones, or a "
                "longer sequence_length"
            )
        num_left_out = len(openings) - len(kept)
        if prompts is None:
            return cls(script, kept, num_left_out, [], every=2, length=length)
        # Whole prompts, greedily answered, would be the same conversation in both parts.
        kept = [list(opening) for opening in dict.fromkeys(map(tuple, kept))]
        num_apart = min(MAX_VALIDATION_SEQUENCES, len(kept) // VALIDATION_SHARE)
        return cls(script, kept[num_apart:], num_left_out, kept[:num_apart], every=1, length=length)

    def write_chunk(
        self, model: Any, number: int, *, num_sequences: int, seed: int
    ) -> Generator[Text | None, None, None]:
        """Write one chunk: the same for the same target, size, number and seed on like devices."""
        device = model.device
        generator = torch.Generator(device).manual_seed(part_seed(seed, number))
        uniforms = torch.rand(3, num_sequences, 1, generator=generator, device=device)
        low, high = USER_TEMPERATURES
        user = low + (high - low) * uniforms[0]
        answer = torch.where(uniforms[1] < GREEDY_SHARE, torch.zeros_like(user), uniforms[2])
        return write(
            model,
            self.script,
            openings=[
                self.apart[row % len(self.apart)]
                if self.apart and number == 0 and row < num_kept_apart(num_sequences)
                else self._opening(number * num_sequences + row)
                for row in range(num_sequences)
            ],
            length=self.length,
            temperatures=torch.cat(
                [answer if turn.is_answer else user for turn in self.script.turns], dim=1
            ),
            generator=generator,
            max_turn_tokens=min(MAX_TURN_TOKENS, int(self.length * MAX_TURN_SHARE)),
        )

    def _opening(self, index: int) -> list[int]:
        if index % self.every:
            return list(self.script.opening)
        return self.openings[index // self.every % len(self.openings)]
