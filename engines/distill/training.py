"""Teaches a student the target's next-token distributions, on text that the target wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from engines.distill.acceptance import Acceptance, replay, total
from engines.distill.student import trained_parameters

LEARNING_RATE = 3e-3
WARM_UP_SHARE = 0.02  # of the training time
FINAL_LEARNING_RATE_SHARE = 0.02
WEIGHT_DECAY = 0.01
GRADIENT_NORM = 1.0
# From this share of the training on, the overlap of both distributions counts in the loss too.
OVERLAP_FROM, OVERLAP_WEIGHT = 0.5, 0.7
VALIDATION_DRAFT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Validation:
    """How a student does on text that it was not trained on."""

    agreement: float  # share of the target's greedy tokens that are the student's too
    overlap: float  # mean of Σ min(target, student): the acceptance rate at temperature 1
    acceptance: Acceptance  # greedy, along the text


def learning_rate(progress: float) -> float:
    """Return the learning rate at a share of the training, 0 to 1: a short rise, then a cosine."""
    if progress < WARM_UP_SHARE:
        return LEARNING_RATE * (progress + 0.001) / (WARM_UP_SHARE + 0.001)
    remaining = (progress - WARM_UP_SHARE) / (1 - WARM_UP_SHARE)
    cosine = (1 + np.cos(np.pi * min(remaining, 1.0))) / 2
    return float(
        LEARNING_RATE * (FINAL_LEARNING_RATE_SHARE + (1 - FINAL_LEARNING_RATE_SHARE) * cosine)
    )


def overlap_weight(progress: float) -> float:
    """Return how much the overlap counts in the loss at a share of the training, 0 to 1."""
    ramp = (progress - OVERLAP_FROM) / (1 - OVERLAP_FROM)
    return OVERLAP_WEIGHT * min(max(ramp, 0.0), 1.0)


def distillation_loss(
    draft_logits: torch.Tensor, target_logits: torch.Tensor, weight: float
) -> torch.Tensor:
    """Return the sum over positions of (1 - weight) · KL(target ‖ draft) + weight · (1 - overlap).

    The overlap Σ min(target, draft) is the chance that a draft token is accepted at temperature 1.

    Args:
        draft_logits: [num_positions, vocab_size], float32.
        target_logits: Likewise.
        weight: Of the overlap, 0 to 1.
    """
    draft_log_probs = functional.log_softmax(draft_logits, dim=-1)
    target_log_probs = functional.log_softmax(target_logits, dim=-1)
    loss = (1 - weight) * functional.kl_div(
        draft_log_probs, target_log_probs, reduction="sum", log_target=True
    )
    if weight > 0:
        overlap = torch.minimum(draft_log_probs, target_log_probs).exp().sum()
        loss = loss + weight * (len(draft_logits) - overlap)
    return loss


class Trainer:
    """One optimisation of one student: a step a batch, in bfloat16 where the device is CUDA."""

    def __init__(self, target: Any, student: Any, *, num_positions: int) -> None:
        """Prepare to train a student.

        Args:
            target: What it learns from.
            student: As `make_student` returns it.
            num_positions: Whose logits over the whole vocabulary are held together.
        """
        self._num_positions = num_positions
        self.target = target
        self.student = student
        self.parameters = trained_parameters(student)
        self.device: torch.device = target.device
        # Muon for the matrices: it learnt more in the same time than AdamW did.
        matrices = [weight for weight in self.parameters.values() if weight.ndim == 2]
        others = [weight for weight in self.parameters.values() if weight.ndim != 2]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices,
                lr=LEARNING_RATE,
                weight_decay=WEIGHT_DECAY,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what a resumed training needs besides the weights."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def step(
        self, token_ids: torch.Tensor, is_answer: torch.Tensor, progress: float
    ) -> torch.Tensor:
        """Learn from one batch and return the mean loss a position, still on the device.

        Args:
            token_ids: [num_sequences, length].
            is_answer: Likewise; only what predicts an answer's token is learnt.
            progress: Share of the training that is over, 0 to 1.
        """
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress)
        student_hidden, target_hidden = self._hidden(token_ids, _before(is_answer))
        # The head is frozen, so its part of the backward pass ends at the hidden states: logits
        # are made and dropped a few positions at a time.
        leaf = student_hidden.detach().requires_grad_()
        loss = torch.zeros((), device=self.device)
        for draft_part, target_part in self._parts(leaf, target_hidden):
            part = distillation_loss(
                self._logits(draft_part), self._logits(target_part), overlap_weight(progress)
            ) / max(len(leaf), 1)
            torch.autograd.backward(part)
            loss += part.detach()
        torch.autograd.backward(student_hidden, leaf.grad)
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), GRADIENT_NORM)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    @torch.no_grad()
    def validate(self, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Validation:
        """Compare the student with the target on text kept apart, its answers only."""
        num_positions, num_agreed, overlap = 0, 0, 0.0
        parts = []
        for token_ids, is_answer in batches:
            is_agreed = torch.zeros_like(is_answer)
            rows = _before(is_answer)
            agreed = []
            for draft_part, target_part in self._parts(*self._hidden(token_ids, rows)):
                draft_logits, target_logits = self._logits(draft_part), self._logits(target_part)
                agreed.append(draft_logits.argmax(-1) == target_logits.argmax(-1))
                draft_probs = functional.softmax(draft_logits, dim=-1)
                target_probs = functional.softmax(target_logits, dim=-1)
                overlap += float(torch.minimum(draft_probs, target_probs).sum())
            is_agreed[rows] = torch.cat(agreed)
            num_positions += int(rows.sum())
            num_agreed += int(is_agreed.sum())
            parts += [
                replay(is_agreed[row][rows[row]].tolist(), VALIDATION_DRAFT_TOKENS)
                for row in range(len(rows))
                if rows[row].any()
            ]
        return Validation(num_agreed / num_positions, overlap / num_positions, total(parts))

    def _hidden(
        self, token_ids: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last hidden states of student and target at `rows`, the latter's fixed."""
        with torch.no_grad():
            target = self.target.model(token_ids, use_cache=False).last_hidden_state[rows]
        with self._autocast():
            student = self.student.model(token_ids, use_cache=False).last_hidden_state[rows]
        return student, target

    def _parts(
        self, student_hidden: torch.Tensor, target_hidden: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return both a few positions at a time, as many as have their logits held together."""
        return zip(
            torch.split(student_hidden, self._num_positions),
            torch.split(target_hidden, self._num_positions),
            strict=True,
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [num_positions, vocab_size] of either model: they share a head."""
        with self._autocast():
            logits: torch.Tensor = self.target.lm_head(hidden)
        return logits.float()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()


def _before(is_answer: torch.Tensor) -> torch.Tensor:
    """Return the positions [num_sequences, length] whose next token belongs to an answer."""
    return functional.pad(is_answer[:, 1:], (0, 1), value=False)
