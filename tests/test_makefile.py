"""`make trtllm`: which Python it takes, what it installs, and what it says where it cannot."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from engines.child import PROJECT_ROOT

# A Python that notes what it is asked, and an environment of which is itself.
PYTHON = """\
#!/bin/sh
case "$*" in
  -c*) echo {name} ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *probe.py*) echo; echo 'specdec-probe: {{"tensorrt_llm": null, "python": "3.12.0"}}' ;;
esac
echo "$*" >> {log}
"""
LDCONFIG = "#!/bin/sh\necho 'libmpi.so.40 => /usr/lib/libmpi.so.40'\n"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for programs that come before the machine's own; neither Python runs at first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python3.12", "python3.10"):
        write_program(folder / name, "#!/bin/sh\nexit 127\n")
    write_program(folder / "ldconfig", LDCONFIG)
    return folder


def write_program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def make_trtllm(programs: Path, environment: Path) -> subprocess.CompletedProcess[str]:
    # $(VENV) is the environment that runs this: it is there, and up to date or older than its list.
    return subprocess.run(
        ["make", "trtllm", f"TRTLLM_VENV={environment}", f"BIN={PROJECT_ROOT}/.venv/bin"],
        cwd=PROJECT_ROOT,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["python3.12", "python3.10"])
def test_the_environment_is_made_with_a_python_that_has_wheels(
    programs: Path, tmp_path: Path, name: str
):
    log = tmp_path / "log"
    write_program(programs / name, PYTHON.format(name=name, log=log))

    result = make_trtllm(programs, tmp_path / "environment")

    assert result.returncode == 0, result.stderr
    asked = log.read_text(encoding="utf-8").splitlines()
    assert f"-m venv {tmp_path / 'environment'}" in asked
    assert "-m pip install -r requirements-tensorrt-llm.txt" in asked
    assert "back end tensorrt_llm" in result.stdout  # doctor has the last word


def test_without_a_python_that_has_wheels_there_is_a_sentence(programs: Path, tmp_path: Path):
    result = make_trtllm(programs, tmp_path / "environment")

    assert result.returncode != 0
    assert "install python3.12 with its venv module, or use the Dockerfile" in result.stdout
    assert not (tmp_path / "environment").exists()


def test_without_open_mpi_there_is_a_sentence(programs: Path, tmp_path: Path):
    write_program(programs / "python3.12", PYTHON.format(name="python3.12", log=tmp_path / "log"))
    write_program(programs / "ldconfig", "#!/bin/sh\n")

    result = make_trtllm(programs, tmp_path / "environment")

    assert result.returncode != 0
    assert "sudo apt-get install libopenmpi-dev" in result.stdout
