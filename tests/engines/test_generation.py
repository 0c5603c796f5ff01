"""Events: the part each token played, its text, what is reported of it, and the clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from engines.config import GenerationRequest, SamplingParams
from engines.drafting import ModelProposer, NoProposer
from engines.events import OUTPUT_ORIGINS, Finish, GenerationEvent, Prefill, Step, Token, Totals
from engines.generation import Rounds, Stopwatch, Vocabulary, generate_events
from engines.speculative import Pass, PrefillChunk, StepwiseRounds, decode
from engines.stats import stats_of
from tests.conftest import STOP_ID, VOCAB_SIZE, TableModel
from tests.engines.test_speculative import (
    READ_ON,
    THOROUGH,
    Scenario,
    models_of,
    scenarios,
)

PROMPT_TOKEN_ID = 0  # the letter a


def model_saying(*texts: str) -> TableModel:
    """Return a model that puts nearly all on the next letter of these texts, and else on a."""
    table = np.zeros((VOCAB_SIZE,) * 3, dtype=np.float32)
    for letter, following in chain.from_iterable(pairwise(text) for text in texts):
        table[ord(letter) - ord("a"), :, ord(following) - ord("a")] = 10
    return TableModel(table)


def generate(
    target: TableModel,
    draft: TableModel | None,
    vocabulary: Vocabulary,
    *,
    max_new_tokens: int = 20,
    sampling: SamplingParams | None = None,
    num_top_tokens: int = 0,
) -> Iterator[GenerationEvent]:
    """Go on from the letter a, with four tokens drafted a step, or plainly without a draft."""
    request = GenerationRequest(
        (PROMPT_TOKEN_ID,),
        draft_kind="none" if draft is None else "model",
        num_draft_tokens=0 if draft is None else 4,
        max_new_tokens=max_new_tokens,
        sampling=sampling or SamplingParams(),
        num_top_tokens=num_top_tokens,
    )
    proposer = NoProposer() if draft is None else ModelProposer(draft)
    rounds = decode(
        StepwiseRounds(target, proposer, request),
        request,
        stop_token_ids=vocabulary.stop_token_ids,
        context_length=1000,
    )
    return generate_events(rounds, request, vocabulary)


def steps_of(events: Iterator[GenerationEvent]) -> list[Step]:
    return [event for event in events if isinstance(event, Step)]


def described(step: Step) -> str:
    """Return what became of each token, the dropped ones last: 'b accepted, f rejected'."""
    tokens = (*step.tokens, *(step.rejected or ()))
    return ", ".join(f"{token.text or token.control} {token.origin}" for token in tokens)


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        pytest.param(
            ["abcdeh"],
            ["abcff", "dehg"],
            [
                "b accepted, c accepted, d recovered, f rejected, f unverified",
                "e accepted, h accepted, g discarded, a discarded",
            ],
            id="a rejection, then a stop within the draft",
        ),
        pytest.param(
            ["abchde"],
            ["abchd"],
            ["b accepted, c accepted, h accepted, d discarded"],
            id="the target would have said the same behind the stop",
        ),
        pytest.param(
            ["abchde"],
            ["abchf"],
            ["b accepted, c accepted, h accepted, f discarded"],
            id="the target would have said something else behind the stop",
        ),
        pytest.param(
            ["abcdh"],
            ["abcdh"],
            ["b accepted, c accepted, d accepted, h accepted"],
            id="the last of the draft stops",
        ),
        pytest.param(
            ["abcdeh"],
            ["abcdeh"],
            ["b accepted, c accepted, d accepted, e accepted, h bonus"],
            id="the bonus token stops",
        ),
        pytest.param(
            ["abh"],
            ["abcde"],
            ["b accepted, h recovered, c rejected, d unverified, e unverified"],
            id="the recovered token stops",
        ),
        pytest.param(["abh"], None, ["b target", "h target"], id="nothing drafted"),
    ],
)
def test_every_token_says_what_became_of_it(letters: Vocabulary, target, draft, expected):
    draft_model = None if draft is None else model_saying(*draft)
    *events, last = generate(model_saying(*target), draft_model, letters)
    assert [described(step) for step in steps_of(iter(events))] == expected
    assert isinstance(last, Finish)
    assert last.reason == "stop"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, ["b target"]),
        (3, ["b accepted, c accepted, d bonus"]),
        (5, ["b accepted, c accepted, d accepted, e accepted, f bonus"]),
        (6, ["b accepted, c accepted, d accepted, e accepted, f bonus", "g target"]),
    ],
)
def test_the_last_step_drafts_no_more_than_is_left(letters: Vocabulary, limit, expected):
    model, same = model_saying("abcdefg"), model_saying("abcdefg")
    *events, last = generate(model, same, letters, max_new_tokens=limit)
    assert [described(step) for step in steps_of(iter(events))] == expected
    assert isinstance(last, Finish)
    assert last.reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_counts_of_a_step_add_up(letters: Vocabulary, temperature):
    for seed in range(20):
        target, draft = TableModel.random(seed), TableModel.random(seed + 1)
        sampling = SamplingParams(temperature=temperature, seed=seed)
        for step in steps_of(generate(target, draft, letters, sampling=sampling)):
            assert step.rejected is not None
            assert step.num_dropped_tokens == len(step.rejected)
            assert len(step.tokens) - step.dropped_place in (0, 1)
            assert {token.origin for token in step.tokens} <= OUTPUT_ORIGINS
            assert OUTPUT_ORIGINS.isdisjoint(token.origin for token in step.rejected)


def test_a_control_token_has_a_name_and_no_text(letters: Vocabulary):
    *_, step = steps_of(generate(model_saying("abh"), None, letters))
    (token,) = step.tokens
    assert (token.text, token.control) == ("", "h")


def test_no_pass_is_run_before_its_step_is_asked_for(letters: Vocabulary):
    target = model_saying("abcdefg")
    for num_steps, event in enumerate(generate(target, None, letters)):
        assert isinstance(event, Prefill) == (num_steps == 0)
        assert target.num_passes == num_steps
        if num_steps == 3:
            break


# Letters stand for bytes here: b, c and d for the three of one character, the others for one each.
BYTES = [b"a", *(bytes([byte]) for byte in "日".encode()), b"e", b"f", b"g", b"h"]


def decode_bytes(token_ids: Sequence[int]) -> str:
    return b"".join(BYTES[id_] for id_ in token_ids).decode(errors="replace")


byte_vocabulary = Vocabulary(decode_bytes, frozenset(), frozenset())


def texts_of(steps: list[Step]) -> list[list[str]]:
    return [[token.text for token in step.tokens] for step in steps]


def test_a_character_that_spans_steps_appears_with_its_last_token():
    steps = steps_of(generate(model_saying("aebcdf"), None, byte_vocabulary, max_new_tokens=5))
    assert texts_of(steps) == [["e"], [""], [""], ["日"], ["f"]]


def test_dropped_tokens_leave_the_text_of_the_output_alone():
    target, draft = model_saying("aebcdf"), model_saying("aebcg")
    step, *_ = steps_of(generate(target, draft, byte_vocabulary))
    assert texts_of([step]) == [["e", "", "", "日"]]
    assert [token.text for token in step.rejected or ()] == ["\ufffdg"]


def test_a_character_left_unfinished_is_not_lost():
    steps = steps_of(generate(model_saying("aebc"), None, byte_vocabulary, max_new_tokens=3))
    assert texts_of(steps) == [["e"], [""], ["\ufffd"]]


LIKELY = float(np.exp(10) / (np.exp(10) + VOCAB_SIZE - 1))  # what `model_saying` gives the next
UNLIKELY = (1 - LIKELY) / (VOCAB_SIZE - 1)  # and each of the others


@pytest.fixture
def reported(letters: Vocabulary) -> dict[str, Token]:
    """The tokens of a greedy step by their letters: b accepted, c recovered, f rejected."""
    target, draft = model_saying("abcde"), model_saying("abfg")
    step, *_ = steps_of(generate(target, draft, letters, num_top_tokens=1))
    return {token.text: token for token in step.tokens_in_place}


@pytest.mark.parametrize(
    ("letter", "target_prob", "draft_prob"),
    [
        pytest.param("b", LIKELY, LIKELY, id="accepted"),
        pytest.param("c", LIKELY, None, id="recovered"),
        pytest.param("f", UNLIKELY, LIKELY, id="rejected"),
        pytest.param("g", None, LIKELY, id="unverified"),
    ],
)
def test_greedy_tokens_carry_the_plain_softmax(reported, letter, target_prob, draft_prob):
    token = reported[letter]
    assert token.target_prob == pytest.approx(target_prob)
    assert token.draft_prob == pytest.approx(draft_prob)
    assert token.uniform is None


@pytest.mark.parametrize(
    ("letter", "likeliest_of_target", "likeliest_of_draft"),
    [
        pytest.param("b", "b", "b", id="accepted"),
        pytest.param("c", "c", "f", id="recovered, from where the draft was rejected"),
        pytest.param("f", "c", "f", id="rejected"),
        pytest.param("g", "", "g", id="unverified"),
    ],
)
def test_tokens_carry_the_likeliest_entries_of_their_place(
    reported, letter, likeliest_of_target, likeliest_of_draft
):
    token = reported[letter]
    assert "".join(entry.text for entry in token.top_target) == likeliest_of_target
    assert "".join(entry.text for entry in token.top_draft) == likeliest_of_draft


def test_no_entries_are_reported_unless_asked_for(letters: Vocabulary):
    (step,) = steps_of(
        generate(model_saying("abc"), model_saying("abc"), letters, max_new_tokens=2)
    )
    assert all(token.top_target == token.top_draft == () for token in step.tokens)


def test_the_numbers_of_a_sampled_token_explain_its_verdict(letters: Vocabulary):
    target, draft = TableModel.random(3), TableModel.random(4)
    sampling = SamplingParams(temperature=1)
    steps = steps_of(generate(target, draft, letters, sampling=sampling))
    tokens = [token for step in steps for token in step.tokens_in_place]
    for token in tokens:
        if token.origin in ("accepted", "rejected"):
            assert token.uniform is not None
            assert token.target_prob is not None
            assert token.draft_prob is not None
            is_below = token.uniform * token.draft_prob < token.target_prob
            assert is_below == (token.origin == "accepted")
        elif token.origin == "unverified":
            assert token.uniform is token.target_prob is None
    assert {"accepted", "rejected", "unverified"} <= {token.origin for token in tokens}


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TimedModel(TableModel):
    """A model whose passes take the same time each, on a clock of its own."""

    def __init__(self, model: TableModel, clock: Clock, *, pass_s: float) -> None:
        super().__init__(model.table)
        self._clock = clock
        self._pass_s = pass_s

    def forward(self, token_ids: Sequence[int], *, num_logits: int) -> np.ndarray:
        self._clock.now_s += self._pass_s
        return super().forward(token_ids, num_logits=num_logits)


def test_a_stopwatch_leaves_out_its_pauses():
    clock = Clock()
    stopwatch = Stopwatch(clock)
    clock.now_s += 1
    stopwatch.pause()
    clock.now_s += 100
    stopwatch.resume()
    clock.now_s += 2
    assert stopwatch.elapsed_s == 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that generations are measured by."""
    clock = Clock()
    monkeypatch.setattr("engines.generation.Stopwatch", partial(Stopwatch, clock))
    monkeypatch.setattr("engines.speculative.perf_counter", clock)
    return clock


