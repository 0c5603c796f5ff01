"""The engine flow: our loop over two runners in the worker says what the target alone would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.base import Engine
from engines.benchmark import RunEvent, RunRecord, run, settings_of
from engines.config import DraftKind, GenerationRequest, SamplingParams
from engines.errors import GenerationError
from engines.events import Finish, GenerationEvent, Prefill, Step
from engines.slot import EngineSlot
from engines.stats import stats_of
from engines.store import EngineStore
from engines.tensorrt_llm_backend.backend import TensorRTBackend
from tests.engines.tensorrt_llm.conftest import MAX_SEQ_LEN, PLAIN, Install, MakeConfig
from tests.engines.tensorrt_llm.machine import (
    STOP_ID,
    built_and_loaded,
    config_of,
    continuation,
    first_pair,
    ids_of,
    next_id,
    on_machine,
    own_steps,
    repeating,
    steps_of,
    table,
    told,
)
from tests.engines.test_child import ends
from tests.fake_tensorrt_llm.scenario import Gpu, Scenario
from tests.fake_tensorrt_llm.site import FakeInstall, write_site

PROMPT = (40, 41, 42)
GENERATE = "ModelRunnerCpp.generate"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> EngineStore:
    """One for all, so that engines are built once."""
    return EngineStore(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeInstall]:
    fake = write_site(tmp_path_factory.mktemp("machine") / "install", PLAIN)
    with on_machine(fake):
        yield fake


@pytest.fixture(scope="module")
def engine(
    fake: FakeInstall, store: EngineStore, tiny_target: Path, tiny_draft: Path
) -> Iterator[Engine]:
    slot = EngineSlot(lambda name: TensorRTBackend(store))
    yield slot.load(config_of(tiny_target, tiny_draft))
    slot.close()


@pytest.fixture(scope="module")
def logits_engine(
    fake: FakeInstall, store: EngineStore, tiny_target: Path, tiny_draft: Path
) -> Iterator[Engine]:
    """Accepts by logits, and so also samples with drafts."""
    slot = EngineSlot(lambda name: TensorRTBackend(store))
    yield built_and_loaded(slot, config_of(tiny_target, tiny_draft, acceptance="logits"))
    slot.close()


def request_of(
    prompt: tuple[int, ...] = PROMPT,
    kind: DraftKind = "model",
    num_draft_tokens: int = 4,
    max_new_tokens: int = 24,
    **sampling: Any,
) -> GenerationRequest:
    number = 0 if kind == "none" else num_draft_tokens
    return GenerationRequest(prompt, kind, number, max_new_tokens, SamplingParams(**sampling))


def drafts_of(pair: tuple[int, ...], num_tokens: int) -> list[int]:
    text = list(pair)
    for _ in range(num_tokens):
        text.append(next_id(text, is_draft=True))
    return text[len(pair) :]


# -- the loop


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5, 10])
@pytest.mark.parametrize("kind", ["model", "prompt_lookup"])
def test_greedy_drafting_changes_no_token(engine: Engine, kind: DraftKind, num_draft_tokens: int):
    prompt = repeating(PROMPT, 20)
    drafted = ids_of(engine, request_of(prompt, kind, num_draft_tokens))
    plain = ids_of(engine, request_of(prompt, "none"))

    assert drafted == plain == continuation(prompt, 24)


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 10])
@pytest.mark.parametrize("kind", ["model", "prompt_lookup", "none"])
def test_every_step_is_that_of_our_own_loop(
    engine: Engine, tiny_target: Path, kind: DraftKind, num_draft_tokens: int
):
    request = request_of(repeating(PROMPT, 9), kind, num_draft_tokens)
    steps = steps_of(engine.generate(request))

    assert told(steps) == told(own_steps(request, tiny_target))
    assert all(step.rejected is not None for step in steps)


def test_all_parts_that_a_token_can_play_occur(engine: Engine):
    steps = steps_of(engine.generate(request_of(max_new_tokens=60)))
    origins = {token.origin for step in steps for token in step.tokens_in_place}

    assert origins == {"accepted", "recovered", "bonus", "rejected", "unverified"}


def test_a_step_has_the_seconds_of_drafting_and_of_verifying(engine: Engine):
    *events, last = engine.generate(request_of())
    steps = steps_of(iter(events))
    stats = stats_of([*events, last])

    assert all(step.draft_s is not None and step.draft_s > 0 for step in steps[:-1])
    assert all(step.target_s > 0 for step in steps)
    assert stats.draft_s is not None
    assert 0 < stats.draft_s + stats.target_s <= stats.decode_s


def test_nothing_is_reported_that_the_library_does_not_tell(engine: Engine):
    for step in steps_of(engine.generate(request_of())):
        for token in step.tokens_in_place:
            assert token.target_prob is token.draft_prob is token.uniform is None
            assert token.top_target == token.top_draft == ()


def test_the_prompt_is_read_before_the_first_step(engine: Engine, fake: FakeInstall):
    num_before = len(fake.read_calls(GENERATE))
    events = engine.generate(request_of())
    first = next(events)
    calls = fake.read_calls(GENERATE)[num_before:]
    events.close()

    assert isinstance(first, Prefill)
    assert (first.num_prompt_tokens, first.num_cached_tokens) == (3, 2)
    assert [call["args"]["max_new_tokens"] for call in calls] == [1, 1]  # target and draft


def is_stop_within_a_draft(pair: tuple[int, int]) -> bool:
    return drafts_of(pair, 2) == continuation(pair, 2) == [next_id(pair), STOP_ID]


def is_stop_behind_a_draft(pair: tuple[int, int]) -> bool:
    return continuation(pair, 2)[1:] == [STOP_ID] and drafts_of(pair, 1) == [next_id(pair)]


def is_stop_at_once(pair: tuple[int, int]) -> bool:
    return next_id(pair) == STOP_ID != next_id(pair, is_draft=True)


STOPS: dict[str, tuple[Callable[[tuple[int, int]], bool], int, list[str]]] = {
    "within the draft": (is_stop_within_a_draft, 4, ["accepted"] * 2 + ["discarded"] * 2),
    "the last of the draft": (is_stop_within_a_draft, 2, ["accepted"] * 2),
    "the bonus": (is_stop_behind_a_draft, 1, ["accepted", "bonus"]),
    "the first token": (is_stop_at_once, 2, ["rejected", "unverified", "recovered"]),
}


@pytest.mark.parametrize(("is_wanted", "num_draft_tokens", "origins"), STOPS.values(), ids=STOPS)
def test_a_stop_token_ends_the_output_wherever_it_comes(
    engine: Engine, is_wanted, num_draft_tokens: int, origins: list[str]
):
    pair = first_pair(is_wanted)
    *events, last = engine.generate(request_of(pair, "model", num_draft_tokens))
    (step,) = steps_of(iter(events))

    assert [token.origin for token in step.tokens_in_place] == origins
    assert step.tokens[-1].control == "</s>"
    assert isinstance(last, Finish)
    assert last.reason == "stop"
    assert ids_of(engine, request_of(pair, "none")) == [token.id for token in step.tokens]


@pytest.mark.parametrize(
    ("budget", "num_drafted"), [(1, [0]), (2, [1]), (3, [2]), (5, [4])], ids=str
)
def test_no_more_is_drafted_than_is_left_to_say(
    engine: Engine, fake: FakeInstall, budget: int, num_drafted: list[int]
):
    # The target repeats itself, so each draft is kept whole.
    prompt = repeating(PROMPT, 20)
    num_before = len(fake.read_calls(GENERATE))
    steps = steps_of(engine.generate(request_of(prompt, "prompt_lookup", 4, budget)))
    calls = [call["args"] for call in fake.read_calls(GENERATE)[num_before + 1 :]]

    assert [step.num_draft_tokens for step in steps] == num_drafted
    assert sum(len(step.tokens) for step in steps) == budget
    verified = [len(call.get("draft_tokens_list", [[]])[0]) for call in calls]
    assert verified == num_drafted
    assert [call["max_new_tokens"] for call in calls] == [number + 1 for number in num_drafted]


@pytest.mark.parametrize("kind", ["model", "prompt_lookup", "none"])
@pytest.mark.parametrize("num_left", [1, 2, 6])
def test_a_prompt_that_nearly_fills_the_engine_is_answered_as_far_as_there_is_room(
    engine: Engine, kind: DraftKind, num_left: int
):
    prompt = repeating(PROMPT, MAX_SEQ_LEN - num_left - 2 * len(PROMPT))
    assert len(prompt) == MAX_SEQ_LEN - num_left
    *events, last = engine.generate(request_of(prompt, kind, 10))

    assert stats_of(events).output_token_ids == continuation(prompt, num_left)
    assert isinstance(last, Finish)
    assert last.reason == "length"


def test_a_comparison_finds_both_sides_identical(engine: Engine):
    request = request_of()
    record = RunRecord("", settings_of(engine, request, chat_template=False, repeats=2))
    for item in run(engine, request, baseline=True, repeats=2):
        record.apply(item)
    figures = record.to_dict()

    assert figures["identical"] is True
    assert figures["speculative"]["output_token_ids"] == continuation(PROMPT, 24)
    assert 0 < figures["speculative"]["acceptance_rate"] < 1
    assert figures["baseline"]["draft_s"] == 0
    assert figures["speedup"] > 0
    json_kinds = {type(item) for item in figures["speculative"].values()}
    assert json_kinds <= {int, float, str, list}


@pytest.mark.parametrize("kind", ["model", "prompt_lookup"])
def test_a_warm_up_verifies_whole_drafts(engine: Engine, fake: FakeInstall, kind: DraftKind):
    num_before = len(fake.read_calls(GENERATE))
    assert all(item is None for item in engine.warm_up(request_of(kind=kind)))
    calls = fake.read_calls(GENERATE)[num_before:]

    verified = [
        call["args"]["draft_tokens_list"] for call in calls if "draft_tokens_list" in call["args"]
    ]
    assert len(verified[0][0]) == 4


# -- what is refused


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        pytest.param(
            request_of(num_draft_tokens=11),
            r"num_draft_tokens is 11, and .* for 10 at most: lower it, or build with a larger",
            id="a draft longer than verified",
        ),
        pytest.param(
            request_of(tuple(range(200)), "none"),
            "the prompt has 200 tokens, and the context holds 200 with the answer: shorten",
            id="a prompt without room for an answer",
        ),
        pytest.param(
            request_of((5, 258)),
            "the prompt has the token id 258, and the models know 0 to 257",
            id="an id of the padding",
        ),
        pytest.param(request_of((-1,)), "the prompt has the token id -1", id="a negative id"),
        pytest.param(
            request_of(temperature=0.7),
            r"temperature is 0.7: .* decode greedily only .*; use temperature 0, or build with",
            id="a draft model above temperature 0",
        ),
        pytest.param(
            request_of(kind="prompt_lookup", temperature=0.7),
            r"temperature is 0.7: .* decode greedily only",
            id="prompt lookup above temperature 0",
        ),
    ],
)
def test_what_does_not_suit_is_refused_before_the_library_is_asked(
    engine: Engine, fake: FakeInstall, request_: GenerationRequest, sentence: str
):
    num_before = len(fake.read_calls())
    with pytest.raises(ValueError, match=sentence):
        engine.generate(request_)
    with pytest.raises(ValueError, match=sentence):
        list(engine.warm_up(request_))

    assert len(fake.read_calls()) == num_before


def test_a_text_without_room_for_an_answer_is_refused(engine: Engine):
    with pytest.raises(ValueError, match=r"the prompt has 200 tokens, .* larger max_seq_len"):
        engine.encode("x" * MAX_SEQ_LEN, chat_template=False)


def test_nothing_needs_to_be_lossless_where_nothing_is_drafted(engine: Engine):
    sampled = ids_of(engine, request_of(kind="none", temperature=1.0, seed=5))

    assert len(sampled) == 24
    assert sampled == ids_of(engine, request_of(kind="none", temperature=1.0, seed=5))
    assert sampled != ids_of(engine, request_of(kind="none", temperature=1.0, seed=6))


def test_a_second_generation_waits_for_the_first(engine: Engine):
    events = engine.generate(request_of())
    next(events)
    with pytest.raises(GenerationError, match="the engine is busy with another generation"):
        next(engine.generate(request_of()))
    events.close()

    assert ids_of(engine, request_of()) == continuation(PROMPT, 24)


# -- sampling, accepted by logits

NUM_RUNS = 600
TEMPERATURE = 0.7


def target_probs(token_ids: tuple[int, ...]) -> np.ndarray:
    """Return the target's distribution of the next token after temperature and top-k."""
    logits = table().logits(token_ids).astype(np.float64) / TEMPERATURE
    kept = np.argsort(-logits)[:4]
    probs = np.zeros_like(logits)
    probs[kept] = np.exp(logits[kept] - logits.max())
    return np.asarray(probs / probs.sum())


