"""The loss, the schedule, and one step's gradients against one pass over everything."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.distill.acceptance import replay, total
from engines.distill.student import make_student, trained_parameters
from engines.distill.text_set import Batch
from engines.distill.training import (
    LEARNING_RATE,
    OVERLAP_WEIGHT,
    Trainer,
    distillation_loss,
    learning_rate,
    overlap_weight,
)
from tests.engines.distill.conftest import float32_model

LAYERS = (0, 1, 3)


@pytest.fixture(scope="module")
def target(plain_target: Path) -> Any:
    return float32_model(plain_target)


def trainer_of(target: Any, layers: Sequence[int] = LAYERS, *, num_positions: int = 64) -> Trainer:
    return Trainer(target, make_student(target, layers), num_positions=num_positions)


def batch(*, num_sequences: int = 4, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, 258, (num_sequences, 20), generator=generator)
    is_answer = torch.rand(num_sequences, 20, generator=generator) < 0.6
    return token_ids, is_answer


def rows_before(is_answer: torch.Tensor) -> list[tuple[int, int]]:
    """Return sequence and position of what predicts an answer's token."""
    return [(row, position - 1) for row, position in is_answer.nonzero().tolist() if position > 0]


def logits_before(model: Any, token_ids: torch.Tensor, is_answer: torch.Tensor) -> torch.Tensor:
    logits = model(token_ids).logits
    return torch.stack([logits[row, position] for row, position in rows_before(is_answer)])


# -- loss and schedule


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_loss_is_divergence_and_missed_overlap_by_weight(weight: float):
    draft_logits, target_logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))

    expected = 0.0
    for draft, target in zip(draft_logits.tolist(), target_logits.tolist(), strict=True):
        q = [exp(value) / sum(map(exp, draft)) for value in draft]
        p = [exp(value) / sum(map(exp, target)) for value in target]
        divergence = sum(b * log(b / a) for a, b in zip(q, p, strict=True))
        overlap = sum(map(min, p, q))
        expected += (1 - weight) * divergence + weight * (1 - overlap)

    loss = float(distillation_loss(draft_logits, target_logits, weight))
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_equal_logits_cost_nothing(weight: float):
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(2)) * 3

    assert float(distillation_loss(logits, logits + 1, weight)) == pytest.approx(0, abs=1e-5)


def test_the_learning_rate_rises_briefly_and_falls_to_its_end():
    rates = [learning_rate(step / 1000) for step in range(1001)]
    peak = rates.index(max(rates))

    assert 0 < rates[0] < LEARNING_RATE / 10
    assert peak == 20
    assert rates[peak] == pytest.approx(LEARNING_RATE)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(LEARNING_RATE * 0.02)
    assert learning_rate(1.2) == rates[-1]


def test_the_overlap_counts_from_the_middle_on():
    weights = [overlap_weight(step / 10) for step in range(11)]

    assert weights[:6] == [0.0] * 6
    assert weights[8] == pytest.approx(0.6 * OVERLAP_WEIGHT)
    assert weights[-1] == OVERLAP_WEIGHT == overlap_weight(1.5)


# -- steps


@pytest.mark.parametrize("progress", [0.1, 0.9])
@pytest.mark.parametrize("num_positions", [1, 7, 4096])
def test_a_step_has_the_gradients_of_one_pass_over_everything(
    target: Any, progress: float, num_positions: int
):
    token_ids, is_answer = batch()
    reference = make_student(target, LAYERS)
    with torch.no_grad():
        target_logits = logits_before(target, token_ids, is_answer)
    draft_logits = logits_before(reference, token_ids, is_answer)
    loss = distillation_loss(draft_logits, target_logits, overlap_weight(progress))
    loss = loss / len(rows_before(is_answer))
    torch.autograd.backward(loss)

    trainer = trainer_of(target, num_positions=num_positions)
    gradients = {}

    def keep(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradients[name] = parameter.grad.clone()

    for name, parameter in trainer.parameters.items():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: keep(name, parameter)
        )
    result = trainer.step(token_ids, is_answer, progress)

    assert float(result) == pytest.approx(float(loss.detach()), rel=1e-4)
    expected = trained_parameters(reference)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name].grad, rtol=1e-3, atol=1e-5)
        assert gradient.abs().max() > 0


