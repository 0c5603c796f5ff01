"""Which interpreter has TensorRT-LLM, what is in it, and what is missing with its remedy.

Nothing is imported here: the interpreter is asked in a child process, with a time limit.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engines.child import PROJECT_ROOT, kill_tree
from engines.errors import BackendUnavailableError
from engines.tensorrt_llm_backend.error_texts import remedy_for
from engines.tensorrt_llm_backend.runtime.probe import MARK

PYTHON_VARIABLE = "SPECDEC_TRTLLM_PYTHON"
MADE = PROJECT_ROOT / ".venv-trtllm" / "bin" / "python"  # by `make trtllm`
PROBE = Path(__file__).parent / "runtime" / "probe.py"
ANSWER_TIMEOUT_S = 20.0  # to say what is installed
IMPORT_TIMEOUT_S = 180.0  # to import it: a cold disk is slow
VERSION = "1.2.1"  # the last stable one that builds engines: what `make trtllm` installs
PYTHONS = ("3.12", "3.10")  # that it has wheels for
MACHINES = ("x86_64", "aarch64")


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

    Where this one has no TensorRT-LLM, it is the one that `make trtllm` has made, if any.

    Raises:
        BackendUnavailableError: What is named is no program.
    """
    for source, named in (
        ("the option", option),
        (PYTHON_VARIABLE, os.environ.get(PYTHON_VARIABLE)),
    ):
        if named:
            found = shutil.which(os.path.expanduser(named))
            if found is None:
                raise BackendUnavailableError(
                    f"{source} names '{named}', which is no program: name the Python that has "
                    "TensorRT-LLM"
                )
            return found
    if find_spec("tensorrt_llm") is None and MADE.is_file():
        return str(MADE)
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
            f"'{python}' cannot import TensorRT-LLM {facts['tensorrt_llm']} ({error}): "
            f"{remedy_for(error) or how_to_install()}"
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
    python = next((name for name in PYTHONS if _runs(f"python{name}")), None)
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


def _runs(program: str) -> bool:
    """Return whether a Python runs: one that a version manager merely names does not."""
    if shutil.which(program) is None:
        return False
    try:
        command = [program, "-c", ""]
        answer = subprocess.run(command, capture_output=True, timeout=ANSWER_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0


def _ask(python: str, *, is_imported: bool) -> dict[str, Any]:
    """Return all that the probe has said, also where it did not come to an end."""
    command = [python, str(PROBE), *(["--import"] if is_imported else [])]
    timeout_s = IMPORT_TIMEOUT_S if is_imported else ANSWER_TIMEOUT_S
    # A file, not a pipe: what the import starts may hold a pipe open for ever.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as exc:
            raise BackendUnavailableError(f"'{python}' cannot be run: {exc.strerror}") from exc
        try:
            process.wait(timeout_s)
            end = f"its process ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            end = f"{'its import' if is_imported else 'it'} did not end within {timeout_s:.0f} s"
        finally:
            kill_tree(process)
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.strip()]
    facts: dict[str, Any] = {}
    for line in lines:
        if line.startswith(MARK):
            facts |= json.loads(line.removeprefix(MARK))
    said = [line for line in lines if not line.startswith(MARK)]
    if said:
        end += f", and the last it said was: {said[-1]}"
    if "tensorrt_llm" not in facts:
        raise BackendUnavailableError(
            f"'{python}' did not say what it has ({end}): name a Python 3.10 or newer"
        )
    if is_imported:
        facts.setdefault("import_error", end)
    return facts
