"""Recorded runs as files: JSON Lines, a header and then one event a line.

The header names the format and its version, the prompt, the settings and the environment. Reading
checks everything it relies on, since a recording may come from a stranger.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any, NoReturn, TypeAlias
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from engines.benchmark import MAX_REPEATS, SIDES, RunEvent, RunRecord
from engines.config import MAX_NUM_DRAFT_TOKENS
from engines.errors import RecordingError, translate_errors
from engines.events import OUTPUT_ORIGINS, Finish, GenerationEvent, Prefill, Step, Token, Totals

FORMAT = "specdec-recording"
VERSION = 1
MAX_BYTES = 64 * 1024 * 1024
MAX_INTEGER = 2**53  # beyond it, a float no longer holds every whole number
# Wider than any measured time, and narrow enough that speeds and sums of times stay finite.
MIN_TIME_S, MAX_TIME_S = 1e-12, 1e7

_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    kind.__name__.lower(): TypeAdapter(kind) for kind in (Prefill, Step, Finish)
}
_ORDER: tuple[type[GenerationEvent], ...] = (Prefill, Step, Finish)

_Plain: TypeAlias = str | int | float | bool | None


class _Facts(BaseModel):
    """Named facts. Names that this version does not know may hold plain values."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, _Plain | list[_Plain] | dict[str, _Plain]] = Field(init=False)

    versions: dict[str, str] = {}


class _Settings(_Facts):
    """What `settings_of` returns; a comparison needs the repeats."""

    backend: str = ""
    target: str = ""
    draft: str | None = None
    draft_kind: str = ""
    num_draft_tokens: int = 0
    max_new_tokens: int = 0
    temperature: float = 0
    top_k: int = 0
    top_p: float = 1
    seed: int = 0
    verification: str = ""
    chat_template: bool = False
    repeats: int = Field(ge=1, le=MAX_REPEATS)
    dtype: str = ""
    draft_dtype: str | None = None
    device: str = ""
    context_length: int = 0
    notes: list[str] = []


class _Environment(_Facts):
    date: str = ""
    system: str = ""
    python: str = ""
    cpu: str = ""
    num_cpus: int = 0
    memory_bytes: int = 0


class _Header(BaseModel):
    """What the first line holds besides the format and its version."""

    prompt: str = Field(strict=True)
    settings: _Settings
    environment: _Environment
    logit_gap: float | None = Field(default=None, strict=True)


