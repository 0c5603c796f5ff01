"""Child processes: lines as they come, one sentence on failure, nothing left when closed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engines.child import PROJECT_ROOT, child_lines, kill_tree, own_module
from engines.errors import EngineBuildError

ENDS_WITHIN_S = 10


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def lines_of(script: str, **options) -> list[str]:
    return [line for line in child_lines(python(script), action="working", **options) if line]


def next_line(lines: Iterator[str | None]) -> str:
    return next(line for line in lines if line is not None)


def test_lines_of_both_streams_come_in_order():
    script = "import sys; print('one'); sys.stdout.flush(); print('two', file=sys.stderr)"

    assert lines_of(script) == ["one", "two"]


def test_lines_come_while_the_child_still_runs():
    script = "import time; print('begun', flush=True); time.sleep(60)"
    lines = child_lines(python(script), action="working")

    assert next_line(lines) == "begun"
    lines.close()


def test_a_silent_child_gives_a_sign_of_life():
    lines = child_lines(python("import time; time.sleep(60)"), action="working")

    assert next(lines) is None
    lines.close()


def test_blank_lines_are_left_out_and_a_progress_bar_becomes_lines():
    assert lines_of(r"print('\n \n10%\r20%\rdone')") == ["10%", "20%", "done"]


def test_bytes_that_are_no_text_are_replaced():
    script = r"import sys; sys.stdout.buffer.write(b'\xff ok\n')"

    assert lines_of(script) == ["\ufffd ok"]


def test_variables_are_set_on_top_of_the_own_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECDEC_OUTER", "outer")
    script = "import os; print(os.environ['SPECDEC_OUTER'], os.environ['SPECDEC_INNER'])"

    assert lines_of(script, env={"SPECDEC_INNER": "inner"}) == ["outer inner"]


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("print('error: no such model'); print('bye'); exit(1)", "working: no such model"),
        ("print('Traceback'); print('KeyError: 3'); exit(1)", "working: KeyError: 3"),
        ("exit(3)", "working: exit status 3"),
        (
            "import os; os.kill(os.getpid(), 9)",
            "working: it was killed by signal 9 (perhaps memory ran out)",
        ),
    ],
    ids=["its own sentence", "its last line", "its exit status", "killed"],
)
def test_a_failed_child_is_told_in_one_sentence(script: str, sentence: str):
    with pytest.raises(EngineBuildError) as failure:
        lines_of(script)

    assert str(failure.value) == sentence


def ends(pid: int) -> bool:
    """Return whether a process ends soon, be it as a zombie that nobody collects."""
    for _ in range(ENDS_WITHIN_S):
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            process.wait(timeout=1)
        except psutil.NoSuchProcess:
            return True
        except psutil.TimeoutExpired:
            continue
    return False


def test_closing_kills_the_child_and_what_it_started():
    script = (
        "import os, subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(os.getpid(), child.pid, flush=True); time.sleep(60)"
    )
    lines = child_lines(python(script), action="working")
    pids = [int(pid) for pid in next_line(lines).split()]
    assert all(psutil.pid_exists(pid) for pid in pids)

    lines.close()

    assert all(ends(pid) for pid in pids)


def test_what_a_finished_child_left_running_is_killed():
    script = (
        "import subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(child.pid)"
    )
    (line,) = lines_of(script)

    assert ends(int(line))


@pytest.mark.parametrize(
    "script", ["time.sleep(60)", "while True: print('at work')"], ids=["silent", "talking"]
)
def test_a_child_that_takes_too_long_is_killed_and_told(script: str):
    script = f"import os, time\nprint(os.getpid(), 'at work', flush=True)\n{script}"
    lines = child_lines(python(script), action="working", timeout_s=1.0)
    pid = int(next_line(lines).split()[0])

    with pytest.raises(
        EngineBuildError, match=r"^working: it did not end within 1 s; its last line .*: .*at work$"
    ):
        list(lines)
    assert ends(pid)


def test_a_child_that_said_nothing_in_time_has_no_last_line():
    with pytest.raises(EngineBuildError, match=r"^working: it did not end within 1 s$"):
        lines_of("import time; time.sleep(60)", timeout_s=0.6)


def test_a_child_that_ends_in_time_is_left_alone():
    assert lines_of("print('one')", timeout_s=60.0) == ["one"]


FAMILY = """
import subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_killing_a_tree_kills_what_has_left_its_group():
    with subprocess.Popen(
        python(FAMILY), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        pid = pid_of_child(process)
        kill_tree(process)
        kill_tree(process)

    assert process.returncode == -signal.SIGKILL
    assert ends(pid)


def test_killing_a_tree_whose_head_has_ended_kills_the_rest_of_its_group():
    script = FAMILY.replace(", start_new_session=True", "").replace("time.sleep(600)\n", "")
    with subprocess.Popen(
        python(script), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        pid = pid_of_child(process)
        process.wait(timeout=60)
        kill_tree(process)

    assert ends(pid)


PROGRAM = """
import signal, sys, threading
from engines.child import child_lines

CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
begun = threading.Event()

def watch():
    for line in child_lines([sys.executable, "-c", CHILD], action="working"):
        if line is not None:
            print(line, flush=True)
            begun.set()

threading.Thread(target=watch, daemon=True).start()
begun.wait()
"""


def pid_of_child(program: subprocess.Popen[str]) -> int:
    assert program.stdout is not None
    return int(program.stdout.readline())


@pytest.mark.parametrize(
    ("ending", "exit_code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
        ("raise ValueError", 1),
    ],
    ids=["its last line", "an exit", "an interrupt", "a signal", "an error"],
)
def test_a_program_that_ends_leaves_no_child_behind(ending: str, exit_code: int):
    with subprocess.Popen(
        python(PROGRAM + ending),
        cwd=PROJECT_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        pid = pid_of_child(program)
        program.communicate(timeout=60)

    assert program.returncode == exit_code
    assert ends(pid)


def test_a_generator_that_is_never_closed_leaves_no_child_behind():
    script = PROGRAM.replace("threading.Thread(target=watch, daemon=True).start()", "").replace(
        "begun.wait()",
        "lines = child_lines([sys.executable, '-c', CHILD], action='working')\n"
        "print(next(line for line in lines if line is not None), flush=True)",
    )
    result = subprocess.run(
        python(script), cwd=PROJECT_ROOT, capture_output=True, text=True, check=True, timeout=60
    )

    assert result.stderr == ""
    assert ends(int(result.stdout))


def test_our_own_modules_run_from_any_folder(tmp_path: Path):
    command = own_module("engines.fetch", "--help")

    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    assert "--revision" in result.stdout


def test_files_of_the_working_folder_are_no_modules_of_the_child(tmp_path: Path):
    (tmp_path / "argparse.py").write_text("raise SystemExit('the wrong argparse')")
    command = own_module("engines.fetch", "--help")

    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert result.stderr == ""
    assert result.returncode == 0


LEFT = """
import os, subprocess, sys
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("done")
"""


def test_what_a_child_leaves_in_a_session_of_its_own_is_ended():
    """It holds the stream open, so that only the child itself tells when it has ended."""
    lines = list(child_lines([sys.executable, "-c", LEFT], action="working", timeout_s=60))

    assert [line for line in lines if line] == ["done"]
    assert not any(
        process.info["cmdline"] == ["sleep", "600"] and process.info["ppid"] == 1
        for process in psutil.process_iter(["cmdline", "ppid"])
    )


TIED_PARENT = """
import sys
from engines.child import child_lines
wait = "import sys; print('begun', flush=True); sys.stdin.read(); print('over')"
for line in child_lines([sys.executable, "-c", wait], action="working", is_tied=True):
    if line:
        print(line, flush=True)
"""


def test_a_tied_child_hears_of_the_end_of_its_parent():
    with subprocess.Popen(
        [sys.executable, "-c", TIED_PARENT],
        cwd=PROJECT_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "begun\n"
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()

    child.wait(timeout=10)