def test_time_for_which_the_consumer_holds_the_stream_is_not_counted(
    letters: Vocabulary, clock: Clock
):
    target = TimedModel(model_saying("abcdh"), clock, pass_s=1)
    elapsed_s = []
    for event in generate(target, None, letters):
        elapsed_s.append(event.elapsed_s)
        clock.now_s += 100
    assert elapsed_s == [0, 1, 2, 3, 4, 4]  # Prefill, a pass for each letter, Finish


def test_the_time_of_a_step_is_split_into_drafting_and_verifying(letters: Vocabulary, clock: Clock):
    target = TimedModel(model_saying("abcdefg"), clock, pass_s=10)
    draft = TimedModel(model_saying("abcdefg"), clock, pass_s=1)
    (step,) = steps_of(generate(target, draft, letters, max_new_tokens=5))
    assert (step.draft_s, step.target_s, step.elapsed_s) == (4, 10, 14)


# -- what a library tells that runs the loop itself

REQUEST = GenerationRequest((PROMPT_TOKEN_ID,), "model", num_draft_tokens=4)
READ = PrefillChunk(0)


def told(*items: PrefillChunk | Pass | Totals) -> Rounds:
    yield from items


def outcome(
    letters: str,
    num_accepted: int | None = 0,
    num_drafted: int | None = 0,
    *,
    is_last: bool = False,
    step_s: float = 0.25,
) -> Pass:
    token_ids = tuple(ord(letter) - ord("a") for letter in letters)
    return Pass(token_ids, num_accepted, num_drafted, is_last, step_s)


