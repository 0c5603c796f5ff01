"""The comparison: how it is run, and what may be claimed of it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, strategies as st

from engines.base import WARM_UP_TOKENS, Engine, EngineInfo
from engines.benchmark import (
    MAX_REPEATS,
    Comparison,
    Parted,
    RunEvent,
    RunRecord,
    WarmUp,
    comparison_of,
    run,
    settings_of,
)
from engines.config import DraftKind, GenerationRequest, SamplingParams
from engines.events import Finish, GenerationEvent, Prefill, Step, Token
from engines.stats import FirstDifference, Spread

REQUEST = GenerationRequest((1, 2, 3), "model", num_draft_tokens=3, max_new_tokens=8)
INFO = EngineInfo(
    backend="scripted",
    target="the target",
    draft="the draft",
    dtype="float32",
    draft_dtype="bfloat16",
    device="a CPU",
    context_length=512,
    notes=("a note",),
    versions={"scripted": "1.0"},
)


class ScriptedEngine(Engine):
    """Counts from 0 and keeps the requests it got. Each run takes the next of its step times."""

    def __init__(
        self,
        step_s: Sequence[float] = (),
        *,
        wrong_at: int | None = None,
        num_drafted_steps: int | None = None,
        gap: float | None = None,
    ) -> None:
        """Make an engine.

        Args:
            step_s: The step times of each run that is measured.
            wrong_at: Where the drafted output has another token.
            num_drafted_steps: When the drafted output ends, if before the limit.
            gap: How far apart any two tokens are; None where it cannot say.
        """
        self.requests: list[GenerationRequest] = []
        self.gaps_asked_for: list[tuple[tuple[int, ...], int, int]] = []
        self._step_s = iter(step_s)
        self._wrong_at = wrong_at
        self._num_drafted_steps = num_drafted_steps
        self._gap = gap

    @property
    def info(self) -> EngineInfo:
        return INFO

    @property
    def draft_kinds(self) -> tuple[DraftKind, ...]:
        return ("model", "none")

    def encode(self, prompt: str, *, chat_template: bool) -> tuple[int, ...]:
        return (0,)

    def generate(self, request: GenerationRequest) -> Generator[GenerationEvent, None, None]:
        self.requests.append(request)
        is_warm_up = request.max_new_tokens == WARM_UP_TOKENS
        step_s = 50.0 if is_warm_up else next(self._step_s, 1.0)
        elapsed_s = 3.0  # of prefill
        yield Prefill(len(request.prompt_token_ids), len(request.prompt_token_ids) - 1, elapsed_s)
        length = request.num_draft_tokens + 1
        starts = range(0, request.max_new_tokens, length)
        if request.draft_kind != "none":
            starts = starts[: self._num_drafted_steps]
        for start in starts:
            elapsed_s += step_s
            yield Step(
                tokens=tuple(self._token(id_, request) for id_ in range(start, start + length)),
                rejected=(),
                num_draft_tokens=request.num_draft_tokens,
                draft_s=0.0,
                target_s=step_s,
                elapsed_s=elapsed_s,
            )
        yield Finish("length", elapsed_s)

    def logit_gap(self, token_ids: Sequence[int], first: int, second: int) -> float | None:
        self.gaps_asked_for.append((tuple(token_ids), first, second))
        return self._gap

    def close(self) -> None:
        pass

    def _token(self, position: int, request: GenerationRequest) -> Token:
        is_wrong = position == self._wrong_at and request.draft_kind != "none"
        return Token(99 if is_wrong else position, "x", "target", target_prob=0.5)


class PreparedEngine(ScriptedEngine):
    """Says what is asked of it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def prepare(self, request: GenerationRequest) -> Generator[None, None, None]:
        self.log.append(f"prepare {request.draft_kind}")
        try:
            yield
            yield
        finally:
            self.log.append("done")

    def generate(self, request: GenerationRequest) -> Generator[GenerationEvent, None, None]:
        self.log.append(f"generate {request.draft_kind}")
        yield from super().generate(request)

    def warm_up(self, request: GenerationRequest) -> Generator[None, None, None]:
        self.log.append(f"warm up {request.draft_kind}")
        yield


def record_of(
    engine: Engine, request: GenerationRequest = REQUEST, *, repeats: int = 1
) -> RunRecord:
    record = RunRecord(
        "a prompt", settings_of(engine, request, chat_template=False, repeats=repeats)
    )
    for item in run(engine, request, baseline=True, repeats=repeats):
        record.apply(item)
    return record


