"""The PyTorch flow: what the library's own loop tells, and nothing made up beyond it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.base import Engine
from engines.benchmark import RunRecord, run, settings_of
from engines.config import DraftKind, GenerationRequest, SamplingParams
from engines.errors import EngineError, GenerationError, ModelLoadError
from engines.events import Finish, Step, Totals
from engines.slot import EngineSlot
from engines.stats import GenerationStats, stats_of
from engines.store import EngineStore
from engines.tensorrt_llm_backend import worker_process
from engines.tensorrt_llm_backend.backend import TensorRTBackend
from tests.engines.tensorrt_llm.conftest import MAX_SEQ_LEN, Install, MakeConfig
from tests.engines.tensorrt_llm.machine import (
    STOP_ID,
    config_of,
    continuation,
    first_pair,
    ids_of,
    on_machine,
    repeating,
    steps_of,
)
from tests.engines.test_child import ends
from tests.fake_tensorrt_llm.scenario import Gpu, Scenario, Version
from tests.fake_tensorrt_llm.site import FakeInstall, write_site

PROMPT = (40, 41, 42)
LOOKED_UP = repeating(PROMPT, 9)
LONG = 20_000  # so many tokens fill the pipe many times, so that a stop comes before the end
TWO_MODEL, ONE_MODEL = "1.2.1", "1.4.0rc1"

# A GPU of which each model that is loaded takes a part.
NVIDIA_SMI = """\
#!/bin/sh
free=143000
for pid in $(sed -n 's/.*llmapi.LLM", "pid": \\([0-9]*\\).*/\\1/p' {calls} 2>/dev/null); do
  kill -0 "$pid" 2>/dev/null && free=$((free - {taken}))
