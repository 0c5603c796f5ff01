"""Which interpreter is asked, what it says, and the remedy where it has no TensorRT-LLM."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engines.errors import BackendUnavailableError
from engines.tensorrt_llm_backend import installation
from engines.tensorrt_llm_backend.installation import (
    PYTHON_VARIABLE,
    find_installation,
    how_to_install,
    interpreter,
    release_of,
)
from tests.engines.tensorrt_llm.conftest import Install, write_program
from tests.engines.test_child import ends
from tests.fake_tensorrt_llm.scenario import ImportFault, Scenario, Version


def complaint(option: str | None = None, *, is_imported: bool = False) -> str:
    with pytest.raises(BackendUnavailableError) as caught:
        find_installation(option, is_imported=is_imported)
    return str(caught.value)


def test_the_option_comes_before_the_variable(install: Install):
    first, second = install(), install()

    assert find_installation(str(first.python)).python == str(first.python)
    assert find_installation().python == str(second.python)


def test_without_either_this_interpreter_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)

    assert interpreter() == sys.executable


def test_what_make_trtllm_made_is_asked_where_this_one_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    made = write_program(tmp_path / "python", "")
    monkeypatch.setattr(installation, "MADE", made)

    assert interpreter() == str(made)


def test_a_bare_name_is_looked_for_on_the_path(install: Install, monkeypatch: pytest.MonkeyPatch):
    fake = install()
    monkeypatch.setenv(PYTHON_VARIABLE, "python")

    assert find_installation().python == str(fake.python)


@pytest.mark.parametrize("named", ["/none/python", "~nobody-of-that-name/python", "/tmp"])
def test_what_is_no_program_is_named_with_its_source(named: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(PYTHON_VARIABLE, named)

    assert complaint() == (
        f"SPECDEC_TRTLLM_PYTHON names '{named}', which is no program: name the Python that has "
        "TensorRT-LLM"
    )
    assert complaint(named).startswith(f"the option names '{named}', which is no program")


@pytest.mark.parametrize(
    ("version", "has_engines", "is_two_model"),
    [
        ("1.0.0", True, True),
        ("1.2.1", True, True),
        ("1.3.0rc15", True, False),
        ("1.4.0rc1", False, False),
    ],
)
def test_the_flows_of_a_version_are_told(
    version: Version, has_engines: bool, is_two_model: bool, install: Install
):
    install(Scenario(version=version))

    found = find_installation()

    assert found.version == version
    assert found.builds_engines == found.runs_engines == has_engines
    assert found.runs_pytorch
    assert found.is_two_model == is_two_model
    engines = ("builds and runs engines",) if has_engines else ()
    assert found.flows == (*engines, "runs the PyTorch flow")
    assert found.python_version == platform.python_version()


def test_asking_imports_nothing(install: Install):
    install(Scenario(import_="fail"))

    assert find_installation().version == "1.2.1"
    assert "tensorrt_llm" not in sys.modules


def test_an_import_that_works_is_no_complaint(install: Install):
    install()

    assert find_installation(is_imported=True) == find_installation()


@pytest.fixture
def typed() -> Iterator[None]:
    """Give this process a standard input with something in it."""
    before = os.dup(0)
    reading, writing = os.pipe()
    os.write(writing, b"for somebody else")
    os.dup2(reading, 0)
    yield
    os.dup2(before, 0)
    for descriptor in (before, reading, writing):
        os.close(descriptor)


def test_an_import_that_reads_standard_input_finds_none(install: Install, typed: None):
    fake = install(Scenario(import_="stdin"))

    find_installation(is_imported=True)

    assert [call["args"] for call in fake.read_calls("stdin")] == [{"num_bytes": 0}]


@pytest.mark.parametrize(
    ("fault", "reason", "remedy"),
    [
        ("fail", "ImportError: libmpi.so.40", "'sudo apt-get install libopenmpi-dev'"),
        ("libpython", "OSError: libpython3.12.so.1.0", "on Debian, install libpython3-dev"),
    ],
)
def test_an_import_that_fails_has_its_reason_and_its_remedy(
    fault: ImportFault, reason: str, remedy: str, install: Install
):
    fake = install(Scenario(import_=fault))

    text = complaint(is_imported=True)

    assert text.startswith(f"'{fake.python}' cannot import TensorRT-LLM 1.2.1 ({reason}")
    assert text.endswith(remedy)


def test_an_import_that_hangs_is_killed_in_time(install: Install, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(installation, "IMPORT_TIMEOUT_S", 1.0)
    fake = install(Scenario(import_="hang"))
    before = psutil.Process().children(recursive=True)

    assert complaint(is_imported=True) == (
        f"'{fake.python}' cannot import TensorRT-LLM 1.2.1 (its import did not end within 1 s, "
        "and the last it said was: [TensorRT-LLM] TensorRT-LLM version: 1.2.1): MPI, which it "
        "starts, may wait for a network: run python -c 'import tensorrt_llm' in a terminal, and "
        "Ctrl-C shows where it waits"
    )
    assert psutil.Process().children(recursive=True) == before


def test_an_import_that_ends_the_process_is_told_with_its_last_words(
    install: Install, tmp_path: Path
):
    fake = install()
    python = write_program(
        tmp_path / "python", f'{fake.python} "$1"; echo "PMIX ERROR: no sockets"; exit 3'
    )

    assert complaint(str(python), is_imported=True) == (
        f"'{python}' cannot import TensorRT-LLM 1.2.1 (its process ended with status 3, and the "
        "last it said was: PMIX ERROR: no sockets): Open MPI is missing or broken: on Debian, "
        "'sudo apt-get install libopenmpi-dev'"
    )


def test_what_an_import_leaves_running_is_not_waited_for_but_killed(
    install: Install, tmp_path: Path
):
    fake = install()
    python = write_program(
        tmp_path / "python", f'sleep 600 & echo $! > {tmp_path}/pid; exec {fake.python} "$@"'
    )

    assert find_installation(str(python), is_imported=True).version == "1.2.1"
    assert ends(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("lines", "end"),
    [
        ("exit 1", "its process ended with status 1"),
        (
            "echo 'SyntaxError: invalid syntax'; exit 1",
            "its process ended with status 1, and the last it said was: SyntaxError: invalid "
            "syntax",
        ),
    ],
)
def test_a_program_that_does_not_answer_is_no_python_of_use(lines: str, end: str, tmp_path: Path):
    python = write_program(tmp_path / "python", lines)

    assert complaint(str(python)) == (
        f"'{python}' did not say what it has ({end}): name a Python 3.10 or newer"
    )


def test_a_program_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(installation, "ANSWER_TIMEOUT_S", 0.2)
    python = write_program(tmp_path / "python", "sleep 600")

    assert "did not say what it has (it did not end within 0 s)" in complaint(str(python))


def test_a_file_that_cannot_be_run_is_told(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/none/interpreter\n")
    python.chmod(0o755)

    assert complaint(str(python)) == f"'{python}' cannot be run: No such file or directory"


def test_an_interpreter_without_it_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)

    assert complaint(is_imported=True) == (
        f"'{sys.executable}' (Python {platform.python_version()}) has no TensorRT-LLM: "
        f"{how_to_install()}"
    )


@pytest.mark.parametrize("version", ["3.10", "3.12"])
def test_where_a_python_of_its_wheels_is_here_one_command_installs_it(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_program(tmp_path / f"python{version}", "")
    monkeypatch.setenv("PATH", str(tmp_path))

    assert how_to_install().startswith(f"run 'make trtllm' (it takes python{version}), or ")
    assert "docker run --rm -it --ipc host --gpus all" in how_to_install()


def test_a_python_that_is_named_but_does_not_run_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_program(tmp_path / "python3.12", "exit 127")
    write_program(tmp_path / "python3.10", "")
    monkeypatch.setenv("PATH", str(tmp_path))

    assert "it takes python3.10" in how_to_install()


def test_where_no_python_of_its_wheels_is_here_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))

    assert how_to_install().startswith(
        "its wheels are for Python 3.12 and 3.10, and neither is here: install python3.12 and run "
        "'make trtllm', or use the container: docker build"
    )


@pytest.mark.parametrize(
    ("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "riscv64")]
)
def test_where_it_does_not_run_nothing_is_to_be_installed(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)

    assert how_to_install() == (
        "it runs on Linux (x86_64 and aarch64) with an NVIDIA GPU, not on "
        f"{system} {machine}; the transformers back end runs here"
    )


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("1.2.1", (1, 2, 1)), ("1.3.0rc15", (1, 3, 0)), ("580.95.05", (580, 95, 5)), ("none", (0,))],
)
def test_a_release_is_the_numbers_of_a_version(version: str, numbers: tuple[int, ...]):
    assert release_of(version) == numbers
