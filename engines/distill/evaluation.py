"""Measures a draft on prompts: agreement with the target, and what a loop would accept.

The target answers every prompt, greedily and at temperature 1; both models then read its answers
once, and the loop is replayed along them for each number of draft tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch.nn import functional

from engines.distill.acceptance import Acceptance, replay
from engines.distill.conversations import opening_of
from engines.distill.prompts import Prompt
from engines.distill.script import Script
from engines.distill.writing import Text, num_kept_values, write
from engines.transformers_backend.device import free_memory_bytes

Sampling = Literal["greedy", "temperature 1"]
SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)
NUMS_DRAFT_TOKENS = (2, 4, 8)
ANSWER_TOKENS = 128
MAX_PROMPT_TOKENS = 600
MAX_SEQUENCES_AT_ONCE = {"cuda": 256, "cpu": 32}
MEMORY_SHARE = 0.5  # of what is free, for writing answers
ALL = "all"


@dataclass(slots=True)
class CategoryResult:
    """One category's figures under one kind of sampling; sums, so that they can be added up."""

    num_prompts: int = 0
    num_tokens: int = 0  # of the target's answers
    num_agreed: float = 0.0  # greedy: ids that are equal; at temperature 1: chances of acceptance
    acceptances: dict[int, Acceptance] = field(
        default_factory=lambda: dict.fromkeys(NUMS_DRAFT_TOKENS, Acceptance())
    )

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_prompts": self.num_prompts,
            "num_tokens": self.num_tokens,
            "agreement": self.num_agreed / self.num_tokens if self.num_tokens else None,
            "num_draft_tokens": {
                str(number): {
                    "acceptance_rate": part.acceptance_rate,
                    "mean_acceptance_length": part.mean_acceptance_length,
                }
                for number, part in self.acceptances.items()
                if part.num_drafts
            },
        }


@torch.inference_mode()
def evaluate(
    target: Any,
    draft: Any,
    tokenizer: Any,
    script: Script,
    prompts: Sequence[Prompt],
    *,
    seed: int = 0,
) -> Generator[float | dict[str, Any], None, None]:
    """Yield the share that is done, and the results at the end.

    Args:
        target: A Llama of transformers.
        draft: Likewise, on the same device.
        tokenizer: Of both.
        script: The target's.
        prompts: Those of more than 600 tokens are left out, and counted.
        seed: Of the answers at temperature 1.

    Returns:
        By way of the last item: `num_left_out`, and for each kind of sampling, for each category
        and for all together, what `CategoryResult.to_dict` says.

    Raises:
        ValueError: No prompt is short enough.
    """
    empty = opening_of(tokenizer, script, Prompt(""))
    openings = [opening_of(tokenizer, script, prompt) for prompt in prompts]
    kept = [
        (prompt, opening)
        for prompt, opening in zip(prompts, openings, strict=True)
        if len(opening) - len(empty) <= MAX_PROMPT_TOKENS
    ]
    if not kept:
        raise ValueError(f"no prompt to evaluate on has {MAX_PROMPT_TOKENS} tokens or fewer")
    kept.sort(key=lambda item: len(item[1]))  # what is written together is of about one length
    size = _num_at_once(target, len(kept[-1][1]) + ANSWER_TOKENS)
    groups = [kept[start : start + size] for start in range(0, len(kept), size)]
    results: dict[str, Any] = {"num_left_out": len(prompts) - len(kept)}
    for index, sampling in enumerate(SAMPLINGS):
        categories: dict[str, CategoryResult] = {}
        for number, group in enumerate(groups):
            generator = torch.Generator(target.device).manual_seed(seed + number)
            num_done = index * len(groups) + number
            openings = [opening for _, opening in group]
            answers: list[list[int]] = []
            with closing(_answers(target, script, openings, sampling, generator)) as items:
                for item in items:
                    if isinstance(item, float):
                        yield (num_done + item) / (len(SAMPLINGS) * len(groups))
                    else:
                        answers = item
            for (prompt, opening), answer in zip(group, answers, strict=True):
                names = dict.fromkeys((prompt.category, ALL))
                parts = [categories.setdefault(name, CategoryResult()) for name in names]
                _judge(target, draft, opening, answer, sampling, generator, parts)
        results[sampling] = {name: result.to_dict() for name, result in categories.items()}
    yield results


def _num_at_once(target: Any, length: int) -> int:
    """Return how many texts of so many tokens are written together: what free memory allows."""
    num_values = length * num_kept_values(target.config) + 3 * target.config.vocab_size
    room = free_memory_bytes(target.device) * MEMORY_SHARE
    fitting = int(room / (num_values * target.dtype.itemsize))
    return max(1, min(MAX_SEQUENCES_AT_ONCE[target.device.type], fitting))


def _answers(
    target: Any,
    script: Script,
    openings: Sequence[list[int]],
    sampling: Sampling,
    generator: torch.Generator,
) -> Generator[float | list[list[int]], None, None]:
    """Yield the share that is written, and at the end the ids of each opening's answer."""
    length = max(map(len, openings)) + ANSWER_TOKENS
    temperatures = torch.full(
        (len(openings), len(script.turns)),
        0.0 if sampling == "greedy" else 1.0,
        device=target.device,
    )
    texts = write(
        target,
        script,
        openings=openings,
        length=length,
        temperatures=temperatures,
        generator=generator,
    )
    for position, item in enumerate(texts, start=1):
        if isinstance(item, Text):
            yield [
                _answer(token_ids, len(opening), script.stop_ids)
                for token_ids, opening in zip(item.token_ids.tolist(), openings, strict=True)
            ]
        else:
            yield position / length


def _answer(token_ids: list[int], start: int, stop_ids: frozenset[int]) -> list[int]:
    answer = token_ids[start : start + ANSWER_TOKENS]
    end = next((index for index, id_ in enumerate(answer, start=1) if id_ in stop_ids), None)
    return answer[:end]


def _judge(
    target: Any,
    draft: Any,
    opening: list[int],
    answer: list[int],
    sampling: Sampling,
    generator: torch.Generator,
    results: Sequence[CategoryResult],
) -> None:
    """Add one answer of the target's to its category and to all."""
    ids = torch.tensor([opening + answer], device=target.device)
    rows = slice(len(opening) - 1, -1)
    expected = ids[0, len(opening) :]
    draft_logits = _logits(draft, ids, rows)
    if sampling == "greedy":
        is_match = draft_logits.argmax(-1) == expected
        num_agreed = float(is_match.sum())
    else:
        column = expected[:, None]
        draft_probs = functional.softmax(draft_logits, dim=-1)
        target_probs = functional.softmax(_logits(target, ids, rows), dim=-1)
        chances = (draft_probs.gather(1, column) / target_probs.gather(1, column)).clamp(max=1)[
            :, 0
        ]
        uniforms = torch.rand(chances.shape, generator=generator, device=chances.device)
        is_match = uniforms < chances
        num_agreed = float(torch.minimum(draft_probs, target_probs).sum())
    matches = is_match.tolist()
    for result in results:
        result.num_prompts += 1
        result.num_tokens += len(matches)
        result.num_agreed += num_agreed
        for number in NUMS_DRAFT_TOKENS:
            result.acceptances[number] += replay(matches, number)


def _logits(model: Any, ids: torch.Tensor, rows: slice) -> torch.Tensor:
    hidden = model.model(ids, use_cache=False).last_hidden_state
    logits: torch.Tensor = model.lm_head(hidden[0, rows]).float()
    return logits
