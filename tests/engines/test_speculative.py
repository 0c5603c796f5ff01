"""The loop: what it keeps, what it forgets, when it ends, and that its output is the target's."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from safetensors.torch import load_file, save_file

from engines.base import Engine
from engines.config import DRAFT_KINDS, DraftKind, EngineConfig, GenerationRequest, SamplingParams
from engines.drafting import (
    PREFILL_CHUNK_TOKENS,
    Draft,
    DraftRequest,
    ModelProposer,
    NoProposer,
    PromptLookupProposer,
    Proposer,
)
from engines.sampling import softmax, to_probs
from engines.speculative import PrefillChunk, Round, StepwiseRounds, decode
from engines.stats import GenerationStats, stats_of
from tests.conftest import STOP_ID, VOCAB_SIZE, TableModel, load_engine
from tests.frequencies import assert_follows

THOROUGH = settings(deadline=None, max_examples=300)


@dataclass(frozen=True)
class Scenario:
    """Everything that a run of the loop depends on."""

    request: GenerationRequest
    table_seed: int = 0
    draft_noise: float = 1.0  # how far the draft's table is from the target's; 0 is the same
    stop_token_ids: frozenset[int] = frozenset()
    context_length: int = 10**6

    @property
    def max_output_tokens(self) -> int:
        room = self.context_length - len(self.request.prompt_token_ids)
        return min(self.request.max_new_tokens, room)


@st.composite
def scenarios(draw: st.DrawFn, *, temperature: float | None = None) -> Scenario:
    """Make scenarios of one temperature, or of several for None."""
    temperatures = st.sampled_from([0.0, 0.7, 1.5]) if temperature is None else st.just(temperature)
    kind = draw(st.sampled_from(DRAFT_KINDS))
    prompt = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8))
    request = GenerationRequest(
        tuple(prompt),
        draft_kind=kind,
        num_draft_tokens=0 if kind == "none" else draw(st.integers(1, 8)),
        max_new_tokens=draw(st.integers(1, 40)),
        sampling=SamplingParams(
            temperature=draw(temperatures),
            top_k=draw(st.sampled_from([0, 3])),
            top_p=draw(st.sampled_from([1.0, 0.9])),
            seed=draw(st.integers(0, 2**53)),
        ),
    )
    return Scenario(
        request,
        table_seed=draw(st.integers(0, 2**32)),
        draft_noise=draw(st.sampled_from([0.0, 1.0, 4.0])),
        stop_token_ids=draw(st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=2)),
        context_length=len(prompt) + draw(st.integers(1, 50)),
    )


def models_of(scenario: Scenario) -> tuple[TableModel, TableModel, Proposer]:
    """Return a target, a draft, which not every draft kind uses, and the proposer."""
    target = TableModel.random(scenario.table_seed)
    noise = TableModel.random(scenario.table_seed + 1).table
    draft = TableModel(target.table + np.float32(scenario.draft_noise) * noise)
    proposer: Proposer
    match scenario.request.draft_kind:
        case "model":
            proposer = ModelProposer(draft)
        case "prompt_lookup":
            proposer = PromptLookupProposer()
        case "none":
            proposer = NoProposer()
    return target, draft, proposer


def start(scenario: Scenario) -> tuple[TableModel, TableModel, Iterator[PrefillChunk | Round]]:
    """Return a target, a draft, and the loop over them."""
    target, draft, proposer = models_of(scenario)
    items = decode(
        StepwiseRounds(target, proposer, scenario.request),
        scenario.request,
        stop_token_ids=scenario.stop_token_ids,
        context_length=scenario.context_length,
    )
    return target, draft, items


def rounds_of(scenario: Scenario) -> list[Round]:
    _, _, items = start(scenario)
    return [item for item in items if isinstance(item, Round)]


def output_of(rounds: list[Round]) -> list[int]:
    return list(chain.from_iterable(round_.output_token_ids for round_ in rounds))


@THOROUGH
@given(scenarios())
def test_a_round_adds_what_it_accepted_and_one_token(scenario: Scenario):
    for round_ in rounds_of(scenario):
        verdict = round_.verification.verdict
        kept = (*round_.draft.token_ids[: verdict.num_accepted_tokens], verdict.next_token_id)
        is_cut = round_.output_token_ids[-1] in scenario.stop_token_ids
        assert verdict.num_accepted_tokens <= len(round_.draft.token_ids)
        assert round_.output_token_ids == kept[: len(round_.output_token_ids)]
        assert len(round_.output_token_ids) == len(kept) or is_cut


@THOROUGH
@given(scenarios())
def test_a_round_drafts_no_more_than_asked_for_or_left_to_say(scenario: Scenario):
    num_left = scenario.max_output_tokens
    for round_ in rounds_of(scenario):
        num_drafted = len(round_.draft.token_ids)
        assert num_drafted <= min(scenario.request.num_draft_tokens, num_left - 1)
        if scenario.request.draft_kind == "model":
            assert num_drafted == min(scenario.request.num_draft_tokens, num_left - 1)
        num_left -= len(round_.output_token_ids)


# Here the draft reads on behind a stop token, and all that it says there is accepted.
READ_ON = Scenario(
    GenerationRequest((1,), "model", 8, 20), draft_noise=0, stop_token_ids=frozenset({STOP_ID})
)


@THOROUGH
@given(scenarios())
@example(READ_ON)
def test_the_caches_hold_the_accepted_prefix_after_every_round(scenario: Scenario):
    target, draft, items = start(scenario)
    context = list(scenario.request.prompt_token_ids)
    for item in items:
        if isinstance(item, Round):
            context += item.output_token_ids
            assert target.token_ids == context[:-1]
            assert draft.token_ids == context[: len(draft.token_ids)]
            assert len(draft.token_ids) < len(context)


@THOROUGH
@given(scenarios())
def test_the_output_ends_at_the_first_stop_token_or_the_limit(scenario: Scenario):
    *earlier, last = output_of(rounds_of(scenario))
    assert not scenario.stop_token_ids.intersection(earlier)
    is_full = len(earlier) + 1 == scenario.max_output_tokens
    assert is_full or (
        last in scenario.stop_token_ids and len(earlier) < scenario.max_output_tokens
    )


@THOROUGH
@given(scenarios())
def test_only_the_last_round_says_so(scenario: Scenario):
    *earlier, last = rounds_of(scenario)
    assert last.is_last
    assert not any(round_.is_last for round_ in earlier)


@THOROUGH
@given(scenarios(temperature=0))
def test_greedy_output_is_that_of_plain_decoding(scenario: Scenario):
    plain = replace(scenario, request=scenario.request.plain())
    assert output_of(rounds_of(scenario)) == output_of(rounds_of(plain))


@THOROUGH
@given(scenarios())
def test_the_same_seed_gives_the_same_trace(scenario: Scenario):
    first, second = (
        [
            (round_.draft.token_ids, round_.verification, round_.output_token_ids)
            for round_ in rounds_of(scenario)
        ]
        for _ in range(2)
    )
    assert first == second


@THOROUGH
@given(scenarios())
def test_the_numbers_drawn_in_a_run_are_distinct(scenario: Scenario):
    uniforms = [uniform for r in rounds_of(scenario) for uniform in r.verification.uniforms]
    assert len(set(uniforms)) == len(uniforms)


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_another_seed_gives_another_output(kind):
    request = GenerationRequest(
        (0,), kind, 0 if kind == "none" else 4, 40, SamplingParams(temperature=1, seed=0)
    )
    other = replace(request, sampling=replace(request.sampling, seed=1))
    assert output_of(rounds_of(Scenario(request))) != output_of(rounds_of(Scenario(other)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_its_target_is_accepted_throughout(temperature):
    sampling = SamplingParams(temperature=temperature)
    rounds = rounds_of(Scenario(GenerationRequest((0,), "model", 4, 200, sampling), draft_noise=0))
    assert [round_.verification.verdict.num_accepted_tokens for round_ in rounds] == [4] * 40


def test_a_round_is_one_target_pass_and_none_is_run_ahead():
    target, _, items = start(Scenario(GenerationRequest((0, 1), "model", 4, 40)))
    for num_rounds, item in enumerate(items):
        assert isinstance(item, Round) == (num_rounds > 0)
        assert target.num_passes == 1 + num_rounds


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [256, 512, 599]),
        # The draft reads its three chunks when the target is done, and two gaps lie between them.
        ("model", [256, 512, 599, 599, 599]),
    ],
)
def test_a_long_prompt_is_read_in_chunks(kind, expected):
    assert PREFILL_CHUNK_TOKENS == 256
    request = GenerationRequest((1,) * 600, kind, 0 if kind == "none" else 4)
    _, _, items = start(Scenario(request))
    chunks = [item.num_cached_tokens for item in items if isinstance(item, PrefillChunk)]
    assert chunks == expected


def test_a_prompt_of_one_token_is_read_by_the_first_round():
    target, _, items = start(Scenario(GenerationRequest((1,))))
    assert next(items) == PrefillChunk(0)
    assert target.num_passes == 0


def test_the_prompt_is_read_one_chunk_at_a_time():
    target, draft, items = start(Scenario(GenerationRequest((1,) * 600, "model", 4)))
    assert next(items) == PrefillChunk(PREFILL_CHUNK_TOKENS)
    assert (target.num_cached_tokens, draft.num_cached_tokens) == (PREFILL_CHUNK_TOKENS, 0)


def exact_distribution(
    table: np.ndarray, context: tuple[int, ...], request: GenerationRequest, stop_token_id: int
) -> dict[tuple[int, ...], float]:
    """Return the probability of every output, worked out from the target's table."""
    num_left = request.max_new_tokens + len(request.prompt_token_ids) - len(context)
    output = context[len(request.prompt_token_ids) :]
    if num_left == 0 or output[-1:] == (stop_token_id,):
        return {output: 1.0}
    before = context[-2] if len(context) > 1 else 0
    probs = to_probs(table[context[-1], before][None], request.sampling)[0].tolist()
    return {
        output: prob * tail_prob
        for token_id, prob in enumerate(probs)
        for output, tail_prob in exact_distribution(
            table, (*context, token_id), request, stop_token_id
        ).items()
    }


