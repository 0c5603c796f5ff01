"""Recordings: an exact round trip, and a sentence for whatever is no recording."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

from engines import recording
from engines.benchmark import RunEvent, RunRecord
from engines.errors import RecordingError
from engines.events import Finish, Prefill, Step, Token, TopEntry, Totals
from engines.recording import read_recording, recording_lines, write_recording
from tests.engines.conftest import largest_file

SETTINGS = {
    "backend": "transformers",
    "target": "org/target",
    "draft": None,
    "draft_kind": "prompt_lookup",
    "num_draft_tokens": 2,
    "temperature": 0.7,
    "repeats": 2,
    "versions": {"torch": "2.13.0"},
    "notes": ["a note"],
    "a_later_setting": [1, 2.5, None],
}
ENVIRONMENT = {"cpu": "a processor", "num_cpus": 2, "versions": {}, "later": {"a": True}}

TOP = (TopEntry(5, "a", 0.5), TopEntry(6, "\u2028", 0.25))
STEP = Step(
    tokens=(
        Token(5, "a", "accepted", "", 0.5, 0.25, 0.125, TOP, TOP[:1]),
        Token(7, "é\n", "recovered", target_prob=1 / 3, uniform=0.9999999999999999),
    ),
    rejected=(Token(6, "\x1b[2J", "rejected", target_prob=0.0, draft_prob=1.0, uniform=0.5),),
    num_draft_tokens=2,
    draft_s=0.1,
    target_s=1e-7,
    elapsed_s=0.1 + 0.2,
)
STOP = Step((Token(1, "", "target", control="</s>"),), (), 0, 0.0, 0.25, 0.75)
UNTOLD = replace(STEP, rejected=None, draft_s=None)  # by a back end that reports counts only
UNCOUNTED = replace(UNTOLD, num_draft_tokens=None)
MERGED = replace(UNCOUNTED, tokens=(Token(5, "a", "unreported"), Token(7, "b", "unreported")))


def make_record() -> RunRecord:
    record = RunRecord("<b>prompt</b>\x00\u2028🙂", SETTINGS, ENVIRONMENT)
    for event in (Prefill(9, 4, 0.125), Prefill(9, 8, 0.25), STEP, STOP, Finish("stop", 0.8)):
        record.apply(RunEvent("speculative", 0, event))
    record.apply(RunEvent("speculative", 1, Prefill(9, 8, 0.2)))
    record.apply(RunEvent("baseline", 0, Prefill(9, 8, 0.2)))
    return record


def lines_of(record: RunRecord) -> list[dict[str, Any]]:
    return [json.loads(line) for line in recording_lines(record)]


def read_lines(folder: Path, *lines: str) -> RunRecord:
    path = folder / "run.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_recording(path)


HEADER, PREFILL, _, STEP_LINE, _, FINISH = lines_of(make_record())[:6]


def step_line(step: Step) -> dict[str, Any]:
    """Return the line of a step, as `STEP_LINE` is that of `STEP`."""
    return {**STEP_LINE, **json.loads(json.dumps(asdict(step)))}


def changed(line: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a line with the value at a dotted path replaced."""
    line = json.loads(json.dumps(line))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = line
    for part in parents:
        place = place[part]
    place[last] = value
    return line


def without(line: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != name}


# -- writing and reading


def test_what_is_written_is_read_back_exactly(tmp_path: Path):
    record = make_record()
    write_recording(record, tmp_path / "run.jsonl")

    assert read_recording(tmp_path / "run.jsonl") == record


def test_reading_and_writing_again_gives_the_same_bytes(tmp_path: Path):
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    write_recording(make_record(), first)
    write_recording(read_recording(first), second)

    assert first.read_bytes() == second.read_bytes()


def test_a_run_without_events_is_a_recording(tmp_path: Path):
    record = RunRecord("prompt", {"repeats": 1}, {})
    write_recording(record, tmp_path / "run.jsonl")

    assert read_recording(tmp_path / "run.jsonl") == record


@pytest.mark.parametrize("logit_gap", [None, 0.0, 1 / 3, -2.5])
def test_the_gap_between_two_outputs_is_read_back_exactly(tmp_path: Path, logit_gap: float | None):
    record = replace(make_record(), logit_gap=logit_gap)
    write_recording(record, tmp_path / "run.jsonl")

    assert read_recording(tmp_path / "run.jsonl") == record


def test_a_recording_without_a_gap_is_read(tmp_path: Path):
    header, *events = lines_of(make_record())
    lines = map(json.dumps, [without(header, "logit_gap"), *events])

    assert read_lines(tmp_path, *lines) == make_record()