def recording_lines(record: RunRecord) -> Iterator[str]:
    """Yield the lines of a recording, without line ends."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "prompt": record.prompt,
        "settings": record.settings,
        "environment": record.environment,
        "logit_gap": record.logit_gap,
    }
    yield json.dumps(header)
    for side, repeats in record.runs.items():
        for repeat, events in enumerate(repeats):
            for event in events:
                kind = type(event).__name__.lower()
                yield json.dumps({"side": side, "repeat": repeat, "type": kind, **asdict(event)})


def check_place(path: Path) -> None:
    """Refuse a place where no recording can be written, before there is one to lose.

    Raises:
        RecordingError: Its folder is missing, or it is a folder or a device itself.
    """
    action = f"the recording '{path}' cannot be written"
    with translate_errors(action, {OSError: RecordingError}):
        if not path.parent.is_dir():
            raise RecordingError(f"{action}: there is no folder '{path.parent}'; make it first")
        if path.exists() and not path.is_file():  # a rename would replace it
            raise RecordingError(f"{action}: it is not a file; name one")


def write_recording(record: RunRecord, path: Path) -> None:
    """Write a recording beside its place and rename it there, so that no half of one appears.

    Raises:
        RecordingError: It cannot be written.
    """
    check_place(path)
    aside = path.parent / f".{uuid4().hex}"
    with translate_errors(f"the recording '{path}' cannot be written", {OSError: RecordingError}):
        try:
            with aside.open("x", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in recording_lines(record))
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


def read_recording(path: Path) -> RunRecord:
    """Return a recorded run.

    Raises:
        RecordingError: It is missing, too large, of a later version, or not a recording.
    """
    action = f"the recording '{path}' cannot be read"
    with translate_errors(action, {OSError: RecordingError, UnicodeDecodeError: RecordingError}):
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)  # what has no size, such as a pipe, ends here too
        if len(content) > MAX_BYTES:
            raise RecordingError(f"{action}: it has more than {MAX_BYTES:,} bytes")
        lines = content.decode("utf-8").removesuffix("\n").split("\n")
    record = _read_header(lines[0], action)
    for number, line in enumerate(lines[1:], start=2):
        _read_event(line, record, f"{action}: line {number}")
    return record


def _parse(line: str, action: str) -> dict[str, Any]:
    try:
        value = json.loads(
            line, parse_constant=_refuse, parse_float=_finite, parse_int=_whole_number
        )
    except (ValueError, RecursionError) as exc:
        raise RecordingError(f"{action} is not JSON ({exc})") from exc
    if not isinstance(value, dict):
        raise RecordingError(f"{action} is not a JSON object")
    return value


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text[:32]} is not a number, or too large a one")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _whole_number(text: str) -> int:
    value = int(text)
    return value if abs(value) <= MAX_INTEGER else _refuse(text)


def _read_header(line: str, action: str) -> RunRecord:
    header = _parse(line, f"{action}: line 1")
    if header.get("format") != FORMAT:
        raise RecordingError(f"{action}: its first line does not say '{FORMAT}'")
    version = header.get("version")
    if version != VERSION:
        raise RecordingError(
            f"{action}: it has version {short_repr(version)}, and this program reads {VERSION}"
        )
    try:
        _Header.model_validate(header)
    except ValidationError as exc:
        raise RecordingError(f"{action}: its header: {_first_error(exc)}") from exc
    return RunRecord(
        header["prompt"],
        header["settings"],
        header["environment"],
        logit_gap=header.get("logit_gap"),
    )


def _read_event(line: str, record: RunRecord, action: str) -> None:
    fields = _parse(line, action)
    side, repeat, kind = (fields.get(name) for name in ("side", "repeat", "type"))
    adapter = _ADAPTERS.get(kind) if isinstance(kind, str) else None
    if side not in SIDES or adapter is None:
        raise RecordingError(
            f"{action} has the side {short_repr(side)} and the type {short_repr(kind)}"
        )
    repeats = record.runs.get(side, [])
    if type(repeat) is not int or not 0 <= repeat <= min(len(repeats), MAX_REPEATS - 1):
        raise RecordingError(f"{action} has the repeat {short_repr(repeat)} behind {len(repeats)}")
    try:
        event: GenerationEvent = adapter.validate_json(line, strict=True)
    except ValidationError as exc:
        raise RecordingError(f"{action}: {_first_error(exc)}") from exc
    if repeat < len(repeats):
        _check_order(repeats[repeat][-1], event, action)
    _check_event(event, action)
    if isinstance(event, Finish):
        _check_totals(event.totals, repeats[repeat] if repeat < len(repeats) else [], action)
    record.apply(RunEvent(side, repeat, event))


def _first_error(exc: ValidationError) -> str:
    error = exc.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in error["loc"])[:80]
    return f"{place}: {error['msg']}"


def _check_order(previous: GenerationEvent, event: GenerationEvent, action: str) -> None:
    places = _ORDER.index(type(previous)), _ORDER.index(type(event))
    if isinstance(previous, Finish) or places[1] < places[0]:
        names = [_ORDER[place].__name__ for place in places]
        raise RecordingError(f"{action}: a {names[1]} cannot follow a {names[0]}")
    if event.elapsed_s < previous.elapsed_s:
        raise RecordingError(
            f"{action}: elapsed_s falls from {previous.elapsed_s} to {event.elapsed_s}"
        )


def _check_event(event: GenerationEvent, action: str) -> None:
    _check_time("elapsed_s", event.elapsed_s, action)
    match event:
        case Prefill():
            if not 0 <= event.num_cached_tokens <= event.num_prompt_tokens:
                raise RecordingError(
                    f"{action}: {event.num_cached_tokens} tokens read of a prompt of "
                    f"{event.num_prompt_tokens}"
                )
        case Step():
            _check_step(event, action)


def _check_step(step: Step, action: str) -> None:
    if step.draft_s is not None:
        _check_time("draft_s", step.draft_s, action)
    _check_time("target_s", step.target_s, action)
    rejected = step.rejected or ()
    for token in (*step.tokens, *rejected):
        _check_token(token, action)
    if any(token.origin not in OUTPUT_ORIGINS for token in step.tokens) or any(
        token.origin in OUTPUT_ORIGINS for token in rejected
    ):
        raise RecordingError(f"{action}: a token is kept and dropped at once")
    # A count without its tokens has no other limit, and figures have a place for each position.
    most = MAX_NUM_DRAFT_TOKENS * max(1, len(step.tokens))
    if step.rejected is None and (step.num_draft_tokens or 0) > most:
        raise RecordingError(
            f"{action}: num_draft_tokens is {step.num_draft_tokens}, and a step of "
            f"{len(step.tokens)} output tokens has at most {most}"
        )
    if not _adds_up(step):
        num_dropped = None if step.rejected is None else len(rejected)
        raise RecordingError(
            f"{action}: {_told(step.num_draft_tokens)} drafted tokens, but "
            f"{_told(step.num_accepted_tokens)} accepted and {_told(num_dropped)} dropped"
        )


def _check_totals(totals: Totals, events: list[GenerationEvent], action: str) -> None:
    if totals.draft_s is not None:
        _check_time("totals.draft_s", totals.draft_s, action)
    for name, count in (
        ("num_drafts", totals.num_drafts),
        ("num_draft_tokens", totals.num_draft_tokens),
    ):
        if count is not None and count < 0:
            raise RecordingError(f"{action}: totals.{name} is {count}, which is no count")
    num_accepted = sum(
        event.num_accepted_tokens or 0 for event in events if isinstance(event, Step)
    )
    if totals.num_draft_tokens is not None and totals.num_draft_tokens < num_accepted:
        raise RecordingError(
            f"{action}: {totals.num_draft_tokens} drafted tokens in all, but {num_accepted} of "
            "them accepted"
        )


def _adds_up(step: Step) -> bool:
    """Return whether the counts of a step agree, as far as they are reported."""
    if step.rejected is not None:
        return step.num_dropped_tokens == len(step.rejected)
    return step.num_draft_tokens is None or step.num_draft_tokens >= (step.num_accepted_tokens or 0)


def _told(count: int | None) -> str:
    return "unreported" if count is None else str(count)


def _check_time(name: str, value: float, action: str) -> None:
    if value != 0 and not MIN_TIME_S <= value <= MAX_TIME_S:
        raise RecordingError(f"{action}: {name} is {value}, which is no time")


def _check_token(token: Token, action: str) -> None:
    entries = (*token.top_target, *token.top_draft)
    if any(id_ < 0 for id_ in (token.id, *(entry.id for entry in entries))):
        raise RecordingError(f"{action}: a token id is negative")
    probs = [token.target_prob, token.draft_prob, token.uniform, *(entry.prob for entry in entries)]
    for prob in probs:
        if prob is not None and not 0 <= prob <= 1:
            raise RecordingError(f"{action}: {prob} is no probability")
