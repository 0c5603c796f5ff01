"""The worker as the page's process sees it: start, ask, wait with limits, kill with all it started.

Requests and replies go through two named pipes; what the worker and its library print is its log,
which is kept.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from time import monotonic, time_ns
from typing import Any

from engines.child import kill_tree
from engines.errors import EngineError, GenerationError, ModelLoadError
from engines.tensorrt_llm_backend.error_texts import with_remedy
from engines.tensorrt_llm_backend.runtime.worker import PROTOCOL

WORKER_SCRIPT = Path(__file__).parent / "runtime" / "worker.py"
HEARTBEAT_S = 0.25  # who waits may stop waiting this often
SILENCE_LIMIT_S = 20.0  # without a beat, while it is not loading: loading holds its interpreter
CLOSE_TIMEOUT_S = 10.0
NUM_LAST_LINES = 3  # of the log, in an error's text
NUM_LOGS_KEPT = 10
READ_BYTES = 65536


class WorkerDiedError(Exception):
    """The worker is gone, or was killed since it did not answer."""


class Worker:
    """One worker process. It is started by `open`, and gone after `kill` or any failure of it."""

    def __init__(
        self,
        python: str,
        *,
        logs: Path,
        launcher: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare one without starting it.

        Args:
            python: The interpreter that has TensorRT-LLM.
            logs: The folder for its log; the newest are kept.
            launcher: What is put before its command, such as mpirun with its options.
            env: Variables set on top of this process's own.
        """
        self._command = [*shlex.split(launcher), python, str(WORKER_SCRIPT)]
        self._env = {**os.environ, **(env or {})}
        self._logs = logs
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None
        self._requests = self._replies = -1
        self._received = b""
        self._num_log_bytes = 0  # that were told
        self.log: Path | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None

    def open(self, timeout_s: float, **request: Any) -> Generator[str | None, None, dict[str, Any]]:
        """Start it and let it load, yielding what it says and what it logs, and None meanwhile.

        Closing the generator kills it.

        Returns:
            What it tells of what it loaded.

        Raises:
            ModelLoadError: It could not be started, or not load; the text has the end of its log.
        """
        is_loaded = False
        try:
            self._start()
            deadline = monotonic() + timeout_s
            hello = yield from self._narrated(self._receive(deadline, silence_s=timeout_s))
            if hello.get("protocol") != PROTOCOL:
                raise WorkerDiedError(f"it speaks protocol {hello.get('protocol')}, not {PROTOCOL}")
            self._send({"op": "open", **request})
            while True:
                reply = yield from self._narrated(self._receive(deadline, silence_s=timeout_s))
                match reply["type"]:
                    case "progress":
                        yield str(reply["text"])
                    case "error":
                        raise ModelLoadError(
                            with_remedy(f"loading failed: {_text_of(reply)}{self._last_lines()}")
                        )
                    case "result":
                        is_loaded = True
                        return reply
        except WorkerDiedError as exc:
            raise ModelLoadError(
                with_remedy(f"the worker ended while loading: {exc}{self._last_lines()}")
            ) from exc
        finally:
            if not is_loaded:
                self.kill()

    def ask(
        self, operation: str, timeout_s: float, **values: Any
    ) -> Generator[dict[str, Any] | None, None, dict[str, Any]]:
        """Let it do something, yielding what it sends meanwhile, and None while it is silent.

        Closing the generator before its end leaves the worker at work: `kill` it.

        Args:
            operation: Its name.
            timeout_s: The longest from one message to the next.
            values: The operation's arguments.

        Returns:
            The result.

        Raises:
            GenerationError: It failed. Where the worker is gone, `is_alive` says so.
        """
        try:
            self._send({"op": operation, **values})
            while True:
                reply = yield from self._receive(monotonic() + timeout_s, silence_s=SILENCE_LIMIT_S)
                match reply["type"]:
                    case "item":
                        yield reply
                    case "result":
                        return reply
                    case "error":
                        raise GenerationError(with_remedy(f"generating failed: {_text_of(reply)}"))
        except WorkerDiedError as exc:
            text = f"the worker ended while generating: {exc}{self._last_lines()}"
            self.kill()
            raise GenerationError(with_remedy(text)) from exc

    def cancel(self) -> None:
        """Ask it to end what it is doing, where it can."""
        self._send({"op": "cancel"})

    def close(self) -> None:
        """Let it shut the library down, and end it."""
        if self.is_alive:
            try:
                for _ in self.ask("close", CLOSE_TIMEOUT_S):
                    pass
            except EngineError:  # it ends either way
                pass
        self.kill()

    def kill(self) -> None:
        """End it and everything it started. Calling it twice is allowed."""
        if self._process is not None:
            kill_tree(self._process)
            atexit.unregister(self.kill)
            self._process = None
        for descriptor in (self._requests, self._replies):
            if descriptor >= 0:
                os.close(descriptor)
        self._requests = self._replies = -1
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="specdec-worker-")
        pipes = {name: os.path.join(self._folder, name) for name in ("requests", "replies")}
        for path in pipes.values():
            os.mkfifo(path)
        # Both ends of the first, so that it can be opened now; the worker still sees our end.
        self._requests = os.open(pipes["requests"], os.O_RDWR | os.O_NONBLOCK)
        self._replies = os.open(pipes["replies"], os.O_RDONLY | os.O_NONBLOCK)
        self._received = b""
        self._num_log_bytes = 0
        self.log = self._new_log()
        arguments = [part for name, path in pipes.items() for part in (f"--{name}", path)]
        with self.log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [*self._command, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=self._env,
                )
            except OSError as exc:
                raise WorkerDiedError(
                    f"'{self._command[0]}' cannot be run: {exc.strerror}"
                ) from exc
        atexit.register(self.kill)

    def _new_log(self) -> Path:
        self._logs.mkdir(parents=True, exist_ok=True)
        for old in sorted(self._logs.glob("worker-*.log"))[: 1 - NUM_LOGS_KEPT]:
            old.unlink(missing_ok=True)
        return self._logs / f"worker-{time_ns()}.log"

    def _send(self, request: Mapping[str, Any]) -> None:
        data = json.dumps(request).encode() + b"\n"
        deadline = monotonic() + SILENCE_LIMIT_S
        while data and self.is_alive:
            _, is_writable, _ = select.select([], [self._requests], [], HEARTBEAT_S)
            if is_writable:
                data = data[os.write(self._requests, data[: select.PIPE_BUF]) :]
            elif monotonic() > deadline:
                raise WorkerDiedError(f"it took no request for {SILENCE_LIMIT_S:.0f} s")
        if data:
            raise WorkerDiedError("it is not running")

    def _receive(
        self, deadline: float, *, silence_s: float
    ) -> Generator[None, None, dict[str, Any]]:
        """Return the next message that is no beat, yielding while there is none."""
        assert self._process is not None
        heard_at = monotonic()
        while True:
            line, separator, rest = self._received.partition(b"\n")
            if separator:
                self._received = rest
                message: dict[str, Any] = json.loads(line)
                heard_at = monotonic()
                if message["type"] != "beat":
                    return message
                continue
            now = monotonic()
            if now > deadline:
                raise WorkerDiedError("it did not answer in time")
            if now - heard_at > silence_s:
                raise WorkerDiedError(f"it gave no sign of life for {silence_s:.0f} s")
            is_readable, _, _ = select.select([self._replies], [], [], HEARTBEAT_S)
            if is_readable:
                data = os.read(self._replies, READ_BYTES)
                if not data:
                    raise WorkerDiedError(self._end())
                self._received += data
            elif self._process.poll() is not None:
                raise WorkerDiedError(self._end())
            else:
                yield

    def _narrated(
        self, waiting: Generator[None, None, dict[str, Any]]
    ) -> Generator[str | None, None, dict[str, Any]]:
        """Return what is waited for, yielding what the log gains meanwhile, None where nothing."""
        assert self.log is not None
        while True:
            try:
                next(waiting)
            except StopIteration as ended:
                message: dict[str, Any] = ended.value
                return message
            with self.log.open("rb") as log:
                log.seek(self._num_log_bytes)
                whole, _, _ = log.read().rpartition(b"\n")
            self._num_log_bytes += len(whole) + bool(whole)
            lines = [line.strip() for line in whole.decode(errors="replace").splitlines()]
            said = [line for line in lines if line]
            yield from said
            if not said:
                yield None

    def _end(self) -> str:
        assert self._process is not None
        try:
            status = self._process.wait(timeout=CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        return f"it was killed by signal {-status}" if status < 0 else f"it ended with {status}"

    def _last_lines(self) -> str:
        if self.log is None:
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = " / ".join([line.strip() for line in lines if line.strip()][-NUM_LAST_LINES:])
        return f" (its log, {self.log}, ends: {last})" if last else f" (its log is {self.log})"


def _text_of(reply: Mapping[str, Any]) -> str:
    message = str(reply["message"]).strip().partition("\n")[0]
    return message or str(reply["error"])