def test_a_recording_may_hold_its_characters_unescaped(tmp_path: Path):
    record = make_record()
    lines = [json.dumps(line, ensure_ascii=False) for line in lines_of(record)]

    assert read_lines(tmp_path, *lines) == record


def test_a_recording_may_have_line_ends_of_windows(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_bytes("\r\n".join(recording_lines(make_record())).encode())

    assert read_recording(path) == make_record()


def test_writing_replaces_an_earlier_recording(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_text("earlier")
    write_recording(make_record(), path)

    assert read_recording(path) == make_record()
    assert os.listdir(tmp_path) == ["run.jsonl"]


def test_others_may_read_a_recording_as_any_new_file(tmp_path: Path):
    (tmp_path / "other").write_text("")
    write_recording(make_record(), tmp_path / "run.jsonl")

    assert (tmp_path / "run.jsonl").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_missing_folder_is_told(tmp_path: Path):
    with pytest.raises(
        RecordingError, match=r"run\.jsonl' cannot be written: there is no folder '.*'; make it"
    ):
        write_recording(make_record(), tmp_path / "missing" / "run.jsonl")


@pytest.mark.parametrize("path", [".", "/dev/null"])
def test_what_is_not_a_file_is_not_replaced(path: str):
    with pytest.raises(RecordingError, match=f"'{path}' cannot be written: it is not a file"):
        write_recording(make_record(), Path(path))


def test_a_full_disk_is_told_and_leaves_no_part_of_a_file(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_text("earlier")

    with (
        largest_file(100),
        pytest.raises(RecordingError, match=r"cannot be written: .*File too large"),
    ):
        write_recording(make_record(), path)

    assert os.listdir(tmp_path) == ["run.jsonl"]
    assert path.read_text() == "earlier"


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(UNTOLD, id="untold"),
        pytest.param(replace(UNTOLD, num_draft_tokens=1, rejected=()), id="kept whole"),
        pytest.param(replace(UNTOLD, num_draft_tokens=1), id="kept whole, untold"),
        pytest.param(UNCOUNTED, id="uncounted"),
        pytest.param(MERGED, id="merged"),
        pytest.param(replace(MERGED, num_draft_tokens=64), id="merged, counted"),
    ],
)
def test_what_was_not_reported_is_read_back_as_not_reported(tmp_path: Path, step: Step):
    record = RunRecord("prompt", {"repeats": 1}, {})
    for event in (Prefill(9, 8, 0.25), step, Finish("length", 0.8)):
        record.apply(RunEvent("speculative", 0, event))
    write_recording(record, tmp_path / "run.jsonl")

    assert read_recording(tmp_path / "run.jsonl") == record
    assert record.to_dict()["draft_s"] is None
    json.dumps(record.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "totals",
    [
        Totals(),
        Totals(num_drafts=1, num_draft_tokens=2, draft_s=0.1),
        Totals(num_draft_tokens=1),  # that was accepted
        Totals(num_drafts=0, draft_s=0.0),
    ],
    ids=str,
)
def test_totals_are_read_back_exactly(tmp_path: Path, totals: Totals):
    record = RunRecord("prompt", {"repeats": 1}, {})
    for event in (Prefill(9, 8, 0.25), UNCOUNTED, Finish("length", 0.8, totals)):
        record.apply(RunEvent("speculative", 0, event))
    write_recording(record, tmp_path / "run.jsonl")

    assert read_recording(tmp_path / "run.jsonl") == record
    json.dumps(record.to_dict(), allow_nan=False)


def test_a_recording_without_totals_is_read(tmp_path: Path):
    lines = [without(line, "totals") for line in lines_of(make_record())]

    assert read_lines(tmp_path, *map(json.dumps, lines)) == make_record()


def test_a_recording_without_anything_unreported_is_written_as_ever():
    assert {*STEP_LINE} == {
        *("side", "repeat", "type", "tokens", "rejected", "num_draft_tokens"),
        *("draft_s", "target_s", "elapsed_s"),
    }
    assert None not in STEP_LINE.values()


# -- what is no recording


HOSTILE: dict[str, tuple[list[object], str]] = {
    "not JSON": (["hello"], "line 1 is not JSON"),
    "empty": ([""], "line 1 is not JSON"),
    "no object": (["[]"], "line 1 is not a JSON object"),
    "other JSON": (["{}"], "does not say 'specdec-recording'"),
    "a newer version": ([changed(HEADER, "version", 2)], "has version 2, and this program reads 1"),
    "an odd version": ([changed(HEADER, "version", [[[[[[[[[1]]]]]]]]])], "has version [[[[[["),
    "a version as text": ([changed(HEADER, "version", "1")], "has version '1'"),
    "no prompt": ([without(HEADER, "prompt")], "its header: prompt: Field required"),
    "a prompt that is no text": ([changed(HEADER, "prompt", 5)], "its header: prompt: Input"),
    "a gap as text": ([changed(HEADER, "logit_gap", "2.2")], "its header: logit_gap: Input should"),
    "a gap that is a truth": ([changed(HEADER, "logit_gap", True)], "its header: logit_gap: Input"),
    "a gap that is no number": (
        [changed(HEADER, "logit_gap", float("nan"))],
        "NaN is not a number, or too large a one",
    ),
    "no settings": ([without(HEADER, "settings")], "its header: settings: Field required"),
    "no environment": ([without(HEADER, "environment")], "its header: environment: Field"),
    "notes that are no list": (
        [changed(HEADER, "settings.notes", 5)],
        "its header: settings.notes: Input should be a valid list",
    ),
    "no number of repeats": (
        [changed(HEADER, "settings", {})],
        "its header: settings.repeats: Field required",
    ),
    "huge repeats": (
        [changed(HEADER, "settings.repeats", 10**9)],
        "settings.repeats: Input should",
    ),
    "a temperature as text": ([changed(HEADER, "settings.temperature", "0")], "valid number"),
    "settings nested deeply": ([changed(HEADER, "settings.new", {"a": {"b": {}}})], "settings.new"),
    "memory beyond every machine": (
        [changed(HEADER, "environment.memory_bytes", 10**20)],
        "is not a number, or too large a one",
    ),
    "cut off in the middle": ([HEADER, json.dumps(STEP_LINE)[:-20]], "line 2 is not JSON"),
    "an empty line": ([HEADER, "", PREFILL], "line 2 is not JSON"),
    "deeply nested": ([HEADER, "[" * 100_000], "line 2 is not JSON"),
    "nested in an object": ([HEADER, '{"a":' * 100_000], "line 2 is not JSON"),
    "NaN": ([HEADER, changed(STEP_LINE, "elapsed_s", float("nan"))], "NaN is not a number"),
    "infinite": ([HEADER, changed(STEP_LINE, "draft_s", float("inf"))], "Infinity is not a number"),
    "a number that overflows": (
        [HEADER, json.dumps(changed(STEP_LINE, "target_s", 12345)).replace("12345", "1e999")],
        "1e999 is not a number, or too large a one",
    ),
    "a number of many digits": (
        [HEADER, '{"side": ' + "9" * 5000 + "}"],
        "line 2 is not JSON (Exceeds the limit",
    ),
    "NaN as text": ([HEADER, changed(STEP_LINE, "elapsed_s", "nan")], "elapsed_s: Input should"),
    "a negative time": ([HEADER, changed(STEP_LINE, "target_s", -0.1)], "target_s is -0.1, which"),
    "a time of ages": ([HEADER, changed(STEP_LINE, "elapsed_s", 1e300)], "elapsed_s is 1e+300"),
    "a time beyond clocks": ([HEADER, changed(STEP_LINE, "elapsed_s", 5e-324)], "is 5e-324, which"),
    "time that runs backwards": (
        [HEADER, PREFILL, changed(STEP_LINE, "elapsed_s", 0.1)],
        "elapsed_s falls from 0.125 to 0.1",
    ),
    "an unknown side": ([HEADER, changed(STEP_LINE, "side", "both")], "the side 'both' and the"),
    "a side that is no text": ([HEADER, changed(STEP_LINE, "side", [])], "has the side []"),
    "an unknown type": ([HEADER, changed(STEP_LINE, "type", "stop")], "the type 'stop'"),
    "a type that is no text": ([HEADER, changed(STEP_LINE, "type", {})], "the type {}"),
    "no type": ([HEADER, without(STEP_LINE, "type")], "the type None"),
    "a huge repeat": (
        [HEADER, changed(STEP_LINE, "repeat", 2**40)],
        "has the repeat 1099511627776",
    ),
    "a skipped repeat": ([HEADER, changed(STEP_LINE, "repeat", 1)], "has the repeat 1 behind 0"),
    "a negative repeat": ([HEADER, changed(STEP_LINE, "repeat", -1)], "has the repeat -1"),
    "a repeat that is a truth": ([HEADER, changed(STEP_LINE, "repeat", True)], "the repeat True"),
    "a missing field": ([HEADER, without(STEP_LINE, "tokens")], "tokens: Field required"),
    "tokens that are no list": ([HEADER, changed(STEP_LINE, "tokens", "abc")], "tokens: Input"),
    "a token that is no object": ([HEADER, changed(STEP_LINE, "tokens.0", 5)], "tokens.0: Input"),
    "an id as text": ([HEADER, changed(STEP_LINE, "tokens.0.id", "5")], "tokens.0.id: Input"),
    "an id that is a truth": ([HEADER, changed(STEP_LINE, "tokens.0.id", True)], "tokens.0.id"),
    "a negative id": ([HEADER, changed(STEP_LINE, "tokens.0.id", -5)], "a token id is negative"),
    "a negative id among the likeliest": (
        [HEADER, changed(STEP_LINE, "tokens.0.top_target.0.id", -5)],
        "a token id is negative",
    ),
    "a text that is none": ([HEADER, changed(STEP_LINE, "tokens.0.text", None)], "tokens.0.text"),
    "half a character": ([HEADER, changed(STEP_LINE, "tokens.0.text", "\ud800")], "Invalid JSON"),
    "an unknown origin": ([HEADER, changed(STEP_LINE, "tokens.0.origin", "new")], "origin: Input"),
    "a probability above 1": (
        [HEADER, changed(STEP_LINE, "tokens.0.target_prob", 1.5)],
        "1.5 is no probability",
    ),
    "a negative probability": (
        [HEADER, changed(STEP_LINE, "rejected.0.draft_prob", -0.5)],
        "-0.5 is no probability",
    ),
    "a draw above 1": ([HEADER, changed(STEP_LINE, "tokens.0.uniform", 7)], "is no probability"),
    "an unlikely likeliest": (
        [HEADER, changed(STEP_LINE, "tokens.0.top_draft.0.prob", -1)],
        "is no probability",
    ),
    "more drafted than there are": (
        [HEADER, changed(STEP_LINE, "num_draft_tokens", 3)],
        "3 drafted tokens, but 1 accepted and 1 dropped",
    ),
    "dropped tokens without their number": (
        [HEADER, changed(STEP_LINE, "num_draft_tokens", None)],
        "unreported drafted tokens, but 1 accepted and 1 dropped",
    ),
    "more accepted than drafted": (
        [HEADER, step_line(replace(UNTOLD, num_draft_tokens=0))],
        "0 drafted tokens, but 1 accepted and unreported dropped",
    ),
    "fewer drafted than none": (
        [HEADER, step_line(replace(MERGED, num_draft_tokens=-1))],
        "-1 drafted tokens, but unreported accepted and unreported dropped",
    ),
    "more drafted than a step can": (
        [HEADER, step_line(replace(UNTOLD, num_draft_tokens=2**50))],
        f"num_draft_tokens is {2**50}, and a step of 2 output tokens has at most 64",
    ),
    "dropped tokens of passes as one": (
        [HEADER, step_line(replace(MERGED, rejected=STEP.rejected, num_draft_tokens=1))],
        "1 drafted tokens, but unreported accepted and 1 dropped",
    ),
    "a dropped token that is unreported": (
        [HEADER, changed(STEP_LINE, "rejected.0.origin", "unreported")],
        "a token is kept and dropped at once",
    ),
    "dropped tokens that are left out": (
        [HEADER, without(STEP_LINE, "rejected")],
        "rejected: Field required",
    ),
    "a time of drafting that is no time": (
        [HEADER, changed(STEP_LINE, "draft_s", -0.1)],
        "draft_s is -0.1, which",
    ),
    "no time of the target": ([HEADER, changed(STEP_LINE, "target_s", None)], "target_s: Input"),
    "a kept token that was rejected": (
        [HEADER, changed(STEP_LINE, "tokens.0.origin", "rejected")],
        "a token is kept and dropped at once",
    ),
    "a dropped token that was accepted": (
        [HEADER, changed(STEP_LINE, "rejected.0.origin", "accepted")],
        "a token is kept and dropped at once",
    ),
    "a negative prompt": ([HEADER, changed(PREFILL, "num_prompt_tokens", -1)], "of a prompt of -1"),
    "more read than the prompt": (
        [HEADER, changed(PREFILL, "num_cached_tokens", 10)],
        "10 tokens read of a prompt of 9",
    ),
    "an unknown end": ([HEADER, changed(FINISH, "reason", "tired")], "reason: Input should be"),
    "totals that are no totals": ([HEADER, changed(FINISH, "totals", [])], "totals: Input should"),
    "no totals": ([HEADER, changed(FINISH, "totals", None)], "totals: Input should"),
    "a total as text": (
        [HEADER, changed(FINISH, "totals.num_drafts", "3")],
        "totals.num_drafts: Input should",
    ),
    "fewer drafts than none": (
        [HEADER, changed(FINISH, "totals.num_drafts", -1)],
        "totals.num_drafts is -1, which is no count",
    ),
    "fewer drafted in all than none": (
        [HEADER, changed(FINISH, "totals.num_draft_tokens", -1)],
        "totals.num_draft_tokens is -1, which is no count",
    ),
    "a total time that is no time": (
        [HEADER, changed(FINISH, "totals.draft_s", -0.1)],
        "totals.draft_s is -0.1, which is no time",
    ),
    "more accepted than drafted in all": (
        [HEADER, PREFILL, STEP_LINE, changed(FINISH, "totals.num_draft_tokens", 0)],
        "0 drafted tokens in all, but 1 of them accepted",
    ),
    "a step behind the end": (
        [HEADER, FINISH, changed(STEP_LINE, "elapsed_s", 9.0)],
        "a Step cannot follow a Finish",
    ),
    "two ends": ([HEADER, FINISH, FINISH], "a Finish cannot follow a Finish"),
    "a prompt behind a step": (
        [HEADER, STEP_LINE, changed(PREFILL, "elapsed_s", 9.0)],
        "a Prefill cannot follow a Step",
    ),
}


@pytest.mark.parametrize(("lines", "sentence"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_recording_is_told_in_one_short_sentence(
    tmp_path: Path, lines: list[object], sentence: str
):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]

    with pytest.raises(RecordingError) as failure:
        read_lines(tmp_path, *texts)

    told = str(failure.value)
    assert told.startswith(f"the recording '{tmp_path}/run.jsonl' cannot be read: ")
    assert sentence in told
    assert "\n" not in told
    assert len(told) < 400


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "line 1 is not JSON"), (b"\xff\xfe", "can't decode byte 0xff"), (b"\x00" * 9, "JSON")],
    ids=["no bytes", "not UTF-8", "zeros"],
)
def test_bytes_that_are_no_text_are_told(tmp_path: Path, content: bytes, sentence: str):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)

    with pytest.raises(RecordingError, match=sentence):
        read_recording(path)