done
{program} "$@" | sed "s/FREE/$free/"
"""


def request_of(
    prompt: tuple[int, ...] = PROMPT,
    kind: DraftKind = "model",
    num_draft_tokens: int = 4,
    max_new_tokens: int = 24,
    **sampling: Any,
) -> GenerationRequest:
    number = 0 if kind == "none" else num_draft_tokens
    return GenerationRequest(prompt, kind, number, max_new_tokens, SamplingParams(**sampling))


@pytest.fixture(scope="module", params=[TWO_MODEL, ONE_MODEL])
def version(request: pytest.FixtureRequest) -> Version:
    chosen: Version = request.param
    return chosen


@pytest.fixture(scope="module")
def engine(
    version: Version, tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, tiny_draft: Path
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("machine")
    with on_machine(write_site(folder / "install", Scenario(version=version))):
        backend = TensorRTBackend(EngineStore(folder / "store"))
        with backend.load(config_of(tiny_target, tiny_draft, flow="pytorch")) as engine:
            yield engine


def load(slot: EngineSlot, make_config: MakeConfig, **options: Any) -> Engine:
    return slot.load(make_config(flow="pytorch", **options))


def figures_of(engine: Engine, request: GenerationRequest) -> GenerationStats:
    return stats_of(engine.generate(request))


# -- what is told


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("kind", ["model", "prompt_lookup", "none"])
def test_the_output_is_that_of_the_target(engine: Engine, kind: DraftKind, num_draft_tokens: int):
    request = request_of(LOOKED_UP, kind, num_draft_tokens)

    assert ids_of(engine, request) == continuation(LOOKED_UP, 24)


def test_each_pass_is_a_step_whose_first_drafts_nothing(engine: Engine):
    first, *steps = steps_of(engine.generate(request_of()))

    assert [token.origin for token in first.tokens] == ["target"]
    assert (first.num_draft_tokens, first.num_accepted_tokens, first.draft_s) == (0, 0, 0)
    for step in steps[:-1]:
        num_accepted = len(step.tokens) - 1
        last = "bonus" if num_accepted == 4 else "recovered"
        assert [token.origin for token in step.tokens] == ["accepted"] * num_accepted + [last]
        assert (step.num_draft_tokens, step.num_accepted_tokens) == (4, num_accepted)
    assert {len(step.tokens) for step in steps} > {1}


def test_what_the_library_does_not_report_is_none(engine: Engine):
    *events, last = engine.generate(request_of(LOOKED_UP, "prompt_lookup"))
    assert isinstance(last, Finish)
    for step in steps_of(iter(events))[1:]:
        assert (step.num_draft_tokens, step.rejected, step.draft_s) == (None, None, None)
        assert step.tokens[-1].origin == "unreported"
        for token in step.tokens:
            assert token.target_prob is token.draft_prob is token.uniform is None
            assert token.top_target == token.top_draft == ()


def test_which_drafts_were_dropped_is_only_known_where_none_was(engine: Engine):
    for step in steps_of(engine.generate(request_of(max_new_tokens=60)))[1:]:
        is_whole = step.num_accepted_tokens == step.num_draft_tokens
        assert step.rejected == (() if is_whole else None)


@pytest.mark.parametrize("kind", ["model", "prompt_lookup"])
def test_the_totals_are_those_of_the_statistics(engine: Engine, version: Version, kind: DraftKind):
    *events, last = engine.generate(request_of(LOOKED_UP, kind))
    assert isinstance(last, Finish)
    totals, steps = last.totals, steps_of(iter(events))
    num_accepted = sum(step.num_accepted_tokens or 0 for step in steps)

    assert totals.num_drafts is not None
    assert totals.num_draft_tokens is not None
    assert 0 < totals.num_drafts <= len(steps) - 1
    assert 0 < num_accepted <= totals.num_draft_tokens <= 4 * totals.num_drafts
    # Only a draft that is an engine of its own is timed: half a millisecond each by the fake.
    timed_s = pytest.approx(0.0005 * totals.num_drafts) if version == TWO_MODEL else None
    assert totals.draft_s == timed_s


def test_acceptance_is_known_with_the_totals(engine: Engine):
    figures = figures_of(engine, request_of(LOOKED_UP, "prompt_lookup"))

    assert figures.num_drafts is not None
    assert figures.acceptance_rate is not None
    assert 0 < figures.acceptance_rate <= 1
    assert figures.mean_acceptance_length is not None


def test_nothing_is_drafted_by_the_target_alone(engine: Engine):
    *events, last = engine.generate(request_of(kind="none"))

    assert [[token.origin for token in step.tokens] for step in steps_of(iter(events))] == [
        ["target"]
    ] * 24
    assert last == Finish("length", last.elapsed_s)
    assert figures_of(engine, request_of(kind="none")).draft_s == 0


def test_a_comparison_finds_both_sides_identical(engine: Engine):
    request = request_of()
    record = RunRecord("", settings_of(engine, request, chat_template=False))
    for item in run(engine, request, baseline=True):
        record.apply(item)
    figures = record.to_dict()

    assert figures["identical"] is True
    assert figures["speculative"]["output_token_ids"] == continuation(PROMPT, 24)
    assert 0 < figures["speculative"]["acceptance_rate"] < 1
    assert figures["speculative"]["target_s"] >= 0


@pytest.mark.parametrize("kind", ["model", "prompt_lookup", "none"])
def test_a_stop_token_is_the_last_of_the_output(engine: Engine, kind: DraftKind):
    prompt = first_pair(lambda pair: continuation(pair, 3)[2:] == [STOP_ID] and STOP_ID not in pair)
    *events, last = engine.generate(request_of(prompt, kind))

    assert stats_of(events).output_token_ids == continuation(prompt, 3)
    assert steps_of(iter(events))[-1].tokens[-1].control == "</s>"
    assert isinstance(last, Finish)
    assert last.reason == "stop"


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_the_limit_holds(engine: Engine, budget: int):
    assert ids_of(engine, request_of(max_new_tokens=budget)) == continuation(PROMPT, budget)


def test_a_prompt_that_nearly_fills_the_context_is_answered_as_far_as_there_is_room(
    engine: Engine,
):
    prompt = repeating(PROMPT, MAX_SEQ_LEN - 2 - 2 * len(PROMPT))

    assert ids_of(engine, request_of(prompt)) == continuation(prompt, 2)


def test_a_prompt_without_room_for_an_answer_is_refused(engine: Engine):
    with pytest.raises(ValueError, match="the prompt has 200 tokens, and the context holds 200"):
        engine.generate(request_of(tuple(range(200))))


# -- sampling


@pytest.mark.parametrize(
    ("version_", "kind", "is_offered"),
    [
        (TWO_MODEL, "model", True),
        (TWO_MODEL, "prompt_lookup", False),
        (TWO_MODEL, "none", True),
        (ONE_MODEL, "model", False),
        (ONE_MODEL, "prompt_lookup", False),
        (ONE_MODEL, "none", True),
    ],
)
def test_sampling_is_offered_where_it_is_known_to_be_lossless(
    install: Install,
    slot: EngineSlot,
    make_config: MakeConfig,
    version_: Version,
    kind: DraftKind,
    is_offered: bool,
):
    fake = install(Scenario(version=version_))
    engine = load(slot, make_config)
    request = request_of(kind=kind, temperature=0.8, top_k=5, top_p=0.9, seed=3)
    if not is_offered:
        with pytest.raises(ValueError, match=rf"temperature is 0.8: .* '{kind}'; use temperature"):
            engine.generate(request)
        assert fake.read_calls() == []
        return

    assert ids_of(engine, request)
    asked = fake.read_calls("SamplingParams")[-1]["args"]
    drawn = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 3}
    assert {name: asked[name] for name in drawn} == drawn


def test_every_token_may_be_drawn_where_nothing_limits_it(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install()
    ids_of(load(slot, make_config), request_of(kind="none", temperature=0.8))
    asked = fake.read_calls("SamplingParams")[-1]["args"]

    assert (asked["temperature"], asked["top_k"], asked["top_p"]) == (0.8, None, 1.0)


# -- what comes late, and what does not come


def test_passes_that_arrive_as_one_have_no_counts(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    install(Scenario(version="1.4.0rc1", merge=3))
    events = list(load(slot, make_config).generate(request_of()))
    steps = steps_of(iter(events))

    assert stats_of(events).output_token_ids == continuation(PROMPT, 24)
    for step in steps:
        assert {token.origin for token in step.tokens} == {"unreported"}
        assert step.num_draft_tokens is step.num_accepted_tokens is step.num_passes is None
    # In all, the library told how much it drafted.
    figures = stats_of(events)
    assert figures.num_draft_tokens is not None
    assert figures.num_draft_tokens % 4 == 0
    assert figures.acceptance_rate is figures.num_steps is None


def test_plain_passes_that_arrive_as_one_share_their_time(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    install(Scenario(version="1.4.0rc1", merge=3))
    steps = steps_of(load(slot, make_config).generate(request_of(kind="none")))

    assert [[token.origin for token in step.tokens] for step in steps] == [["target"]] * 24
    times = [step.target_s for step in steps]
    assert all(len(set(times[place : place + 3])) == 1 for place in range(0, 24, 3))
    assert len(set(times)) > 1


@pytest.mark.parametrize("kind", ["model", "prompt_lookup"])
def test_without_statistics_there_are_no_totals(
    install: Install, slot: EngineSlot, make_config: MakeConfig, kind: DraftKind
):
    install(Scenario(no_stats=True))
    *events, last = load(slot, make_config).generate(request_of(LOOKED_UP, kind))
    assert isinstance(last, Finish)

    assert last.totals == Totals()
    figures = stats_of(events)
    # A model's drafts are as long as asked for.
    assert (figures.acceptance_rate is None) == (kind == "prompt_lookup")
    assert figures.num_accepted_tokens is not None
    assert figures.draft_s is None


def test_the_first_versions_tell_how_much_was_accepted_but_no_totals(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    install(Scenario(version="1.1.0"))
    *_, last = load(slot, make_config).generate(request_of(LOOKED_UP, "prompt_lookup"))

    assert last == Finish("length", last.elapsed_s, Totals())


ANSWERS = """
import json, sys
requests, replies = open(sys.argv[2]), open(sys.argv[4], "w")
def send(**reply): print(json.dumps(reply), file=replies, flush=True)
send(type="hello", protocol=1)
for line in requests:
    if json.loads(line)["op"] == "stream":
        send(type="item", tokens=[5], num_passes=1, step_s=0.1)
        send(type="item", tokens=[6, 7, 8], num_passes=1, step_s=0.1)
    send(type="result", statistics={statistics})
