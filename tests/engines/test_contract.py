"""The contract: the same promises asked of every back end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from engines.backends import BACKENDS, create_backend
from engines.base import Engine
from engines.benchmark import RunRecord, run, settings_of
from engines.config import DraftKind, EngineConfig, Flow, GenerationRequest, SamplingParams
from engines.errors import EngineError
from engines.events import OUTPUT_ORIGINS, Finish, GenerationEvent, Prefill, Step
from engines.onnxruntime_backend.backend import OnnxRuntimeBackend
from engines.replay import ReplayEngine
from engines.slot import EngineSlot
from engines.stats import stats_of
from engines.store import EngineStore
from engines.tensorrt_llm_backend.backend import TensorRTBackend
from tests.conftest import write_tiny_model
from tests.engines.tensorrt_llm.machine import config_of, on_machine
from tests.fake_tensorrt_llm.scenario import Scenario
from tests.fake_tensorrt_llm.site import FakeInstall, write_site

PROMPT = "one two three one two three one two"
MAX_NEW_TOKENS = 12
NUM_DRAFT_TOKENS = 3


def request_of(engine: Engine, kind: DraftKind = "model") -> GenerationRequest:
    """Return a request that every engine takes: TensorRT-LLM's may be greedy only."""
    temperature = 0.0 if engine.info.backend == "tensorrt_llm" else 1.0
    return GenerationRequest(
        engine.encode(PROMPT, chat_template=False),
        kind,
        0 if kind == "none" else NUM_DRAFT_TOKENS,
        MAX_NEW_TOKENS,
        SamplingParams(temperature=temperature, seed=3),
        num_top_tokens=2,
    )


@pytest.fixture(scope="module")
def replay_engine(tiny_engine: Engine) -> ReplayEngine:
    """Replays what the transformers back end made of the request above."""
    request = request_of(tiny_engine)
    record = RunRecord(PROMPT, settings_of(tiny_engine, request, chat_template=False))
    for item in run(tiny_engine, request, baseline=True):
        record.apply(item)
    return ReplayEngine(record, speed=None)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeInstall:
    return write_site(tmp_path_factory.mktemp("tensorrt-llm") / "install", Scenario())


def tensorrt_engine(fake: FakeInstall, target: Path, draft: Path, flow: Flow) -> Engine:
    backend = TensorRTBackend(EngineStore(fake.site.parent / "store"))
    with on_machine(fake):
        return EngineSlot(lambda name: backend).load(config_of(target, draft, flow=flow))