def pairs_of(prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Return how likely each pair of tokens is behind a prompt."""
    firsts = target_probs(prompt)
    likely: dict[tuple[int, ...], float] = {}
    for first in map(int, np.flatnonzero(firsts)):
        seconds = target_probs((*prompt, first)) if first != STOP_ID else np.eye(1)[0]
        for second in map(int, np.flatnonzero(seconds)):
            likely[first, second] = float(firsts[first] * seconds[second])
    return likely


@pytest.mark.parametrize("kind", ["model", "prompt_lookup", "none"])
def test_sampled_output_follows_the_distribution_of_the_target(
    logits_engine: Engine, kind: DraftKind
):
    prompt = repeating(PROMPT, 4)
    counts: Counter[tuple[int, ...]] = Counter()
    origins: Counter[str] = Counter()
    for number in range(NUM_RUNS):
        request = request_of(
            prompt, kind, 2, 3, temperature=TEMPERATURE, top_k=4, seed=1000 * number
        )
        steps = steps_of(logits_engine.generate(request))
        output = [token for step in steps for token in step.tokens]
        counts[tuple(token.id for token in output[:2])] += 1
        origins += Counter(token.origin for token in output)

    likely = pairs_of(prompt)
    assert set(counts) <= set(likely)
    assert sum(likely.values()) == pytest.approx(1)
    for pair, prob in likely.items():
        standard_error = (NUM_RUNS * prob * (1 - prob)) ** 0.5
        assert abs(counts[pair] - NUM_RUNS * prob) < 4 * standard_error + 1
    if kind != "none":
        assert min(origins["accepted"], origins["recovered"], origins["bonus"]) > NUM_RUNS / 20


@pytest.mark.parametrize("kind", ["model", "prompt_lookup"])
def test_a_seed_repeats_its_trace_and_another_does_not(logits_engine: Engine, kind: DraftKind):
    prompt = repeating(PROMPT, 9)
    traces = [
        told(steps_of(logits_engine.generate(request_of(prompt, kind, temperature=1.0, seed=seed))))
        for seed in (3, 3, 4)
    ]

    assert traces[0] == traces[1] != traces[2]


def test_every_draw_of_a_run_has_a_seed_of_its_own(logits_engine: Engine, fake: FakeInstall):
    num_before = len(fake.read_calls(GENERATE))
    ids_of(logits_engine, request_of(temperature=1.0, seed=7))
    steps = fake.read_calls(GENERATE)[num_before + 2 :]  # behind the reading of the prompt
    seeds = [call["args"]["random_seed"] for call in steps]

    assert len(seeds) > 10
    assert len(set(seeds)) == len(seeds)


def test_engines_that_accept_by_logits_are_greedy_at_temperature_0(
    logits_engine: Engine, tiny_target: Path
):
    steps = steps_of(logits_engine.generate(request_of()))

    assert told(steps) == told(own_steps(request_of(), tiny_target))


def test_logits_that_are_no_numbers_are_told(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    install(Scenario(generate="nan_logits"))
    engine = built_and_loaded(slot, make_config(acceptance="logits"))

    with pytest.raises(GenerationError, match="the draft's logits are not numbers"):
        ids_of(engine, request_of(temperature=1.0))
    assert engine.is_open
    assert ids_of(engine, request_of()) == continuation(PROMPT, 24)


# -- engines that do not do what is asked


def test_a_target_that_ends_after_one_token_is_no_baseline(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    install(Scenario(generate="short"))
    engine = slot.load(make_config())

    with pytest.raises(
        GenerationError, match=r"ended after 1 of 24 tokens, .* it cannot be its own baseline"
    ):
        ids_of(engine, request_of(kind="none"))
    assert engine.is_open


@pytest.mark.parametrize(
    ("num_right_calls", "sentence"),
    [
        pytest.param(2, "the engines returned 1 of 4 drafts", id="the draft"),
        pytest.param(3, "the engines returned 4 of 4 drafts and 1 tokens", id="the target"),
    ],
)
def test_what_an_engine_cut_short_in_silence_is_told(
    install: Install,
    slot: EngineSlot,
    make_config: MakeConfig,
    num_right_calls: int,
    sentence: str,
):
    install(Scenario(generate="short", generate_after=num_right_calls))  # after reading the prompt
    prompt = first_pair(lambda pair: drafts_of(pair, 1) == continuation(pair, 1) != [STOP_ID])

    with pytest.raises(GenerationError, match=sentence):
        ids_of(slot.load(make_config()), request_of(prompt))


def test_a_failure_on_the_device_ends_the_worker_and_the_next_run_loads_anew(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    install(Scenario(generate="error", generate_after=3))
    engine = slot.load(make_config())
    events = engine.generate(request_of())
    with pytest.raises(GenerationError, match="generating failed: Encountered an error in forward"):
        list(events)

    assert not engine.is_open
    assert slot.load(make_config()) is not engine


@pytest.mark.parametrize("kind", ["model", "none"])
def test_a_crash_ends_the_run_and_the_next_one_loads_anew(
    install: Install, slot: EngineSlot, make_config: MakeConfig, kind: DraftKind
):
    fake = install(Scenario(generate="die", generate_after=7))
    engine = slot.load(make_config())
    with pytest.raises(
        GenerationError, match=r"generating failed: the worker was killed by SIGKILL \(its log, "
    ):
        [ids_of(engine, request_of(kind=kind)) for _ in range(8)]

    assert not engine.is_open
    assert ends(fake.read_calls(GENERATE)[-1]["pid"])
    with pytest.raises(GenerationError, match="the engine is closed; load it again"):
        engine.generate(request_of())
    again = slot.load(make_config())
    assert again is not engine
    assert ids_of(again, request_of(max_new_tokens=2)) == continuation(PROMPT, 2)


def test_a_step_that_takes_too_long_ends_the_run(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    install(Scenario(generate="hang", generate_after=3))
    engine = slot.load(make_config(step_timeout_s=0.5))
    with pytest.raises(GenerationError, match=r"did not answer within \d s and was ended"):
        ids_of(engine, request_of())

    assert not engine.is_open


# -- stop


def until_a_step(events: Iterator[GenerationEvent]) -> None:
    while not isinstance(next(events), Step):
        pass


def test_a_stop_between_steps_keeps_the_worker_and_asks_the_library_for_nothing_more(
    engine: Engine, fake: FakeInstall
):
    events = engine.generate(request_of())
    until_a_step(events)
    num_before = len(fake.read_calls())
    events.close()
    other = (50, 51)
    assert ids_of(engine, request_of(other)) == continuation(other, 24)

    before, behind = fake.read_calls()[num_before - 1 : num_before + 1]
    assert behind["pid"] == before["pid"]
    assert behind["args"]["batch_input_ids"] == [list(other)]


def test_a_stop_while_the_target_decodes_alone_ends_the_worker_and_the_next_run_loads_anew(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install()
    engine = slot.load(make_config())
    request = request_of(kind="none", max_new_tokens=150)
    events = engine.generate(request)
    until_a_step(events)
    events.close()

    assert not engine.is_open
    assert ends(fake.read_calls(GENERATE)[-1]["pid"])
    num_before = len(fake.read_calls())
    again = slot.load(make_config())
    assert again is not engine
    assert ids_of(again, request) == continuation(PROMPT, 150)
    assert {call["pid"] for call in fake.read_calls()[num_before:]} == {
        fake.read_calls()[-1]["pid"]
    }


def test_a_target_that_decoded_to_its_end_keeps_the_worker(engine: Engine):
    assert len(ids_of(engine, request_of(kind="none"))) == 24
    assert engine.is_open


def test_stopping_a_comparison_stops_the_side_that_runs(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    install()
    engine = slot.load(make_config())
    items = run(engine, request_of(), baseline=True)
    while not (isinstance(item := next(items), RunEvent) and item.side == "baseline"):
        pass
    items.close()

    assert slot.load(make_config()).is_open


# -- what is loaded


def test_without_a_draft_model_there_is_prompt_lookup(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install()
    engine = slot.load(make_config(draft=None))

    assert engine.draft_kinds == ("prompt_lookup", "none")
    assert len(fake.read_calls("from_dir")) == 1
    with pytest.raises(ValueError, match=r"draft_kind is 'model', but no draft model is loaded"):
        engine.generate(request_of())
    assert ids_of(engine, request_of(kind="prompt_lookup")) == continuation(PROMPT, 24)


def test_models_on_several_gpus_are_run_by_processes_of_the_library(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install(Scenario(gpus=(Gpu(), Gpu(), Gpu())))
    config = make_config(tensor_parallel_size=2, devices=(2, 1), draft_devices=(1,))
    engine = built_and_loaded(slot, config)
    opened = [call["args"] for call in fake.read_calls("from_dir")]

    assert [call["is_orchestrator_mode"] for call in opened] == [True, True]
    assert [call["device_ids"] for call in opened] == [[0, 1], [1]]  # as the worker counts them
    assert ids_of(engine, request_of()) == continuation(PROMPT, 24)
    assert engine.info.device == "2 x NVIDIA H200"


def test_a_closed_engine_has_shut_both_runners_down(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install()
    engine = slot.load(make_config())
    engine.close()
    engine.close()

    assert len(fake.read_calls("Executor.shutdown")) == 2
    assert not engine.is_open
    assert ends(fake.read_calls()[-1]["pid"])