@pytest.mark.parametrize(
    ("pass_", "expected", "is_whole"),
    [
        pytest.param(outcome("b"), "b target", True, id="nothing drafted"),
        pytest.param(
            outcome("bcd", 2, 2), "b accepted, c accepted, d bonus", True, id="all accepted"
        ),
        pytest.param(outcome("bc", 1, 3), "b accepted, c recovered", False, id="some accepted"),
        pytest.param(outcome("b", 0, 3), "b recovered", False, id="none accepted"),
        pytest.param(
            outcome("bc", 1, 3, is_last=True),
            "b accepted, c unreported",
            False,
            id="the last may have been drafted, too",
        ),
        pytest.param(
            outcome("bc", 1, 1, is_last=True), "b accepted, c bonus", True, id="the last, all kept"
        ),
        pytest.param(
            outcome("bh", 2, 3, is_last=True), "b accepted, h accepted", False, id="an own end"
        ),
        pytest.param(
            outcome("bc", 1, None), "b accepted, c unreported", False, id="no number drafted"
        ),
        pytest.param(
            outcome("bcd", None, None), "b unreported, c unreported, d unreported", False, id="none"
        ),
    ],
)
def test_what_became_of_drafts_is_told_as_far_as_it_is_known(
    letters: Vocabulary, pass_: Pass, expected: str, is_whole: bool
):
    (step,) = steps_of(generate_events(told(READ, pass_), REQUEST, letters))

    assert described(step) == expected
    assert step.rejected == (() if is_whole else None)
    assert step.num_draft_tokens == pass_.num_draft_tokens
    assert step.draft_s == (0 if pass_.num_draft_tokens == 0 else None)
    assert all(token.target_prob is token.draft_prob is None for token in step.tokens)


