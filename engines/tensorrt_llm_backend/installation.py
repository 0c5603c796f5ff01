"""Which interpreter has TensorRT-LLM, what is in it, and what is missing with its remedy.

Nothing is imported here: the interpreter is asked in a child process, with a time limit.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import BackendUnavailableError
from engines.tensorrt_llm_backend.runtime.probe import MARK

PYTHON_VARIABLE = "SPECDEC_TRTLLM_PYTHON"
PROBE = Path(__file__).parent / "runtime" / "probe.py"
ANSWER_TIMEOUT_S = 20.0  # to say what is installed
IMPORT_TIMEOUT_S = 180.0  # to import it: a cold disk is slow
VERSION = "1.2.1"  # the last stable one that builds engines: what `make trtllm` installs
PYTHONS = ("3.12", "3.10")  # that it has wheels for
MACHINES = ("x86_64", "aarch64")
IMAGE = f"nvcr.io/nvidia/tensorrt-llm/release:{VERSION}"


@dataclass(frozen=True, slots=True)
class Installation:
    """One interpreter that has TensorRT-LLM."""

    python: str  # its path
    version: str  # of tensorrt_llm
    python_version: str
    torch_version: str | None
    runs_engines: bool
    builds_engines: bool
    runs_pytorch: bool

    @property
    def flows(self) -> tuple[str, ...]:
        """Return what it can do, in words."""
        flows = []
        if self.builds_engines and self.runs_engines:
            flows.append("builds and runs engines")
        elif self.runs_engines:
            flows.append("runs engines")
        if self.runs_pytorch:
            flows.append("runs the PyTorch flow")
        return tuple(flows)

    @property
    def is_two_model(self) -> bool:
        """Whether its PyTorch flow keeps the draft as a second engine: up to 1.2."""
        return release_of(self.version) < (1, 3)


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (1, 3, 0) for 1.3.0rc15."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else (0,)


def interpreter(option: str | None = None) -> str:
    """Return the interpreter to ask: the option, the environment variable, or this one.

    Raises:
        BackendUnavailableError: What is named is no program.
    """
    for source, named in (
        ("the option", option),
        (PYTHON_VARIABLE, os.environ.get(PYTHON_VARIABLE)),
    ):
        if named:
            found = shutil.which(Path(named).expanduser())
            if found is None:
                raise BackendUnavailableError(
                    f"{source} names '{named}', which is no program: name the Python that has "
                    "TensorRT-LLM"
                )
            return found
    return sys.executable


def find_installation(option: str | None = None, *, is_imported: bool = False) -> Installation:
    """Return what the interpreter has that is to be used.

    Args:
        option: Its path; None asks the environment variable, then this interpreter.
        is_imported: Also import the library, which takes long and tells whether it works.

    Raises:
        BackendUnavailableError: There is none, or it does not work; the text has the remedy.
    """
    python = interpreter(option)
    facts = _ask(python, is_imported=is_imported)
    if facts["tensorrt_llm"] is None:
        raise BackendUnavailableError(
            f"'{python}' (Python {facts['python']}) has no TensorRT-LLM: {how_to_install()}"
        )
    if error := facts.get("import_error"):
        raise BackendUnavailableError(
            f"TensorRT-LLM {facts['tensorrt_llm']} cannot be imported by '{python}' ({error})"
            f"{_import_remedy(error)}"
        )
    return Installation(
        python=python,
        version=facts["tensorrt_llm"],
        python_version=facts["python"],
        torch_version=facts["torch"],
        runs_engines=facts["runs_engines"],
        builds_engines=facts["builds_engines"],
        runs_pytorch=facts["runs_pytorch"],
    )


def how_to_install() -> str:
    """Return what to do on this machine to get it: a wheel where there is one, or the container."""
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        return (
            f"it runs on Linux ({' and '.join(MACHINES)}) with an NVIDIA GPU, not on "
            f"{platform.system()} {platform.machine()}; the transformers back end runs here"
        )
    python = next((name for name in PYTHONS if shutil.which(f"python{name}")), None)
    container = (
        "docker build -t specdec-trtllm . && docker run --rm -it --ipc host --gpus all "
        "--network host --ulimit memlock=-1 --ulimit stack=67108864 specdec-trtllm"
    )
    if python is None:
        return (
            f"its wheels are for Python {' and '.join(PYTHONS)}, and neither is here: install "
            f"python{PYTHONS[0]} and run 'make trtllm', or use the container: {container}"
        )
    return f"run 'make trtllm' (it takes python{python}), or use the container: {container}"


def _import_remedy(error: str) -> str:
    if "libpython" in error:
        return ": its Python needs the shared library; on Debian, install libpython3-dev"
    if "libmpi" in error or "mpi4py" in error:
        return ": install Open MPI, on Debian with 'sudo apt-get install libopenmpi-dev'"
    return f": {how_to_install()}"


def _ask(python: str, *, is_imported: bool) -> dict[str, Any]:
    """Return all that the probe has said, also where it did not come to an end."""
    command = [python, str(PROBE), *(["--import"] if is_imported else [])]
    timeout_s = IMPORT_TIMEOUT_S if is_imported else ANSWER_TIMEOUT_S
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as exc:
        raise BackendUnavailableError(f"'{python}' cannot be run: {exc.strerror}") from exc
    is_late = False
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        is_late = True
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    lines = output.splitlines()
    facts: dict[str, Any] = {}
    for line in lines:
        if line.startswith(MARK):
            facts |= json.loads(line.removeprefix(MARK))
    if "tensorrt_llm" not in facts:
        said = next((line for line in reversed(lines) if line.strip()), "nothing")
        late = f" within {timeout_s:.0f} s" if is_late else ""
        raise BackendUnavailableError(
            f"'{python}' did not answer{late} (it said: {said}): name a Python 3.10 or newer"
        )
    if is_late:
        facts["import_error"] = (
            f"no end of it within {timeout_s:.0f} s; it starts MPI, which may wait for a network"
        )
    elif is_imported and facts["tensorrt_llm"] and "draft_target_fields" not in facts:
        facts.setdefault("import_error", f"its process ended with status {process.returncode}")
    return facts