@pytest.fixture(scope="module")
def onnxruntime_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("onnxruntime")
    target, draft = (
        write_tiny_model(folder / name, seed=seed, num_layers=layers, head_dim=16)
        for name, seed, layers in (("target", 1, 2), ("draft", 2, 1))
    )
    backend = OnnxRuntimeBackend(EngineStore(folder / "store"))
    config = EngineConfig("onnxruntime", str(target), str(draft))
    with EngineSlot(lambda name: backend).load(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine_flow(fake: FakeInstall, tiny_target: Path, tiny_draft: Path) -> Iterator[Engine]:
    with tensorrt_engine(fake, tiny_target, tiny_draft, "engine") as engine:
        yield engine


@pytest.fixture(scope="module")
def pytorch_flow(fake: FakeInstall, tiny_target: Path, tiny_draft: Path) -> Iterator[Engine]:
    with tensorrt_engine(fake, tiny_target, tiny_draft, "pytorch") as engine:
        yield engine


ENGINES = {
    "transformers": "tiny_engine",
    "onnxruntime": "onnxruntime_engine",
    "replay": "replay_engine",
    "TensorRT-LLM, engine flow": "engine_flow",
    "TensorRT-LLM, PyTorch flow": "pytorch_flow",
}


@pytest.fixture(params=ENGINES.values(), ids=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = request.getfixturevalue(request.param)
    assert isinstance(engine, Engine)
    with ExitStack() as machines:
        if request.param == "pytorch_flow":  # which loads what a run needs
            machines.enter_context(on_machine(request.getfixturevalue("fake")))
        yield engine


@pytest.fixture(params=["model", "prompt_lookup", "none"])
def events(request: pytest.FixtureRequest, engine: Engine) -> list[GenerationEvent]:
    """One whole generation of each kind."""
    return list(engine.generate(request_of(engine, request.param)))


def steps_of(events: list[GenerationEvent]) -> Iterator[Step]:
    return (event for event in events if isinstance(event, Step))


# -- the events of a generation


def test_events_come_as_prefill_then_steps_then_one_finish(events: list[GenerationEvent]):
    kinds = [type(event) for event in events]
    num_prefills, num_steps = kinds.count(Prefill), kinds.count(Step)

    assert num_prefills >= 1
    assert kinds == [Prefill] * num_prefills + [Step] * num_steps + [Finish]


def test_the_prompt_is_read_up_to_its_last_token(events: list[GenerationEvent]):
    prefills = [event for event in events if isinstance(event, Prefill)]
    read = [event.num_cached_tokens for event in prefills]

    assert read == sorted(read)
    assert read[-1] == prefills[-1].num_prompt_tokens - 1


def test_time_never_runs_backwards(events: list[GenerationEvent]):
    times = [event.elapsed_s for event in events]

    assert times == sorted(times)
    assert times[0] >= 0
    assert all((step.draft_s or 0) >= 0 and step.target_s > 0 for step in steps_of(events))


def test_drafted_tokens_are_accepted_or_dropped(events: list[GenerationEvent]):
    for step in steps_of(events):
        assert all(token.origin in OUTPUT_ORIGINS for token in step.tokens)
        if step.rejected is not None:
            assert step.num_dropped_tokens == len(step.rejected)
            assert all(token.origin not in OUTPUT_ORIGINS for token in step.rejected)


def test_each_step_adds_the_accepted_tokens_and_at_most_one_more(events: list[GenerationEvent]):
    for step in steps_of(events):
        accepted, following = step.tokens[:-1], step.tokens[-1]
        assert {token.origin for token in accepted} <= {"accepted"}
        match following.origin:
            case "recovered":
                assert step.rejected is None or step.rejected[0].origin == "rejected"
            case "bonus":
                assert step.num_draft_tokens
                assert step.num_accepted_tokens == step.num_draft_tokens
            case "target":
                assert step.num_draft_tokens == 0


def test_behind_a_rejected_token_nothing_was_judged(events: list[GenerationEvent]):
    for step in steps_of(events):
        for token in (step.rejected or ())[1:]:
            assert token.origin in ("unverified", "discarded")
            assert token.target_prob is None
            assert token.uniform is None


def test_the_limits_hold(events: list[GenerationEvent]):
    stats = stats_of(events)

    assert 1 <= stats.num_output_tokens <= MAX_NEW_TOKENS
    assert max(step.num_draft_tokens or 0 for step in steps_of(events)) <= NUM_DRAFT_TOKENS
    assert stats.finish_reason == "stop" or stats.num_output_tokens == MAX_NEW_TOKENS


def test_events_hold_plain_values_only(events: list[GenerationEvent]):
    for event in events:
        assert json.loads(json.dumps(asdict(event), allow_nan=False))


def test_reported_probabilities_are_probabilities(events: list[GenerationEvent]):
    for step in steps_of(events):
        for token in step.tokens_in_place:
            entries = (*token.top_target, *token.top_draft)
            probs = [token.target_prob, token.draft_prob, *(entry.prob for entry in entries)]
            assert all(0 <= prob <= 1 for prob in probs if prob is not None)


# -- the engine


def ids_of(engine: Engine) -> list[int]:
    return stats_of(engine.generate(request_of(engine))).output_token_ids


def test_one_seed_repeats_its_trace(engine: Engine):
    traces = [
        [(step.tokens, step.rejected) for step in steps_of(list(engine.generate(request)))]
        for request in [request_of(engine)] * 2
    ]

    assert traces[0] == traces[1]


def test_a_closed_generation_ends_and_the_next_one_is_whole(engine: Engine):
    whole = ids_of(engine)
    generation = engine.generate(request_of(engine))
    while not isinstance(next(generation), Step):
        pass

    generation.close()

    assert list(generation) == []
    assert ids_of(engine) == whole


def test_a_warm_up_changes_no_output(engine: Engine):
    before = ids_of(engine)
    for kind in engine.draft_kinds:
        lines = list(engine.warm_up(request_of(engine, kind)))
        assert all(line is None or isinstance(line, str) for line in lines)

    assert ids_of(engine) == before


def test_one_prompt_has_one_encoding(engine: Engine):
    first, second = (engine.encode(PROMPT, chat_template=True) for _ in range(2))

    assert first == second
    assert all(type(token_id) is int for token_id in first)


@pytest.mark.parametrize("prompt", ["", " \n\t", "half a character: \ud800"])
def test_a_prompt_that_no_tokenizer_reads_is_refused(engine: Engine, prompt: str):
    with pytest.raises(ValueError, match=r"the prompt is .*: (type some text|give it as UTF-8)"):
        engine.encode(prompt, chat_template=False)


@pytest.mark.parametrize("prompt", ["\x00", "\x1b[2J", "‮", "<script>", "🙂日本é", "a\r\nb"])
def test_any_other_prompt_is_read(engine: Engine, prompt: str):
    assert len(engine.encode(prompt, chat_template=False)) >= 1


def test_every_draft_kind_on_offer_generates(engine: Engine):
    assert "none" in engine.draft_kinds
    for kind in engine.draft_kinds:
        assert stats_of(engine.generate(request_of(engine, kind))).num_output_tokens >= 1


def test_the_settings_of_a_run_can_be_recorded(engine: Engine):
    settings = settings_of(engine, request_of(engine), chat_template=False)

    assert json.loads(json.dumps(settings)) == settings
    assert settings["backend"]
    assert settings["target"]
    assert settings["context_length"] > MAX_NEW_TOKENS


# -- the back end


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name


def test_the_probe_answers_under_the_name_in_the_table(backend_name: str):
    status = create_backend(backend_name).probe()

    assert status.name == backend_name
    assert status.detail


@pytest.mark.parametrize("what", ["build", "load"])
def test_a_missing_model_is_an_error_of_ours(backend_name: str, what: str):
    backend = create_backend(backend_name)
    config = EngineConfig(backend=backend_name, target="/none")

    with pytest.raises(EngineError, match="'/none'"):
        list(backend.build(config)) if what == "build" else backend.load(config)