def run_events_of(engine: Engine, *, baseline: bool, repeats: int = 1) -> Iterator[RunEvent]:
    items = run(engine, REQUEST, baseline=baseline, repeats=repeats)
    return (item for item in items if isinstance(item, RunEvent))


def compared(
    engine: Engine, request: GenerationRequest = REQUEST, *, repeats: int = 1
) -> Comparison:
    return comparison_of(record_of(engine, request, repeats=repeats))


def test_both_sides_differ_in_drafting_alone():
    engine = ScriptedEngine()
    record_of(engine)
    *_, speculative, baseline = engine.requests
    assert speculative == REQUEST
    assert baseline == replace(REQUEST, draft_kind="none", num_draft_tokens=0)


def test_each_side_is_warmed_up_with_a_few_tokens():
    engine = ScriptedEngine()
    record_of(engine)
    warm_up = replace(REQUEST, max_new_tokens=WARM_UP_TOKENS)
    assert engine.requests[:2] == [warm_up, warm_up.plain()]


def test_a_warm_up_says_no_more_than_was_asked_for():
    engine = ScriptedEngine()
    record_of(engine, replace(REQUEST, max_new_tokens=2))
    assert {request.max_new_tokens for request in engine.requests} == {2}


def test_the_warm_up_is_not_recorded():
    record = record_of(ScriptedEngine())
    assert [len(record.runs[side]) for side in ("speculative", "baseline")] == [1, 1]
    assert record.stats("speculative")[0].decode_s == 2  # two steps of a second, none of 50


def test_the_warm_ups_of_both_sides_come_first_and_say_so():
    items = list(run(ScriptedEngine(), REQUEST, baseline=True))
    warm_ups = [item for item in items if isinstance(item, WarmUp)]
    assert list(dict.fromkeys(warm_ups)) == [WarmUp("speculative"), WarmUp("baseline")]
    assert items[: len(warm_ups)] == warm_ups


def test_the_order_alternates_from_repeat_to_repeat():
    run_events = run_events_of(ScriptedEngine(), baseline=True, repeats=3)
    assert list(dict.fromkeys((item.side, item.repeat) for item in run_events)) == [
        ("speculative", 0),
        ("baseline", 0),
        ("baseline", 1),
        ("speculative", 1),
        ("speculative", 2),
        ("baseline", 2),
    ]


def test_an_engine_is_prepared_before_each_generation_that_is_measured():
    engine = PreparedEngine()
    items = list(run(engine, REQUEST, baseline=True, repeats=2))

    drafted = ["prepare model", "done", "generate model"]
    plain = ["prepare none", "done", "generate none"]
    assert engine.log == ["warm up model", "warm up none", *drafted, *plain, *plain, *drafted]
    # Each warm-up is one item, each preparation two; none of it is an event.
    assert sum(isinstance(item, WarmUp) for item in items) == 2 + 2 * 4
    speculative = [item for item in items if item != WarmUp("baseline")]
    assert speculative[:3] == [WarmUp("speculative")] * 3


def test_a_run_without_a_baseline_is_prepared_as_well():
    engine = PreparedEngine()
    assert next(run(engine, REQUEST, baseline=False)) == WarmUp("speculative")
    assert engine.log[0] == "prepare model"


def test_a_run_that_is_stopped_while_it_is_prepared_generates_nothing():
    engine = PreparedEngine()
    items = run(engine, REQUEST, baseline=False)
    next(items)
    items.close()

    assert engine.log == ["prepare model", "done"]


def test_an_engine_needs_no_preparation_by_itself():
    assert list(ScriptedEngine().prepare(REQUEST)) == []
    assert ScriptedEngine().is_open


def test_without_a_baseline_the_request_is_run_alone_and_at_once():
    engine = ScriptedEngine()
    items = list(run(engine, REQUEST, baseline=False))
    assert {(type(item), getattr(item, "side", None)) for item in items} == {
        (RunEvent, "speculative")
    }
    assert engine.requests == [REQUEST]


@pytest.mark.parametrize("repeats", [0, MAX_REPEATS + 1])
def test_repeats_out_of_range_are_refused(repeats):
    with pytest.raises(ValueError, match=f"repeats is {repeats}: use 1 to {MAX_REPEATS}"):
        next(run(ScriptedEngine(), REQUEST, baseline=True, repeats=repeats))