"""


def answer(monkeypatch: pytest.MonkeyPatch, folder: Path, statistics: list[dict[str, Any]]) -> None:
    """Let a stream be two passes of four tokens, with these statistics."""
    script = folder / "script.py"
    script.write_text(ANSWERS.format(statistics=statistics))
    monkeypatch.setattr(worker_process, "WORKER_SCRIPT", script)


def test_a_text_that_ends_before_it_should_is_told(
    install: Install,
    slot: EngineSlot,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    install()
    answer(monkeypatch, tmp_path, [])
    engine = load(slot, make_config)

    with pytest.raises(GenerationError, match="TensorRT-LLM ended after 4 of 24 tokens, without"):
        ids_of(engine, request_of())
    assert len(ids_of(engine, request_of(max_new_tokens=4))) == 4


@pytest.mark.parametrize(
    ("counts", "totals"),
    [
        pytest.param([(4, 2)], Totals(1, 4, None), id="as seen"),
        pytest.param([(4, 3)], Totals(1, 4, None), id="the end of a draft was cut off"),
        pytest.param([(4, 1)], Totals(), id="passes were lost"),
        pytest.param([(2, 3)], Totals(), id="drafts were not counted"),
        pytest.param([], Totals(), id="nothing"),
    ],
)
def test_sums_that_do_not_hold_what_was_accepted_are_not_reported(
    install: Install,
    slot: EngineSlot,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    counts: list[tuple[int, int]],
    totals: Totals,
):
    install()
    statistics = [
        {"num_draft_tokens": drafted, "num_accepted_tokens": accepted, "draft_s": 0.0}
        for drafted, accepted in counts
    ]
    answer(monkeypatch, tmp_path, statistics)
    *_, last = load(slot, make_config).generate(request_of(kind="prompt_lookup", max_new_tokens=4))

    assert isinstance(last, Finish)
    assert last.totals == totals


# -- the two sides


def loads_and_ends(fake: FakeInstall) -> list[str]:
    """Return which sides were loaded and shut down, in order."""
    sides: dict[int, str] = {}
    events = []
    for call in fake.read_calls("llmapi.LLM", "LLM.shutdown"):
        if call["call"].endswith("shutdown"):
            events.append(f"end {sides[call['pid']]}")
        else:
            draft = call["args"].get("speculative_config")
            sides[call["pid"]] = f"drafts of {draft['max_draft_len']}" if draft else "plain"
            events.append(f"load {sides[call['pid']]}")
    return events


def let_loaded_models_take(fake: FakeInstall, taken: int) -> None:
    """Let each take so many of 143,000 MiB."""
    program = fake.bin / "nvidia-smi"
    real = program.rename(fake.bin / "real-nvidia-smi")
    real.write_text(real.read_text().replace("value=143157", "value=FREE"))
    program.write_text(NVIDIA_SMI.format(calls=fake.calls, program=real, taken=taken))
    program.chmod(0o755)


def compare(engine: Engine, *, repeats: int) -> None:
    for _ in run(engine, request_of(), baseline=True, repeats=repeats):
        pass


def test_both_sides_stay_loaded_where_there_is_room(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install()
    let_loaded_models_take(fake, 60_000)
    engine = load(slot, make_config)
    compare(engine, repeats=3)
    assert loads_and_ends(fake) == ["load drafts of 4", "load plain"]

    engine.close()
    assert sorted(loads_and_ends(fake)[2:]) == ["end drafts of 4", "end plain"]


TAKING_TURNS = [
    *("load drafts of 4", "end drafts of 4", "load plain", "end plain"),
    *("load drafts of 4", "end drafts of 4", "load plain"),
]


def test_one_side_makes_way_for_the_other_where_there_is_no_room_for_both(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install()
    let_loaded_models_take(fake, 70_000)  # and a fifth of it must stay free
    compare(load(slot, make_config), repeats=1)

    assert loads_and_ends(fake) == TAKING_TURNS


def test_a_side_that_is_loaded_again_is_warmed_up_again(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install()
    let_loaded_models_take(fake, 70_000)
    compare(load(slot, make_config), repeats=1)

    streams = Counter(
        call["pid"] for call in fake.read_calls("generate_async") if call["args"].get("streaming")
    )
    last_loaded = [call["pid"] for call in fake.read_calls("llmapi.LLM")][-2:]
    assert [streams[pid] for pid in last_loaded] == [2, 2]  # the warm-up, then what is measured


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param(Gpu(memory_free=20_000), id="what a model takes"),
        pytest.param(Gpu(memory_free=None), id="what is free"),
    ],
)
def test_one_side_makes_way_for_the_other_where_it_is_not_known(
    install: Install, slot: EngineSlot, make_config: MakeConfig, gpu: Gpu
):
    fake = install(Scenario(gpus=(gpu,)))
    compare(load(slot, make_config), repeats=1)

    assert loads_and_ends(fake) == TAKING_TURNS


def test_other_drafts_replace_the_side_that_drafts(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install()
    let_loaded_models_take(fake, 60_000)
    engine = load(slot, make_config)
    ids_of(engine, request_of(kind="none"))
    for num_draft_tokens in (2, 2, 3):
        ids_of(engine, request_of(num_draft_tokens=num_draft_tokens))
    ids_of(engine, request_of(kind="none"))

    assert loads_and_ends(fake) == [
        *("load plain", "load drafts of 2", "end drafts of 2", "load drafts of 3"),
    ]


def test_a_side_is_loaded_before_its_run_is_measured(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install()
    engine = load(slot, make_config)
    assert fake.read_calls() == []
    assert "loading the models" in list(engine.prepare(request_of()))
    assert loads_and_ends(fake) == ["load drafts of 4"]

    ids_of(engine, request_of())
    assert loads_and_ends(fake) == ["load drafts of 4"]


# -- stop, errors, deaths


def test_a_stop_aborts_the_request_and_keeps_the_worker(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install()
    engine = load(slot, make_config, max_seq_len=LONG)
    request = request_of(LOOKED_UP, "prompt_lookup")
    *_, whole = engine.generate(request)
    events = engine.generate(replace(request, max_new_tokens=LONG))
    while not (isinstance(event := next(events), Step) and event.num_accepted_tokens):
        pass
    events.close()
    assert [call["call"].rpartition(".")[2] for call in fake.read_calls()][-1] == "abort"

    *_, last = engine.generate(request)
    assert isinstance(last, Finish)
    assert isinstance(whole, Finish)
    assert last.totals == whole.totals  # nothing of the stopped run is counted
    assert len({call["pid"] for call in fake.read_calls()}) == 1


def test_a_stop_ends_a_worker_that_hangs(
    install: Install, slot: EngineSlot, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_process, "CLOSE_TIMEOUT_S", 0.1)
    fake = install()
    engine = load(slot, make_config, max_seq_len=LONG)
    events = engine.generate(request_of(max_new_tokens=LONG))
    while not isinstance(next(events), Step):
        pass
    pid = fake.read_calls()[-1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    events.close()

    assert ends(pid)
    assert engine.is_open
    assert ids_of(engine, request_of()) == continuation(PROMPT, 24)


def test_a_stop_while_a_side_is_loaded_leaves_no_worker(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install(Scenario(load="hang"))
    preparing = load(slot, make_config).prepare(request_of())
    while not fake.read_calls("llmapi.LLM"):
        next(preparing)
    preparing.close()

    assert ends(fake.read_calls()[-1]["pid"])


def test_a_side_that_cannot_be_loaded_is_told(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    install(Scenario(load="oom"))
    engine = load(slot, make_config)

    with pytest.raises(ModelLoadError, match=r"loading failed: CUDA out of memory.* or more GPUs$"):
        list(engine.prepare(request_of()))
    assert engine.is_open


def test_a_crash_ends_the_run_and_the_next_one_loads_the_side_anew(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install(Scenario(generate="die", generate_after=2))
    engine = load(slot, make_config)
    assert ids_of(engine, request_of()) == continuation(PROMPT, 24)
    with pytest.raises(
        GenerationError, match="generating failed: the worker was killed by SIGKILL"
    ):
        ids_of(engine, request_of())
    assert engine.is_open

    assert ids_of(engine, request_of()) == continuation(PROMPT, 24)
    assert loads_and_ends(fake) == ["load drafts of 4"] * 2


def test_an_error_of_the_library_keeps_the_worker(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install(Scenario(generate="error", generate_after=2))
    engine = load(slot, make_config)
    ids_of(engine, request_of())
    with pytest.raises(GenerationError, match="generating failed: Encountered an error"):
        ids_of(engine, request_of())

    assert loads_and_ends(fake) == ["load drafts of 4"]


def test_a_closed_engine_generates_no_more(
    install: Install, slot: EngineSlot, make_config: MakeConfig
):
    fake = install()
    engine = load(slot, make_config)
    ids_of(engine, request_of())
    engine.close()
    engine.close()

    assert not engine.is_open
    assert ends(fake.read_calls()[-1]["pid"])
    with pytest.raises(EngineError, match="the engine is closed; load it again"):
        engine.generate(request_of())
