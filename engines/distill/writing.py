"""A target writes many conversations at once, all of one length, so that no padding is needed.

Every sequence is at the same position in every pass. Where a turn ends, the tokens that lead to the
next one are forced, in that sequence alone, while the others write on.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from engines.distill.script import Script

_ATTENTION = "specdec_lockstep"
_FREE = -1  # in a plan of forced ids: this token is sampled


@dataclass(frozen=True, slots=True)
class Text:
    """What was written."""

    token_ids: torch.Tensor  # [num_sequences, length], int64, on the device
    is_answer: torch.Tensor  # [num_sequences, length], bool: an answer's, its end included


def num_kept_values(config: Any) -> int:
    """Return how many numbers a model keeps of each token it has read: its keys and values."""
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim)


class KeyValueStore:
    """Keys and values of every layer, in room that is taken once."""

    def __init__(self, config: Any, num_sequences: int, length: int, model: Any) -> None:
        shape = (num_sequences, config.num_key_value_heads, length, config.head_dim)
        options = {"dtype": model.dtype, "device": model.device}
        num_layers = config.num_hidden_layers
        self._keys = [torch.empty(shape, **options) for _ in range(num_layers)]
        self._values = [torch.empty(shape, **options) for _ in range(num_layers)]
        self.position = 0  # of the token being read

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one position, [num_sequences, heads, 1, head_dim], and return all there are."""
        end = self.position + 1
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, self.position : end] = key
        values[:, :, self.position : end] = value
        return keys[:, :, :end], values[:, :, :end]


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    key_value_store: KeyValueStore,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from one new token to everything before it.

    The query heads that share a key/value head become rows of it, so that its keys are read once.
    """
    keys, values = key_value_store.append(module.layer_idx, key, value)
    num_sequences, num_heads, _length, head_dim = query.shape
    rows = query.reshape(num_sequences, keys.shape[1], -1, head_dim)
    output = functional.scaled_dot_product_attention(rows, keys, values, scale=scaling)
    return output.reshape(num_sequences, 1, num_heads, head_dim), None


AttentionInterface.register(_ATTENTION, _attend)


@contextmanager
def _lockstep(model: Any) -> Generator[None, None, None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def write(
    model: Any,
    script: Script,
    *,
    openings: Sequence[Sequence[int]],
    length: int,
    temperatures: torch.Tensor,
    generator: torch.Generator,
    max_turn_tokens: int | None = None,
) -> Generator[Text | None, None, None]:
    """Yield None after every position, and the text at the end.

    Args:
        model: A causal language model of the Llama architecture.
        script: What lies between the turns.
        openings: For each sequence, ids that it begins with: `script.opening`, and perhaps a
            first turn up to where the next one is to be written.
        length: Tokens of every sequence, the opening included.
        temperatures: [num_sequences, num_turns], on the model's device; 0 is greedy.
        generator: On the model's device.
        max_turn_tokens: What is sampled of one turn at most; then it is ended.
    """
    device = model.device
    num_sequences = len(openings)
    num_turns = len(script.turns)
    longest = max(len(turn.switch) for turn in script.turns)
    switches = torch.full((num_turns, longest), _FREE, device=device)
    for row, part in zip(switches, script.turns, strict=True):
        row[: len(part.switch)] = torch.tensor(part.switch, dtype=torch.long, device=device)
    answers = torch.tensor([part.is_answer for part in script.turns], device=device)
    stop_ids = torch.tensor(sorted(script.stop_ids), device=device)
    plan = _plan(openings, length + longest, device)

    rows = torch.arange(num_sequences, device=device)
    turn = torch.zeros_like(rows)
    token_ids = torch.empty(num_sequences, length, dtype=torch.long, device=device)
    is_answer = torch.empty(num_sequences, length, dtype=torch.bool, device=device)
    store = KeyValueStore(model.config, num_sequences, length, model)
    sampled = torch.zeros_like(rows)
    num_sampled = torch.zeros_like(rows)  # of this turn
    for position in range(length):
        forced = plan[:, position]
        is_free = forced == _FREE
        token = torch.where(is_free, sampled, forced)
        is_end = torch.isin(sampled, stop_ids) & is_free
        num_sampled += is_free
        if max_turn_tokens is not None:
            is_cut = is_free & ~is_end & (num_sampled >= max_turn_tokens)
            token = torch.where(is_cut, script.end_id, token)
            is_end |= is_cut
        is_end |= ~is_free & (forced == script.end_id) & (position >= len(script.opening))
        token_ids[:, position] = token
        is_answer[:, position] = is_free & answers[turn]
        # What leads to the next turn, where this one has ended; nobody waits for the answer.
        window = plan[:, position + 1 : position + 1 + longest]
        window.copy_(torch.where((is_end & is_free)[:, None], switches[turn], window))
        turn = (turn + is_end) % num_turns
        num_sampled *= ~is_end
        if position + 1 < length:
            store.position = position
            logits = _next_logits(model, token, store)
            sampled = _sample(logits, temperatures[rows, turn], generator)
        yield None
    yield Text(token_ids, is_answer)


def _plan(openings: Sequence[Sequence[int]], length: int, device: torch.device) -> torch.Tensor:
    """Return [num_sequences, length] forced ids: the openings, then whatever is sampled."""
    plan = torch.full((len(openings), length), _FREE)
    for row, opening in zip(plan, openings, strict=True):
        row[: len(opening)] = torch.tensor(opening)
    return plan.to(device)


def _next_logits(model: Any, token: torch.Tensor, store: KeyValueStore) -> torch.Tensor:
    position_ids = torch.full((1, 1), store.position, device=token.device)
    with _lockstep(model):
        hidden = model.model(
            token[:, None],
            position_ids=position_ids,
            use_cache=False,
            key_value_store=store,
        ).last_hidden_state
    logits: torch.Tensor = model.lm_head(hidden[:, 0])
    return logits


def _sample(
    logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Return one id a row: the largest logit after noise in proportion to the temperature.

    Gumbel noise makes that a draw from the softmax of logits / temperature; none makes it greedy.
    """
    logits = logits.float()
    noise = torch.empty_like(logits).exponential_(generator=generator)
    noise = noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_().neg_()
    return torch.argmax(logits.addcmul_(noise, temperatures[:, None]), dim=-1)