def test_a_step_moves_every_layer_by_the_learning_rate_and_nothing_else(target: Any):
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    trainer = trainer_of(target)
    start = {name: weight.detach().clone() for name, weight in trainer.parameters.items()}

    moved = []
    for step, progress in enumerate((0.0, 0.5, 1.0)):
        earlier = {name: weight.detach().clone() for name, weight in trainer.parameters.items()}
        trainer.step(*batch(seed=step), progress=progress)
        norm = trainer.parameters["model.norm.weight"].detach()
        moved.append(float((norm - earlier["model.norm.weight"]).abs().max()))

    for name, weight in target.state_dict().items():  # its embeddings and head are the student's
        assert torch.equal(weight, before[name]), name
    for name, weight in trainer.parameters.items():
        assert not torch.equal(weight, start[name]), name
        assert weight.grad is None
    assert moved[0] == pytest.approx(learning_rate(0.0), rel=0.1)  # AdamW's first step
    assert moved[1] > 5 * moved[0]
    assert moved[2] < moved[1] / 5


def test_steps_on_one_batch_lower_its_loss(target: Any):
    trainer = trainer_of(target)
    losses = [float(trainer.step(*batch(), progress=0.1)) for _ in range(20)]

    assert losses[-1] < losses[0] / 2


def test_a_batch_without_an_answer_teaches_nothing_and_breaks_nothing(target: Any):
    trainer = trainer_of(target)
    token_ids, is_answer = batch()

    loss = trainer.step(token_ids, torch.zeros_like(is_answer), 0.5)

    assert float(loss) == 0
    assert all(weight.isfinite().all() for weight in trainer.parameters.values())


def test_a_resumed_training_goes_on_as_if_it_had_not_been_interrupted(target: Any):
    whole = trainer_of(target)
    for step in range(4):
        whole.step(*batch(seed=step), progress=step / 4)

    first = trainer_of(target)
    for step in range(2):
        first.step(*batch(seed=step), progress=step / 4)
    second = trainer_of(target)
    second.student.load_state_dict(first.parameters, strict=False)
    second.load_state_dict(first.state_dict())
    for step in range(2, 4):
        second.step(*batch(seed=step), progress=step / 4)

    for name, weight in second.parameters.items():
        torch.testing.assert_close(weight, whole.parameters[name])


# -- validation


def test_validation_compares_answers_only(target: Any):
    trainer = trainer_of(target, num_positions=7)
    batches = [batch(seed=1), batch(num_sequences=2, seed=2)]

    result = trainer.validate(iter(batches))

    agreed, overlaps, parts = [], [], []
    for token_ids, is_answer in batches:
        with torch.no_grad():
            draft, own = trainer.student(token_ids).logits, target(token_ids).logits
        for row in range(len(token_ids)):
            positions = [position for at, position in rows_before(is_answer) if at == row]
            equal = (draft.argmax(-1) == own.argmax(-1))[row, positions]
            overlap = torch.minimum(draft.softmax(-1), own.softmax(-1)).sum(-1)[row, positions]
            agreed += equal.tolist()
            overlaps += overlap.tolist()
            parts.append(replay(equal.tolist(), 4))
    assert 0 < sum(agreed) < len(agreed)
    assert result.agreement == sum(agreed) / len(agreed)
    assert result.overlap == pytest.approx(sum(overlaps) / len(overlaps), rel=1e-4)
    assert result.acceptance == total(parts)


def test_a_student_that_is_the_target_agrees_everywhere(target: Any):
    result = trainer_of(target, range(4)).validate(iter([batch()]))

    assert result.agreement == 1
    assert result.overlap == pytest.approx(1, abs=1e-4)
    assert result.acceptance.acceptance_rate == 1