def test_passes_are_timed_by_the_library_and_not_by_who_reads_them(
    letters: Vocabulary, clock: Clock
):
    events = generate_events(
        told(READ, outcome("b", step_s=0.5), outcome("c", step_s=0.25)), REQUEST, letters
    )
    elapsed_s = []
    for event in events:
        elapsed_s.append(event.elapsed_s)
        clock.now_s += 100

    assert elapsed_s == [0, 0.5, 0.75, 0.75]


def test_passes_add_to_the_text_and_the_last_leaves_nothing_unfinished():
    passes = told(READ, outcome("eb"), outcome("c"), outcome("d"), outcome("bc", is_last=True))
    events = generate_events(passes, REQUEST, byte_vocabulary)

    assert texts_of(steps_of(events)) == [["e", ""], [""], ["日"], ["", "\ufffd"]]


@pytest.mark.parametrize(("last", "reason"), [("h", "stop"), ("g", "length")])
def test_the_totals_come_with_the_end_and_make_no_step(
    letters: Vocabulary, clock: Clock, last: str, reason: Any
):
    totals = Totals(num_drafts=1, num_draft_tokens=4, draft_s=0.125)
    items = told(READ, outcome("b"), outcome(last, is_last=True), totals)
    *events, end = generate_events(items, REQUEST, letters)

    assert [type(event) for event in events] == [Prefill, Step, Step]
    assert end == Finish(reason, 0.5, totals)


def test_without_totals_the_end_has_none(letters: Vocabulary, clock: Clock):
    *_, end = generate_events(told(READ, outcome("b")), REQUEST, letters)
    assert end == Finish("length", 0.25, Totals(None, None, None))