def check_outputs(
    request: GenerationRequest,
    proposer_of: Callable[[TableModel], Proposer],
    *,
    num_seeds: int = 4000,
) -> None:
    """Assert that outputs over many seeds follow the target's own distribution."""
    target, draft = (TableModel.random(seed, scale=1.0, vocab_size=3) for seed in (1, 2))
    outputs: Counter[tuple[int, ...]] = Counter()
    for seed in range(num_seeds):
        target.truncate(0)
        draft.truncate(0)
        seeded = replace(request, sampling=replace(request.sampling, seed=seed))
        items = decode(
            StepwiseRounds(target, proposer_of(draft), seeded),
            seeded,
            stop_token_ids=frozenset({2}),
            context_length=100,
        )
        outputs[tuple(output_of([item for item in items if isinstance(item, Round)]))] += 1
    assert_follows(outputs, exact_distribution(target.table, request.prompt_token_ids, request, 2))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1, top_k=2),
        SamplingParams(temperature=1.5, top_p=0.7),
        SamplingParams(temperature=0.8, top_k=2, top_p=0.9),
    ],
)
def test_sampled_output_follows_the_target(sampling):
    check_outputs(GenerationRequest((0, 1), "model", 2, 4, sampling), ModelProposer)


@pytest.mark.parametrize("min_draft_prob", [0.3, 0.5])
def test_sampled_output_follows_the_target_where_drafts_end_early(min_draft_prob):
    sampling = SamplingParams(temperature=1)
    request = GenerationRequest((0, 1), "model", 3, 4, sampling, min_draft_prob=min_draft_prob)
    check_outputs(request, ModelProposer)


