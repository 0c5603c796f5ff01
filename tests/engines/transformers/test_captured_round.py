"""Captured rounds: the stepwise loop's decisions, nothing that waits for the device, bad numbers.

On a CPU a captured round is called as it is; on CUDA it is two graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines.config import DraftKind, GenerationRequest, SamplingParams
from engines.drafting import ModelProposer, NoProposer, Proposer
from engines.errors import GenerationError
from engines.sampling import NOT_NUMBERS
from engines.speculative import Round, StepwiseRounds, decode
from engines.stats import stats_of
from engines.transformers_backend.captured import CapturedModel, CapturedPasses
from engines.transformers_backend.captured_round import CapturedRound, CapturedRounds, RoundShape
from engines.transformers_backend.engine import MAX_ROUNDS, TransformersEngine
from tests.engines.transformers.conftest import ask
from tests.engines.transformers.models import IDS, llama

VOCAB_SIZE = 60  # of 64 rows
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.8),
]


def pair(noise: float = 0.02) -> tuple[Any, Any]:
    """Return a target, and a draft that often agrees with it."""
    target, draft = llama(), llama()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += noise * torch.randn_like(weight)
    return target, draft


def asked(number: int, sampling: SamplingParams, **settings: Any) -> GenerationRequest:
    kind: DraftKind = "model" if number else "none"
    return GenerationRequest(IDS[:6], kind, number, 40, sampling, **settings)


def rounds_of(
    models: tuple[Any, Any], request: GenerationRequest, *, captured: bool
) -> list[Round]:
    target, draft = (CapturedPasses(model, capacity=128) for model in models)
    ours, theirs = (CapturedModel(passes, vocab_size=VOCAB_SIZE) for passes in (target, draft))
    proposer: Proposer = ModelProposer(theirs) if request.num_draft_tokens else NoProposer()
    maker: Any = StepwiseRounds(ours, proposer, request)
    if captured:
        shape = RoundShape.of(request)
        round_ = CapturedRound(
            target, draft if request.num_draft_tokens else None, shape, vocab_size=VOCAB_SIZE
        )
        maker = CapturedRounds(round_, theirs if request.num_draft_tokens else None, ours, maker)
    items = decode(maker, request, stop_token_ids=frozenset({7}), context_length=100)
    return [item for item in items if isinstance(item, Round)]


def close_to(values: Sequence[float | None]) -> Any:
    return [None if value is None else pytest.approx(value, abs=1e-5) for value in values]


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "top-k and top-p"])
def test_a_round_decides_what_the_stepwise_loop_decides(number: int, sampling: SamplingParams):
    request = asked(number, sampling, num_top_tokens=3)
    usual = rounds_of(pair(), request, captured=False)
    ours = rounds_of(pair(), request, captured=True)
    assert len(ours) == len(usual)
    for one, other in zip(ours, usual, strict=True):
        assert one.draft.token_ids == other.draft.token_ids
        assert one.output_token_ids == other.output_token_ids
        assert one.is_last == other.is_last
        assert list(one.draft.reported_probs) == close_to(other.draft.reported_probs)
        said, expected = one.verification, other.verification
        assert said.verdict == expected.verdict
        assert said.uniforms == expected.uniforms
        assert list(said.target_probs) == close_to(expected.target_probs)
        for tops, others in (
            (one.draft.top, other.draft.top),
            (said.top_target, expected.top_target),
        ):
            assert [[id_ for id_, _ in row] for row in tops] == [
                [id_ for id_, _ in row] for row in others
            ]
            for row, expected_row in zip(tops, others, strict=True):
                assert [prob for _, prob in row] == close_to([prob for _, prob in expected_row])


def test_some_drafts_are_kept_and_some_are_not():
    request = asked(4, SamplingParams(temperature=1))
    rounds = rounds_of(pair(), request, captured=True)
    accepted = {round_.verification.verdict.num_accepted_tokens for round_ in rounds}
    assert len(accepted) >= 3


class NoTransfers(TorchDispatchMode):
    """Refuses what a device would have to wait for: tensors of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            assert not isinstance(value, torch.Tensor) or value.device.type == "meta", func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "top-k and top-p"])
def test_nothing_in_a_round_waits_for_the_device(
    number: int, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
):
    # Tensors without data: whatever asks for a value or for a size that depends on one fails.
    target, draft = (CapturedPasses(model.to("meta"), capacity=128) for model in pair())
    shape = RoundShape.of(asked(number, sampling, num_top_tokens=3))
    round_ = CapturedRound(target, draft if number else None, shape, vocab_size=VOCAB_SIZE)
    for made_of_numbers in ("torch.tensor", "torch.asarray", "array_api_compat.torch.asarray"):
        monkeypatch.setattr(made_of_numbers, pytest.fail)
    with NoTransfers(), torch.inference_mode():
        if number:
            drafted = round_._propose()
            assert drafted.probs.shape == (number, VOCAB_SIZE)
        decided = round_._judge()
    assert decided.shape == (2 + 3 * number + 1 + 2 * 3 * (2 * number + 1),)


