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
import signal
import subprocess
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from threading import Lock
from time import monotonic, time_ns
from typing import Any

from engines.child import kill_marked, kill_tree
from engines.errors import EngineError, GenerationError, ModelLoadError, translate_errors
from engines.tensorrt_llm_backend.error_texts import with_remedy
from engines.tensorrt_llm_backend.runtime.worker import PROTOCOL

WORKER_SCRIPT = Path(__file__).parent / "runtime" / "worker.py"
HEARTBEAT_S = 0.25  # who waits may stop waiting this often
SILENCE_LIMIT_S = 20.0  # without a beat, while it is not loading: loading holds its interpreter
CLOSE_TIMEOUT_S = 10.0  # for what ends a worker's work, or itself
MARK = "SPECDEC_WORKER"  # a variable of the worker and of all that it starts
# Would let the library report acceptance that never was.
DROPPED_VARIABLES = ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS",)
# In the text of an error: what has failed on the device once fails there until its process ends.
DEVICE_FAILURES = ("CUDA", "cuda", "CUBLAS", "cuBLAS", "NCCL", "out of memory")
NUM_LAST_LINES = 3  # of the log, in an error's text
NUM_LOGS_KEPT = 10
READ_BYTES = 65536


class WorkerDiedError(Exception):
    """The worker is gone, or of no use any more. The text goes on behind 'the worker'."""


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
        kept = {name: text for name, text in os.environ.items() if name not in DROPPED_VARIABLES}
        # Unbuffered, so that a crash leaves its last lines in the log.
        self._env = {**kept, "PYTHONUNBUFFERED": "1", **(env or {})}
        self._logs = logs
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None
        self._ending = Lock()  # two threads may find out at once that it has died
        self._is_asked = False
        self._requests = self._replies = -1
        self._received = b""
        self._num_log_bytes = 0  # that were told
        self.log: Path | None = None

    @property
    def is_alive(self) -> bool:
        process = self._process
        return process is not None and process.poll() is None

    def open(self, timeout_s: float, **request: Any) -> Generator[str | None, None, None]:
        """Start it and let it load, yielding what it says and what it logs, and None meanwhile.

        Closing the generator kills it.

        Raises:
            ModelLoadError: It could not be started, or not load; the text has the end of its log.
        """
        is_loaded = False
        self._is_asked = True
        try:
            with translate_errors("the worker cannot be started", {OSError: ModelLoadError}):
                self._start()
            deadline = monotonic() + timeout_s
            hello = yield from self._narrated(self._receive(deadline))
            if hello.get("protocol") != PROTOCOL:
                raise WorkerDiedError(f"speaks protocol {hello.get('protocol')}, not {PROTOCOL}")
            self._remove_folder()  # both ends of both pipes are open
            self._send({"op": "open", **request})
            while True:
                reply = yield from self._narrated(self._receive(deadline))
                match reply["type"]:
                    case "progress":
                        yield str(reply["text"])
                    case "error":
                        text = f"loading failed: {_text_of(reply)}{self._last_lines()}"
                        raise ModelLoadError(with_remedy(text))
                    case "result":
                        is_loaded = True
                        return
        except TimeoutError as exc:
            raise ModelLoadError(
                f"loading failed: it took longer than {timeout_s:,.0f} s{self._last_lines()}; look "
                "there for what it waited for, or raise start_timeout_s"
            ) from exc
        except WorkerDiedError as exc:
            text = f"loading failed: the worker {exc}{self._last_lines()}"
            raise ModelLoadError(with_remedy(text)) from exc
        finally:
            self._is_asked = False
            if not is_loaded:
                self.kill()

    def ask(
        self, operation: str, timeout_s: float, **values: Any
    ) -> Generator[dict[str, Any] | None, None, dict[str, Any]]:
        """Let it do something, yielding what it sends meanwhile, and None while it is silent.

        Closing the generator before its end leaves the worker at work: `cancel` it, or `kill` the
        worker.

        Args:
            operation: Its name.
            timeout_s: The longest from one message to the next.
            values: The operation's arguments.

        Returns:
            The result.

        Raises:
            GenerationError: It failed. Where the worker is gone, `is_alive` says so.
        """
        self._is_asked = True
        try:
            self._send({"op": operation, **values})
            while True:
                reply = yield from self._receive(monotonic() + timeout_s, SILENCE_LIMIT_S)
                match reply["type"]:
                    case "item":
                        yield reply
                    case "result":
                        return reply
                    case "error":
                        text = f"generating failed: {_text_of(reply)}"
                        if any(part in text for part in DEVICE_FAILURES):
                            self.kill()
                            text = f"{text}; the next run loads anew"
                        raise GenerationError(with_remedy(text))
        except TimeoutError as exc:
            self.kill()
            raise GenerationError(
                f"generating failed: the worker did not answer within {timeout_s:,.0f} s and was "
                f"ended{self._last_lines()}; the next run loads anew, with a larger step_timeout_s "
                "if that is too short"
            ) from exc
        except WorkerDiedError as exc:
            self.kill()
            text = f"generating failed: the worker {exc}{self._last_lines()}; the next run loads"
            raise GenerationError(with_remedy(f"{text} anew")) from exc
        finally:
            self._is_asked = False

    def cancel(self, asked: Generator[Any, None, Any]) -> None:
        """End what was asked of it. Where that does not end, the worker does.

        Args:
            asked: What `ask` returned.
        """
        deadline = monotonic() + CLOSE_TIMEOUT_S
        try:
            self._send({"op": "cancel"})
            for _ in asked:
                if monotonic() > deadline:
                    self.kill()
                    return
        except WorkerDiedError:
            self.kill()
        except GenerationError:  # so it has ended
            pass

    def close(self) -> None:
        """Let it shut the library down, and end it. Where it is at work, it just ends."""
        if self.is_alive and not self._is_asked:
            try:
                for _ in self.ask("close", CLOSE_TIMEOUT_S):
                    pass
            except EngineError:  # it ends either way
                pass
        self.kill()

    def kill(self) -> None:
        """End it and everything it started. Calling it twice is allowed, also at once."""
        with self._ending:
            process, self._process = self._process, None
            pipes, self._requests, self._replies = (self._requests, self._replies), -1, -1
        if process is not None:
            kill_tree(process)
            assert self._folder is not None
            kill_marked(MARK, self._folder)  # a worker that died has no descendants any more
            atexit.unregister(self.kill)
        for descriptor in pipes:
            if descriptor >= 0:
                os.close(descriptor)
        self._remove_folder()

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
                    env={**self._env, MARK: self._folder},
                )
            except OSError as exc:
                text = f"cannot be run by '{self._command[0]}': {exc.strerror}"
                raise WorkerDiedError(text) from exc
        atexit.register(self.kill)

    def _remove_folder(self) -> None:
        if self._folder is not None:  # its name stays: it is the mark
            shutil.rmtree(self._folder, ignore_errors=True)

    def _new_log(self) -> Path:
        self._logs.mkdir(parents=True, exist_ok=True)
        for old in sorted(self._logs.glob("worker-*.log"))[: 1 - NUM_LOGS_KEPT]:
            old.unlink(missing_ok=True)
        return self._logs / f"worker-{time_ns()}.log"

    def _send(self, request: Mapping[str, Any]) -> None:
        data = json.dumps(request).encode() + b"\n"
        deadline = monotonic() + SILENCE_LIMIT_S
        while data:
            process = self._running()
            if _is_ready(self._requests, select.POLLOUT):
                data = data[self._write(data[: select.PIPE_BUF]) :]
            elif process.poll() is not None:
                raise WorkerDiedError(_end(process))
            elif monotonic() > deadline:
                raise WorkerDiedError(f"took no request for {SILENCE_LIMIT_S:,.0f} s and was ended")

    def _receive(
        self, deadline: float, silence_s: float = inf
    ) -> Generator[None, None, dict[str, Any]]:
        """Return the next message that is no beat, yielding while there is none.

        Raises:
            TimeoutError: None came in time, though it lives.
            WorkerDiedError: It does not.
        """
        heard_at = monotonic()
        while True:
            process = self._running()
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
                raise TimeoutError
            if now - heard_at > silence_s:
                raise WorkerDiedError(f"gave no sign of life for {silence_s:,.0f} s and was ended")
            if _is_ready(self._replies, select.POLLIN):
                data = self._read()
                if not data:
                    raise WorkerDiedError(_end(process))
                self._received += data
            elif process.poll() is not None:
                raise WorkerDiedError(_end(process))
            else:
                yield

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is None:
            raise WorkerDiedError("is not running")
        return process

    def _read(self) -> bytes:
        with _ended_by_another_thread():
            return os.read(self._replies, READ_BYTES)

    def _write(self, data: bytes) -> int:
        with _ended_by_another_thread():
            return os.write(self._requests, data)

    def _narrated(
        self, waiting: Generator[None, None, dict[str, Any]]
    ) -> Generator[str | None, None, dict[str, Any]]:
        """Return what is waited for, yielding what the log gains meanwhile, None where nothing."""
        while True:
            message: dict[str, Any] | None = None
            try:
                next(waiting)
            except StopIteration as ended:
                message = ended.value
            said = self._new_lines()
            yield from said
            if message is not None:
                return message
            if not said:
                yield None

    def _new_lines(self) -> list[str]:
        """Return the whole lines that the log has gained."""
        assert self.log is not None
        try:
            with self.log.open("rb") as log:
                log.seek(self._num_log_bytes)
                whole, _, _ = log.read().rpartition(b"\n")
        except OSError:  # another page has tidied up
            return []
        self._num_log_bytes += len(whole) + bool(whole)
        lines = (line.strip() for line in whole.decode(errors="replace").splitlines())
        return [line for line in lines if line]

    def _last_lines(self) -> str:
        if self.log is None:
            return ""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # another page has tidied up
            return ""
        last = " / ".join([line.strip() for line in lines if line.strip()][-NUM_LAST_LINES:])
        return f" (its log, {self.log}, ends: {last})" if last else f" (its log is {self.log})"


def _end(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(timeout=CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "closed its pipe and was ended"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


@contextmanager
def _ended_by_another_thread() -> Iterator[None]:
    """Say so where a pipe is closed in the moment it is used."""
    try:
        yield
    except OSError as exc:
        raise WorkerDiedError("was ended") from exc


def _is_ready(descriptor: int, event: int) -> bool:
    """Wait a little for a pipe. `select` would refuse the 1,025th file of a process."""
    if descriptor < 0:  # closed by another thread
        return False
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(HEARTBEAT_S * 1000))


def _text_of(reply: Mapping[str, Any]) -> str:
    message = str(reply["message"]).strip().partition("\n")[0]
    return message or str(reply["error"])
