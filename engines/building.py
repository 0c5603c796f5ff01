"""Builds as numbered stages, and what a stage does most: let a child fill a folder of the store."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from engines.base import BuildProgress
from engines.child import PROGRESS_PREFIX, child_lines
from engines.errors import EngineBuildError, translate_errors
from engines.store import STORE_VARIABLE, EngineStore

SPARE_BYTES = 64 * 1024 * 1024  # for the small files and the file system
OFFLINE = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a build."""

    name: str
    run: Callable[[], Generator[str | None, None, None]]  # log lines; None is a sign of life


def run_stages(stages: Sequence[Stage]) -> Generator[BuildProgress, None, None]:
    """Run stages one after the other, yielding as each begins and whenever it says something."""
    started = perf_counter()
    for number, stage in enumerate(stages, start=1):
        yield BuildProgress(number, len(stages), stage.name, perf_counter() - started)
        with closing(stage.run()) as messages:
            for message in messages:
                elapsed_s = perf_counter() - started
                progress = BuildProgress(number, len(stages), stage.name, elapsed_s)
                if message is not None and message.startswith(PROGRESS_PREFIX):
                    done, total = map(int, message.removeprefix(PROGRESS_PREFIX).split())
                    yield replace(progress, done_bytes=done, total_bytes=total)
                else:
                    yield replace(progress, message=message)


def build_into_store(
    store: EngineStore,
    name: str,
    key: str,
    identity: Mapping[str, Any],
    *,
    num_bytes: Callable[[], int],
    command: Callable[[Path], list[str]],
    action: str,
    result: str = "",
    env: Mapping[str, str] = OFFLINE,
    timeout_s: float | None = None,
    is_tied: bool = False,
) -> Generator[str | None, None, None]:
    """Let a child process fill a folder aside, and store that; nothing where it is there already.

    Args:
        store: Where it goes.
        name: For people.
        key: Of the engine.
        identity: What the key is made of.
        num_bytes: How much room it needs.
        command: The child's, for the folder it is lent.
        action: What the child does, for messages.
        result: The part of that folder that is kept: its name, "" for the whole.
        env: Variables for the child, on top of this process's own.
        timeout_s: The longest that the child may take; None: as long as it wants.
        is_tied: The child ends with this process, see `child_lines`.

    Raises:
        EngineBuildError: It failed, took too long, or there is no room.
    """
    with store.lock(key):
        if store.holds(key):
            yield "built already"
            return
        _require_space(store, num_bytes(), action)
        with store.aside(key) as folder:
            yield from child_lines(
                command(folder), action=action, env=env, timeout_s=timeout_s, is_tied=is_tied
            )
            with translate_errors("storing the engine", {OSError: EngineBuildError}):
                entry = store.commit(folder / result, key=key, name=name, identity=identity)
    yield f"stored as {entry.key}, {entry.num_bytes / 1e6:.0f} MB"


def _require_space(store: EngineStore, num_bytes: int, action: str) -> None:
    needed = num_bytes + SPARE_BYTES
    free = shutil.disk_usage(store.root).free
    if free < needed:
        raise EngineBuildError(
            f"{action} needs about {needed / 1e6:,.0f} MB in {store.root}, where "
            f"{free / 1e6:,.0f} MB are free: make room, or set {STORE_VARIABLE} to a folder on "
            "another disk"
        )
