"""Recorded runs as files: JSON Lines, a header and then one event a line.

The header names the format and its version, the prompt, the settings and the environment. Reading
checks everything it relies on, since a recording may come from a stranger.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from engines.benchmark import MAX_REPEATS, SIDES, RunEvent, RunRecord
from engines.errors import RecordingError, translate_errors
from engines.events import OUTPUT_ORIGINS, Finish, GenerationEvent, Prefill, Step

FORMAT = "specdec-recording"
VERSION = 1
MAX_BYTES = 64 * 1024 * 1024

_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    kind.__name__.lower(): TypeAdapter(kind) for kind in (Prefill, Step, Finish)
}


def recording_lines(record: RunRecord) -> Iterator[str]:
    """Yield the lines of a recording, without line ends."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "prompt": record.prompt,
        "settings": record.settings,
        "environment": record.environment,
    }
    yield json.dumps(header)
    for side, repeats in record.runs.items():
        for repeat, events in enumerate(repeats):
            for event in events:
                kind = type(event).__name__.lower()
                yield json.dumps({"side": side, "repeat": repeat, "type": kind, **asdict(event)})


def write_recording(record: RunRecord, path: Path) -> None:
    """Write a recording beside its place and rename it there, so that no half of one appears.

    Raises:
        RecordingError: It cannot be written.
    """
    with translate_errors(f"the recording '{path}' cannot be written", {OSError: RecordingError}):
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in recording_lines(record))
            os.replace(aside, path)
        except BaseException:
            os.unlink(aside)
            raise


def read_recording(path: Path) -> RunRecord:
    """Return a recorded run.

    Raises:
        RecordingError: It is missing, too large, of a later version, or not a recording.
    """
    action = f"the recording '{path}' cannot be read"
    with translate_errors(action, {OSError: RecordingError, UnicodeDecodeError: RecordingError}):
        num_bytes = path.stat().st_size
        if num_bytes > MAX_BYTES:
            raise RecordingError(f"{action}: it has {num_bytes:,} bytes, more than {MAX_BYTES:,}")
        lines = path.read_text(encoding="utf-8").splitlines()
    if not lines:
        raise RecordingError(f"{action}: it is empty")
    record = _read_header(_parse(lines[0], action, 1), action)
    for number, line in enumerate(lines[1:], start=2):
        record.apply(_read_event(_parse(line, action, number), f"{action}: line {number}"))
    return record


def _parse(line: str, action: str, number: int) -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number")

    try:
        value = json.loads(line, parse_constant=refuse)
    except (ValueError, RecursionError) as exc:
        raise RecordingError(f"{action}: line {number} is not JSON ({exc})") from exc
    if not isinstance(value, dict):
        raise RecordingError(f"{action}: line {number} is not a JSON object")
    return value


def _read_header(header: dict[str, Any], action: str) -> RunRecord:
    if header.get("format") != FORMAT:
        raise RecordingError(f"{action}: its first line does not say '{FORMAT}'")
    if header.get("version") != VERSION:
        raise RecordingError(
            f"{action}: it has version {header.get('version')!r}, and this program reads {VERSION}"
        )
    prompt, settings, environment = (
        header.get(name) for name in ("prompt", "settings", "environment")
    )
    if not isinstance(prompt, str) or not isinstance(settings, dict):
        raise RecordingError(f"{action}: its header has no prompt or no settings")
    if not isinstance(environment, dict):
        raise RecordingError(f"{action}: its header has no environment")
    return RunRecord(prompt, settings, environment)


def _read_event(line: dict[str, Any], action: str) -> RunEvent:
    side, repeat, kind = line.pop("side", None), line.pop("repeat", None), line.pop("type", None)
    adapter = _ADAPTERS.get(kind) if isinstance(kind, str) else None
    if side not in SIDES or adapter is None:
        raise RecordingError(f"{action} has the side {side!r} and the type {kind!r}")
    if type(repeat) is not int or not 0 <= repeat < MAX_REPEATS:
        raise RecordingError(f"{action} has the repeat {repeat!r}")
    try:
        event: GenerationEvent = adapter.validate_python(line, strict=False)
    except ValidationError as exc:
        error = exc.errors()[0]
        place = ".".join(str(part) for part in error["loc"])
        raise RecordingError(f"{action}: {place}: {error['msg']}") from exc
    _check_event(event, action)
    return RunEvent(side, repeat, event)


def _check_event(event: GenerationEvent, action: str) -> None:
    if not (math.isfinite(event.elapsed_s) and event.elapsed_s >= 0):
        raise RecordingError(f"{action}: elapsed_s is {event.elapsed_s}")
    if not isinstance(event, Step):
        return
    if not all(math.isfinite(value) and value >= 0 for value in (event.draft_s, event.target_s)):
        raise RecordingError(f"{action}: a time is negative or not finite")
    if any(token.origin not in OUTPUT_ORIGINS for token in event.tokens) or any(
        token.origin in OUTPUT_ORIGINS for token in event.rejected
    ):
        raise RecordingError(f"{action}: a token is kept and dropped at once")
    if event.num_draft_tokens != event.num_accepted_tokens + len(event.rejected):
        raise RecordingError(
            f"{action}: {event.num_draft_tokens} drafted tokens, but "
            f"{event.num_accepted_tokens} accepted and {len(event.rejected)} dropped"
        )