class DroppingProposer(ModelProposer):
    """Wrong: drops a token because its own probability is low, which favours the likely ones."""

    def propose(self, request: DraftRequest) -> Draft:
        draft = super().propose(request)
        unsure = [prob is not None and prob < 0.4 for prob in draft.reported_probs]
        kept = unsure.index(True) if True in unsure else len(unsure)
        assert draft.probs is not None
        return Draft(draft.token_ids[:kept], draft.probs[:kept], draft.reported_probs[:kept])


def test_a_draft_that_leaves_out_its_unsure_token_is_found_out():
    request = GenerationRequest((0, 1), "model", 3, 4, SamplingParams(temperature=1))
    with pytest.raises(AssertionError, match="standard errors"):
        check_outputs(request, DroppingProposer)


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_sampled_output_follows_the_target_with_prompt_lookup(num_draft_tokens):
    request = GenerationRequest(
        (0, 1, 0, 0, 1), "prompt_lookup", num_draft_tokens, 4, SamplingParams(temperature=1)
    )
    check_outputs(request, lambda _: PromptLookupProposer())


def test_sampled_output_follows_the_target_without_a_draft():
    request = GenerationRequest((0, 1), max_new_tokens=4, sampling=SamplingParams(temperature=1))
    check_outputs(request, lambda _: NoProposer())


