"""Recorded runs played again: as they were, at once or at their own pace."""

from __future__ import annotations

import time

import pytest

from engines.backends import BACKENDS
from engines.benchmark import RunEvent, RunRecord
from engines.config import DraftKind, GenerationRequest
from engines.errors import ModelLoadError
from engines.events import Finish, GenerationEvent, Prefill, Step, Token
from engines.replay import ReplayEngine, replay_events


def events_of(token_id: int) -> list[GenerationEvent]:
    step = Step((Token(token_id, "a", "target"),), (), 0, 0.0, 0.0625, 0.125)
    return [Prefill(2, 1, 0.0625), step, Finish("stop", 0.25)]


def make_record(**settings: object) -> RunRecord:
    record = RunRecord("prompt", {"target": "org/target", "repeats": 2, **settings}, {})
    for token_id, repeat in ((1, 0), (2, 1)):
        for event in events_of(token_id):
            record.apply(RunEvent("speculative", repeat, event))
    return record


def with_baseline(record: RunRecord) -> RunRecord:
    for event in events_of(3):
        record.apply(RunEvent("baseline", 0, event))
    return record


def replayed(engine: ReplayEngine, kind: DraftKind) -> list[GenerationEvent]:
    num_draft_tokens = 0 if kind == "none" else 4
    return list(engine.generate(GenerationRequest((0,), kind, num_draft_tokens)))


def test_drafting_replays_the_first_speculative_run():
    engine = ReplayEngine(with_baseline(make_record()), speed=None)

    assert replayed(engine, "model") == replayed(engine, "prompt_lookup") == events_of(1)


def test_what_was_not_reported_is_replayed_as_not_reported():
    record = RunRecord("prompt", {"target": "org/target", "repeats": 1}, {})
    step = Step((Token(1, "a", "unreported"),), None, None, None, 0.0625, 0.125)
    events: list[GenerationEvent] = [Prefill(2, 1, 0.0625), step, Finish("stop", 0.25)]
    for event in events:
        record.apply(RunEvent("speculative", 0, event))

    assert replayed(ReplayEngine(record, speed=None), "model") == events


def test_not_drafting_replays_the_baseline():
    engine = ReplayEngine(with_baseline(make_record()), speed=None)

    assert replayed(engine, "none") == events_of(3)


def test_not_drafting_replays_a_run_that_drafted_nothing():
    engine = ReplayEngine(make_record(draft_kind="none"), speed=None)

    assert replayed(engine, "none") == events_of(1)


def test_a_baseline_that_was_not_recorded_is_told():
    engine = ReplayEngine(make_record(draft_kind="model"), speed=None)

    assert engine.draft_kinds == ("model", "prompt_lookup")
    with pytest.raises(ValueError, match="the recording holds no baseline run: use one of model"):
        replayed(engine, "none")


def test_the_engine_names_what_was_recorded_and_that_it_was():
    settings = {"draft": "org/draft", "dtype": "float32", "draft_dtype": "bfloat16"}
    info = ReplayEngine(make_record(**settings)).info

    assert (info.backend, info.target, info.draft) == (
        "replay",
        "org/target (recorded)",
        "org/draft",
    )
    assert (info.dtype, info.draft_dtype) == ("float32", "bfloat16")
    assert "a recorded run" in info.notes[0]


def test_an_empty_recording_is_told():
    with pytest.raises(ModelLoadError, match="holds no events: record a run first"):
        ReplayEngine(RunRecord("prompt", {}, {}))


@pytest.mark.parametrize(("speed", "seconds"), [(None, 0.0), (1.0, 0.25), (10.0, 0.025)])
def test_events_come_at_their_recorded_times(speed: float | None, seconds: float):
    started = time.perf_counter()

    assert list(replay_events(events_of(1), speed=speed)) == events_of(1)
    assert time.perf_counter() - started >= seconds


def test_events_at_once_are_not_waited_for():
    started = time.perf_counter()
    list(replay_events([Finish("stop", 3600.0)], speed=None))

    assert time.perf_counter() - started < 60


def test_a_recording_is_not_warmed_up():
    engine = ReplayEngine(make_record(draft_kind="model"))

    assert list(engine.warm_up(GenerationRequest((0,), "model", 4))) == []


def test_a_recording_is_no_back_end():
    assert "replay" not in BACKENDS