def test_closing_a_generation_closes_its_rounds(letters: Vocabulary):
    closed = []

    def rounds() -> Rounds:
        try:
            yield from told(READ, outcome("b"), outcome("c"))
        finally:
            closed.append(True)

    events = generate_events(rounds(), REQUEST, letters)
    next(events)
    assert closed == []
    events.close()
    assert closed == [True]


# -- whatever is asked for

# Letters, halves and quarters of characters, and the name of a control token.
PIECES = (b"a", b" b", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x99\x82", b"\xe3\x81\x82", b"</s>")


def joined(token_ids: Sequence[int]) -> str:
    return b"".join(PIECES[id_] for id_ in token_ids).decode(errors="replace")


def events_of(scenario: Scenario) -> Iterator[GenerationEvent]:
    target, _, proposer = models_of(scenario)
    vocabulary = Vocabulary(
        joined,
        stop_token_ids=scenario.stop_token_ids,
        control_token_ids=frozenset({STOP_ID}),
    )
    rounds = decode(
        StepwiseRounds(target, proposer, scenario.request),
        scenario.request,
        stop_token_ids=vocabulary.stop_token_ids,
        context_length=scenario.context_length,
    )
    return generate_events(rounds, scenario.request, vocabulary)


def origins_of(*steps: Step) -> Counter[str]:
    return Counter(token.origin for step in steps for token in step.tokens_in_place)


@THOROUGH
@given(scenarios())
@example(READ_ON)
def test_every_drafted_token_is_counted_once(scenario: Scenario):
    events = list(events_of(scenario))
    steps = steps_of(iter(events))
    for some in [*([step] for step in steps), steps]:
        origins = origins_of(*some)
        dropped = origins["rejected"] + origins["unverified"] + origins["discarded"]
        assert sum(step.num_draft_tokens or 0 for step in some) == origins["accepted"] + dropped
    stats = stats_of(events)
    assert stats.num_accepted_tokens == origins_of(*steps)["accepted"]
    assert sum(stats.num_accepted_tokens_per_pos or ()) == stats.num_accepted_tokens


@THOROUGH
@given(scenarios())
@example(READ_ON)
def test_every_output_token_has_one_origin(scenario: Scenario):
    events = list(events_of(scenario))
    origins = origins_of(*steps_of(iter(events)))
    assert stats_of(events).num_output_tokens == sum(origins[kind] for kind in OUTPUT_ORIGINS)
    assert stats_of(events).num_output_tokens <= scenario.request.max_new_tokens


@THOROUGH
@given(scenarios())
@example(READ_ON)
def test_a_step_has_at_most_one_verdict_against_its_draft(scenario: Scenario):
    for step in steps_of(events_of(scenario)):
        origins = origins_of(step)
        assert origins["recovered"] == origins["rejected"] <= 1
        assert origins["recovered"] + origins["bonus"] + origins["target"] <= 1
        assert (origins["target"] == 1) == (step.num_draft_tokens == 0)


@THOROUGH
@given(scenarios())
@example(READ_ON)
def test_the_texts_joined_are_the_output_decoded_without_control_tokens(scenario: Scenario):
    stats = stats_of(events_of(scenario))
    assert stats.text == joined([id_ for id_ in stats.output_token_ids if id_ != STOP_ID])


@THOROUGH
@given(scenarios())
@example(READ_ON)
def test_the_end_says_why_and_comes_once_and_last(scenario: Scenario):
    *events, last = events_of(scenario)
    stats = stats_of(events)
    is_stopped = stats.output_token_ids[-1] in scenario.stop_token_ids
    assert isinstance(last, Finish)
    assert not any(isinstance(event, Finish) for event in events)
    assert last.reason == ("stop" if is_stopped else "length")
    assert is_stopped or stats.num_output_tokens == scenario.max_output_tokens


@THOROUGH
@given(scenarios(), st.integers(0, 20))
def test_what_is_stopped_early_is_the_beginning_of_the_whole(scenario: Scenario, num_events: int):
    begun = list(islice(events_of(scenario), num_events))
    whole = list(events_of(scenario))
    assert origins_of(*steps_of(iter(begun))) <= origins_of(*steps_of(iter(whole)))
    assert any(isinstance(event, Finish) for event in begun) == (num_events >= len(whole))