@pytest.mark.parametrize(
    ("place", "sentence"), [("missing.jsonl", "No such file"), (".", "Is a directory")]
)
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, place: str, sentence: str):
    with pytest.raises(RecordingError, match=f"cannot be read: .*{sentence}"):
        read_recording(tmp_path / place)


@pytest.mark.parametrize("make", [lambda path: path, lambda path: Path("/dev/zero")])
def test_a_file_without_end_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path]
):
    monkeypatch.setattr(recording, "MAX_BYTES", 1000)
    path = tmp_path / "run.jsonl"
    path.write_bytes(b" " * 1001)

    with pytest.raises(RecordingError, match="it has more than 1,000 bytes"):
        read_recording(make(path))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def values() -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner)
    )


def paths_in(value: object, prefix: str = "") -> list[str]:
    items: list[tuple[Any, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    paths = []
    for name, inner in items:
        paths += [f"{prefix}{name}", *paths_in(inner, f"{prefix}{name}.")]
    return paths


@given(data=st.data())
@hypothesis_settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_changed_value_is_read_as_a_sound_record_or_told(fuzzed: Path, data: st.DataObject):
    record = make_record()
    record.runs["baseline"][0] += [
        UNTOLD,
        replace(UNCOUNTED, elapsed_s=0.5),
        replace(MERGED, elapsed_s=0.6),
    ]
    lines = lines_of(record)
    number = data.draw(st.integers(0, len(lines) - 1))
    path = data.draw(st.sampled_from(paths_in(lines[number])))
    lines[number] = changed(lines[number], path, data.draw(values()))
    (fuzzed / "run.jsonl").write_text("\n".join(map(json.dumps, lines)))

    assert_read_or_told(fuzzed / "run.jsonl")


@given(data=st.data())
@hypothesis_settings(max_examples=300, deadline=None)
def test_changed_bytes_are_read_or_told(fuzzed: Path, data: st.DataObject):
    content = "\n".join(recording_lines(make_record())).encode()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 50)))
    path = fuzzed / "run.jsonl"
    path.write_bytes(content[:start] + data.draw(st.binary(max_size=9)) + content[end:])

    assert_read_or_told(path)


def assert_read_or_told(path: Path) -> None:
    """A file is refused in one sentence, or its record can be summed up, printed and written."""
    try:
        record = read_recording(path)
    except RecordingError as exc:
        refusal = str(exc)
    else:
        json.dumps(record.to_dict(), allow_nan=False)
        again = path.with_name("again.jsonl")
        write_recording(record, again)
        assert read_recording(again) == record
        return
    assert refusal.startswith(f"the recording '{path}' cannot be read: ")
    assert "\n" not in refusal