@pytest.mark.parametrize(
    "work",
    [
        lambda ids: ids + torch.tensor([1, 2, 3]).to("meta"),
        lambda ids: ids[ids > 1],
        lambda ids: ids[ids.argmax()],
    ],
)
def test_what_waits_would_be_found(work: Any):
    with NoTransfers(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        work(torch.zeros(3, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "sampled"])
@pytest.mark.parametrize("damaged", [0, 1], ids=["target", "draft"])
def test_logits_that_are_not_numbers_are_an_error(damaged: int, sampling: SamplingParams):
    models = pair()
    with torch.no_grad():
        models[damaged].lm_head.weight[3] = torch.nan
    if damaged == 1 and sampling.is_greedy:  # judged by the target, as in the stepwise loop
        assert rounds_of(models, asked(3, sampling), captured=True)
        return
    with pytest.raises(GenerationError, match=NOT_NUMBERS[:40]):
        rounds_of(models, asked(3, sampling), captured=True)


def test_the_caches_hold_all_but_the_last_token():
    target, draft = (CapturedPasses(model, capacity=128) for model in pair())
    request = asked(3, SamplingParams())
    ours, theirs = (CapturedModel(passes, vocab_size=VOCAB_SIZE) for passes in (target, draft))
    stepwise = StepwiseRounds(ours, ModelProposer(theirs), request)
    round_ = CapturedRound(target, draft, RoundShape.of(request), vocab_size=VOCAB_SIZE)
    maker = CapturedRounds(round_, theirs, ours, stepwise)
    context = len(IDS[:6])
    for item in decode(maker, request, stop_token_ids=frozenset(), context_length=100):
        if isinstance(item, Round):
            context += len(item.output_token_ids)
            assert ours.num_cached_tokens == context - 1
            assert context - 2 <= theirs.num_cached_tokens <= context - 1


# -- the engine, as it is on CUDA


@pytest.fixture
def engine(engine: TransformersEngine) -> TransformersEngine:
    engine.default_min_draft_prob = 0.0
    return engine


def maker_of(engine: TransformersEngine, request: GenerationRequest) -> Any:
    return engine._round_maker(request, engine._proposer(request.draft_kind, 64))


@pytest.mark.parametrize(("kind", "number"), [("model", 3), ("none", 0)])
def test_rounds_are_made_by_the_device_where_they_are_captured(engine, kind, number):
    request = ask(engine, kind, number)
    assert isinstance(maker_of(engine, request), StepwiseRounds)
    told = [message for message in engine.prepare(request) if message]
    assert told[-1].startswith(f"captured rounds of {number} draft token(s) in ")
    assert isinstance(maker_of(engine, request), CapturedRounds)
    assert not list(engine.prepare(ask(engine, kind, number, sampling=SamplingParams(seed=9))))


@pytest.mark.parametrize(
    "settings",
    [{"kind": "prompt_lookup"}, {"min_draft_prob": 0.3}],
    ids=["prompt lookup", "drafts that end early"],
)
def test_what_the_host_must_decide_goes_step_by_step(engine, settings):
    request = ask(engine, settings.pop("kind", "model"), 3, **settings)
    list(engine.prepare(request))
    assert not engine._rounds
    assert isinstance(maker_of(engine, request), StepwiseRounds)


@pytest.mark.parametrize("number", range(1, 9))
def test_greedy_output_is_the_targets_own(engine, number: int):
    outputs = []
    for request in (ask(engine, "model", number), ask(engine, "none", 0)):
        list(engine.prepare(request))
        assert isinstance(maker_of(engine, request), CapturedRounds)
        outputs.append(stats_of(engine.generate(request)).output_token_ids)
    assert outputs[0] == outputs[1]


def test_no_more_rounds_are_kept_than_there_is_room_for(engine):
    for number in range(MAX_ROUNDS + 2):
        list(engine.prepare(ask(engine, "model", number + 1)))
    kept = [shape.num_draft_tokens for shape in engine._rounds]
    assert kept == list(range(3, MAX_ROUNDS + 3))


def test_a_larger_cache_has_rounds_of_its_own(engine):
    short = ask(engine, "model", 3)
    list(engine.prepare(short))
    before = engine._rounds[RoundShape.of(short)]
    engine._info = replace(engine._info, context_length=10**5)
    ids = short.prompt_token_ids
    list(engine.prepare(GenerationRequest(ids, "model", 3, 3000)))
    assert engine._rounds[RoundShape.of(short)] is not before