class UnwarpedProposer(ModelProposer):
    """Wrong: hands over the model's plain probabilities, not those its tokens were drawn from."""

    def propose(self, request: DraftRequest) -> Draft:
        draft = ModelProposer.propose(self, request)
        self.model.truncate(len(request.context_token_ids) - 1)
        logits = self.model.forward(
            [request.context_token_ids[-1], *draft.token_ids[:-1]],
            num_logits=len(draft.token_ids),
        )
        return replace(draft, probs=tuple(softmax(logits)))


def test_a_draft_that_was_not_drawn_as_it_says_is_found_out():
    request = GenerationRequest((0, 1), "model", 2, 4, SamplingParams(temperature=0.6))
    with pytest.raises(AssertionError, match="standard errors"):
        check_outputs(request, UnwarpedProposer)


PROMPT = "one two three one two three one two"


def generate(
    engine: Engine,
    kind: DraftKind,
    num_draft_tokens: int,
    *,
    min_draft_prob: float | None = None,
) -> GenerationStats:
    token_ids = engine.encode(PROMPT, chat_template=False)
    request = GenerationRequest(
        token_ids, kind, num_draft_tokens, 128, min_draft_prob=min_draft_prob
    )
    return stats_of(engine.generate(request))


@pytest.fixture(scope="module")
def kindred_engine(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Two transformers that often agree: the draft is the target with noise on its weights.

    With attention turned down the output repeats itself, which gives prompt lookup its hits.
    """
    folder = tmp_path_factory.mktemp("kindred")
    weights = {
        name: weight / 20 if "o_proj" in name else weight
        for name, weight in load_file(tiny_target / "model.safetensors").items()
    }
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: weight + torch.randn(weight.shape, generator=generator) / 100
        for name, weight in weights.items()
    }
    for name, tensors in (("target", weights), ("draft", noisy)):
        shutil.copytree(tiny_target, folder / name)
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
    config = EngineConfig(target=str(folder / "target"), draft=str(folder / "draft"))
    with load_engine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain_token_ids(kindred_engine: Engine) -> list[int]:
    return generate(kindred_engine, "none", 0).output_token_ids


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["model", "prompt_lookup"])
def test_greedy_output_of_a_transformer_is_that_of_plain_decoding(
    kindred_engine: Engine, plain_token_ids: list[int], kind, num_draft_tokens
):
    stats = generate(kindred_engine, kind, num_draft_tokens)
    assert stats.output_token_ids == plain_token_ids
    assert stats.acceptance_rate is not None
    assert 0 < stats.acceptance_rate < 1


def test_a_transformer_with_an_unrelated_draft_says_what_it_says_without(tiny_engine: Engine):
    with_draft, without = generate(tiny_engine, "model", 4), generate(tiny_engine, "none", 0)
    assert with_draft.output_token_ids == without.output_token_ids


def test_a_transformer_that_drafts_for_itself_is_accepted_throughout(tiny_target: Path):
    config = EngineConfig(target=str(tiny_target), draft=str(tiny_target), dtype="float32")
    with load_engine(config) as engine:
        stats = generate(engine, "model", 4, min_draft_prob=0.0)
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert stats.num_accepted_tokens is not None
    assert stats.num_accepted_tokens > 100