def test_the_speedup_is_the_ratio_of_tokens_per_second():
    # 8 tokens in 2 steps of 2 s, against 8 steps of 1 s.
    comparison = compared(ScriptedEngine([2, 1]))
    assert comparison.speculative_tokens_per_second == Spread(2, 2, 2)
    assert comparison.baseline_tokens_per_second == Spread(1, 1, 1)
    assert comparison.speedup == Spread(2, 2, 2)


def test_a_draft_that_is_always_accepted_can_still_be_slower():
    comparison = compared(ScriptedEngine([8, 1]))
    assert comparison.speedup == Spread(0.5, 0.5, 0.5)


def test_repeats_give_the_ratio_of_medians_and_the_range_of_ratios():
    # In the order they are run. Tokens per second: 4, 2, 1 with drafts and 1, 1/2, 1 without.
    comparison = compared(ScriptedEngine([1, 1, 2, 2, 4, 1]), repeats=3)
    assert comparison.speculative_tokens_per_second == Spread(2, 1, 4)
    assert comparison.baseline_tokens_per_second == Spread(1, 0.5, 1)
    assert comparison.speedup == Spread(2, 1, 4)
    assert comparison.speculative.decode_s == 4


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        ([2, 1], 2),
        ([1, 1, 2, 2], 2 / 0.5),  # of two repeats the slower: 4 and 2 against 1 and 1/2
        ([1, 1, 2, 2, 4, 1], 2),
        ([1, 1, 4, 2, 4, 8, 2, 8], 1 / 0.25),
    ],
    ids=["one", "two", "three", "four"],
)
def test_the_repeat_that_is_shown_has_the_speed_that_is_told(step_s, expected):
    comparison = compared(ScriptedEngine(step_s), repeats=len(step_s) // 2)
    speculative, baseline = comparison.speculative, comparison.baseline
    assert comparison.speculative_tokens_per_second is not None
    assert comparison.baseline_tokens_per_second is not None
    assert comparison.speedup is not None
    assert speculative.tokens_per_second == comparison.speculative_tokens_per_second.median
    assert baseline.tokens_per_second == comparison.baseline_tokens_per_second.median
    assert comparison.speedup.median == expected


STEP_TIMES_S = st.floats(1e-6, 1e3)


@given(st.lists(st.tuples(STEP_TIMES_S, STEP_TIMES_S), min_size=1, max_size=MAX_REPEATS))
def test_the_speedup_lies_within_its_range_and_fits_the_speeds(step_s):
    comparison = compared(ScriptedEngine([s for pair in step_s for s in pair]), repeats=len(step_s))
    speculative, baseline = comparison.speculative, comparison.baseline
    assert comparison.speedup is not None
    assert comparison.speedup.low <= comparison.speedup.median <= comparison.speedup.high
    assert speculative.tokens_per_second is not None
    assert baseline.tokens_per_second is not None
    assert comparison.speedup.median == speculative.tokens_per_second / baseline.tokens_per_second


def test_equal_outputs_are_identical():
    comparison = compared(ScriptedEngine())
    assert comparison.identical is True
    assert comparison.difference is None


def test_outputs_that_part_are_not_identical():
    comparison = compared(ScriptedEngine(wrong_at=5))
    assert comparison.identical is False
    assert comparison.difference == FirstDifference(5, 99, 5)


def test_the_gap_is_the_engines_and_not_that_of_the_reported_probabilities():
    # Each side reports 1/2 for the token it chose, as if the two were tied.
    record = record_of(ScriptedEngine(wrong_at=5, gap=2.2))
    assert comparison_of(record).logit_gap == 2.2
    assert record.to_dict()["first_difference"] == {
        "position": 5,
        "speculative_token_id": 99,
        "baseline_token_id": 5,
        "logit_gap": 2.2,
    }


def test_the_gap_is_that_behind_the_text_both_sides_share():
    engine = ScriptedEngine(wrong_at=2, gap=2.2)
    compared(engine, repeats=3)
    assert engine.gaps_asked_for == [((*REQUEST.prompt_token_ids, 0, 1), 2, 99)]


def test_an_output_that_ends_early_has_no_gap():
    engine = ScriptedEngine(num_drafted_steps=1, gap=2.2)
    comparison = compared(engine)
    assert comparison.difference == FirstDifference(4, None, 4)
    assert comparison.logit_gap is None
    assert engine.gaps_asked_for == []


def test_a_back_end_that_cannot_tell_a_gap_reports_none():
    comparison = compared(ScriptedEngine(wrong_at=5))
    assert comparison.difference is not None
    assert comparison.logit_gap is None


@pytest.mark.parametrize(
    ("wrong_at", "baseline", "temperature", "repeats", "expected"),
    [
        (5, True, 0, 1, [Parted(2.2)]),
        (5, True, 0, 3, [Parted(2.2)]),
        (None, True, 0, 3, []),
        (5, True, 1, 3, []),
        (5, False, 0, 3, []),
    ],
    ids=["one repeat", "three repeats", "equal outputs", "sampled", "no baseline"],
)
def test_outputs_part_once_and_only_where_they_should_be_equal(
    wrong_at, baseline, temperature, repeats, expected
):
    request = replace(REQUEST, sampling=SamplingParams(temperature))
    engine = ScriptedEngine(wrong_at=wrong_at, gap=2.2)
    items = run(engine, request, baseline=baseline, repeats=repeats)
    assert [item for item in items if isinstance(item, Parted)] == expected


def test_sampled_outputs_are_not_compared():
    request = replace(REQUEST, sampling=SamplingParams(temperature=1))
    comparison = compared(ScriptedEngine(wrong_at=5), request)
    assert comparison.identical is None
    assert comparison.difference is None


def test_a_cancelled_run_claims_nothing():
    record = RunRecord("a prompt", {"temperature": 0.0})
    num_speculative_events = 4  # Prefill, two steps, Finish
    run_events = run_events_of(ScriptedEngine(), baseline=True)
    for run_event in islice(run_events, num_speculative_events + 3):
        record.apply(run_event)
    comparison = comparison_of(record)
    assert not comparison.is_finished
    assert comparison.speedup is None
    assert comparison.identical is None
    assert comparison.difference is None
    assert comparison.baseline.finish_reason == "cancelled"


def test_a_record_of_both_sides_is_told_as_a_comparison():
    figures = record_of(ScriptedEngine([1, 1, 2, 2]), repeats=2).to_dict()
    assert figures["speedup"] == 4
    assert figures["speedup_range"] == [4, 4]
    assert figures["tokens_per_second_range"] == {"speculative": [2, 4], "baseline": [0.5, 1]}
    assert (figures["identical"], figures["first_difference"]) == (True, None)
    assert (figures["prompt"], figures["effective_settings"]["seed"]) == ("a prompt", 0)


def test_a_record_of_one_side_is_told_as_its_typical_repeat():
    record = RunRecord("a prompt", {})
    for item in run(ScriptedEngine([1, 2, 4]), REQUEST, baseline=False, repeats=3):
        record.apply(item)
    figures = record.to_dict()
    assert figures["decode_s"] == 4
    assert figures["environment"] == record.environment


def test_a_record_of_nothing_has_no_figures():
    assert RunRecord("a prompt", {}, {}).to_dict() == {
        "prompt": "a prompt",
        "effective_settings": {},
        "environment": {},
    }


def test_a_record_keeps_nothing_of_a_warm_up_and_the_gap_of_parted_outputs():
    record = RunRecord("a prompt", {})
    record.apply(WarmUp("baseline"))
    record.apply(Parted(2.2))
    assert (record.runs, record.logit_gap) == ({}, 2.2)


def test_a_record_keeps_events_by_side_and_repeat():
    record = RunRecord("a prompt", {})
    finish = Finish("stop", 1.0)
    record.apply(RunEvent("baseline", 1, finish))
    assert record.runs == {"baseline": [[], [finish]]}


def test_settings_name_everything_a_run_depends_on():
    request = replace(REQUEST, sampling=SamplingParams(0.7, top_k=5, top_p=0.9, seed=3))
    assert settings_of(ScriptedEngine(), request, chat_template=True, repeats=2) == {
        "backend": "scripted",
        "target": "the target",
        "draft": "the draft",
        "draft_kind": "model",
        "num_draft_tokens": 3,
        "min_draft_prob": 0.0,
        "max_new_tokens": 8,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "seed": 3,
        "verification": "rejection sampling",
        "chat_template": True,
        "repeats": 2,
        "dtype": "float32",
        "draft_dtype": "bfloat16",
        "device": "a CPU",
        "context_length": 512,
        "commits": {},
        "versions": {"scripted": "1.0"},
        "notes": ["a note"],
    }


def test_settings_name_no_draft_where_none_is_used():
    settings = settings_of(ScriptedEngine(), REQUEST.plain(), chat_template=False)
    assert (settings["draft"], settings["draft_kind"]) == (None, "none")
    assert settings["draft_dtype"] is None


def test_greedy_verification_is_exact_match():
    settings = settings_of(ScriptedEngine(), REQUEST, chat_template=False)
    assert settings["verification"] == "exact match"
