"""Runs a child process in its own group, streams its lines, kills the group when closed."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

import psutil

from engines.errors import EngineBuildError, EngineError

HEARTBEAT_S = 0.25  # a silent child gives its caller a chance to stop this often
END_TIMEOUT_S = 10.0  # until what was killed has let go of its memory, a GPU's above all
END_INTERVAL_S = 0.01
MARK = "SPECDEC_CHILD"  # a variable of a child and of all that it starts
ERROR_PREFIX = "error: "  # how a child of ours says in one sentence why it failed
PROGRESS_PREFIX = "progress: "  # and how far a download of one is: bytes done, bytes in all
PROJECT_ROOT = Path(__file__).resolve().parent.parent


def own_module(module: str, *args: str) -> list[str]:
    """Return the command that runs one of this project's modules, from any folder.

    -P keeps the working folder off the path: a file in it may be named like a module.
    """
    launcher = f"import runpy, sys; sys.path.insert(0, {str(PROJECT_ROOT)!r}); "
    launcher += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-P", "-c", launcher, *args]


def exit_code_of(work: Callable[[], None]) -> int:
    """Do the work of a child process of ours; where it fails for the user, print the sentence.

    Returns:
        The process's exit code.
    """
    try:
        work()
    except EngineError as exc:
        sys.stdout.write(f"{ERROR_PREFIX}{exc}\n")
        return 1
    return 0


def child_lines(
    args: Sequence[str],
    *,
    action: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    is_tied: bool = False,
) -> Generator[str | None, None, None]:
    """Yield the lines that a child writes to either stream, and None while it is silent.

    Closing the generator kills the child and everything it started.

    Args:
        args: The program and its arguments; no shell is involved.
        action: What the child does, for the message.
        env: Variables set on top of this process's own.
        timeout_s: The longest that the child may take; None: as long as it wants.
        is_tied: Its standard input ends with this process, which it takes as a sign to end, too.

    Raises:
        EngineBuildError: The child failed; the text holds its own sentence, or its last line. Or
            it took too long.
    """
    mark = uuid4().hex
    process = subprocess.Popen(
        args,
        stdin=subprocess.PIPE if is_tied else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, **(env or {}), MARK: mark},
    )
    kill = partial(kill_tree, process)
    atexit.register(kill)  # the program may end with this generator still open
    lines: SimpleQueue[str | None] = SimpleQueue()
    reader = Thread(target=_read_lines, args=(process, lines), daemon=True)
    reader.start()
    last_line, sentence, is_over = "", None, False
    deadline = inf if timeout_s is None else monotonic() + timeout_s
    try:
        while True:
            if monotonic() > deadline:
                said = f"; its last line was: {last_line}" if last_line else ""
                raise EngineBuildError(f"{action}: it did not end within {timeout_s:,.0f} s{said}")
            try:
                line = lines.get(timeout=HEARTBEAT_S)
            except Empty:
                if process.poll() is not None:  # what it left running holds the stream open
                    if is_over:
                        break
                    is_over = True
                    kill()
                yield None
                continue
            if line is None:
                break
            last_line = line
            if line.startswith(ERROR_PREFIX):
                sentence = line.removeprefix(ERROR_PREFIX)
            else:
                yield line
        if process.wait() != 0:
            reason = sentence or last_line or f"exit status {process.returncode}"
            if sentence is None and process.returncode < 0:
                reason = _killed(-process.returncode)
                reason += f"; its last line was: {last_line}" if last_line else ""
            raise EngineBuildError(f"{action}: {reason}")
    finally:
        kill()
        atexit.unregister(kill)
        if process.stdin is not None:
            process.stdin.close()
        reader.join(HEARTBEAT_S)
        if reader.is_alive():  # what has left the group holds the stream open
            kill_marked(MARK, mark)


def _read_lines(process: subprocess.Popen[str], lines: SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if line.strip():
                lines.put(line.rstrip())
    lines.put(None)


def _killed(signal_number: int) -> str:
    """Return why a child is gone that nobody here has killed."""
    why = " (perhaps memory ran out)" if signal_number == signal.SIGKILL else ""
    return f"it was killed by signal {signal_number}{why}"


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a child that leads a group: all of the group, and what has left the group since.

    Calling it twice is allowed.
    """
    if process.returncode is None:  # else its number may be another's by now
        descendants: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(process.pid).children(recursive=True)
        _kill_group(process.pid)
        for descendant in descendants:
            with suppress(psutil.NoSuchProcess):
                descendant.kill()
        process.wait()
        _wait_for(descendants)
    else:  # a group keeps its number as long as any of it lives
        _kill_group(process.pid)


def kill_marked(variable: str, value: str) -> None:
    """Kill every process of this user that has inherited a variable with this value."""
    killed = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is somebody else's
            if process.environ().get(variable) == value:
                process.kill()
                killed.append(process)
    _wait_for(killed)


def _wait_for(processes: Sequence[psutil.Process]) -> None:
    """Wait until processes have ended; nobody need have asked how."""
    deadline = monotonic() + END_TIMEOUT_S
    while any(_lives(process) for process in processes) and monotonic() < deadline:
        sleep(END_INTERVAL_S)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill_group(number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)
