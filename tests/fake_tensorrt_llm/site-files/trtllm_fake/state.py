"""The scenario of this process, the record of its calls, and the faults that end it."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

num_generate_calls = 0


@cache
def scenario() -> dict[str, Any]:
    """Return the fields of the test's Scenario."""
    fields: dict[str, Any] = json.loads(scenario_file().read_text(encoding="utf-8"))
    return fields


def scenario_file() -> Path:
    return Path(os.environ["SPECDEC_FAKE_TRTLLM"])


def log_call(call: str, args: Mapping[str, object]) -> None:
    """Append one line to the record of calls, which a test reads."""
    line = {"call": call, "pid": os.getpid(), "args": _plain(args)}
    with scenario_file().with_name("calls.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _plain(value: Any) -> Any:
    """Return what JSON can hold of an argument.

    Of ids that is all, of other tensors the shape, of settings what differs from the defaults.
    """
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    if type(value).__name__ == "Tensor":
        is_ids = value.dim() <= 1 and not value.is_floating_point()
        return value.tolist() if is_ids else {"Tensor": list(value.shape)}
    if hasattr(value, "differences"):
        return _plain(value.differences())
    return str(value) if isinstance(value, Path) else f"<{type(value).__name__}>"


def generate_fault() -> str:
    """Count a call that generates, and return what goes wrong in it."""
    global num_generate_calls
    num_generate_calls += 1
    fault: str = scenario()["generate"]
    return fault if num_generate_calls > scenario()["generate_after"] else ""


def suffer(fault: str) -> None:
    """Play the faults that every part of the library shares."""
    if fault == "hang":
        hang()
    if fault == "die":
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "oom":
        raise RuntimeError("CUDA out of memory. Tried to allocate 14.96 GiB. GPU 0 has a total ...")
    if fault == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def hang() -> NoReturn:
    while True:
        time.sleep(60)


def require_gpus(count: int = 1) -> list[dict[str, Any]]:
    """Return the GPUs of this machine, of which the library needs so many."""
    gpus: list[dict[str, Any]] = scenario()["gpus"]
    if not gpus:
        raise RuntimeError("Found no NVIDIA driver on your system.")
    if len(gpus) < count:
        raise RuntimeError(f"CUDA error: invalid device ordinal: {count} asked, {len(gpus)} there")
    return gpus


def print_line(text: str) -> None:
    """Print as the library's Python does."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """Print as the library's C++ does: to the process's standard output, whoever replaced it."""
    os.write(1, f"[TensorRT-LLM]{text}\n".encode())


def warn(text: str) -> None:
    os.write(2, f"[TensorRT-LLM][WARNING] {text}\n".encode())
