"""The worker: it starts, answers, is waited for with limits, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

import psutil
import pytest

from engines.child import PROJECT_ROOT
from engines.errors import GenerationError, ModelLoadError
from engines.tensorrt_llm_backend import worker_process
from engines.tensorrt_llm_backend.worker_process import MARK, NUM_LOGS_KEPT, Worker
from tests.engines.tensorrt_llm.conftest import Install
from tests.engines.test_child import ends
from tests.fake_tensorrt_llm.scenario import Scenario
from tests.fake_tensorrt_llm.site import FakeInstall

START_TIMEOUT_S = STEP_TIMEOUT_S = 60.0
PROMPT = [5, 6, 7]
MANY = 20_000  # tokens whose stream fills the pipe many times

MakeWorker = Callable[..., Worker]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "HEARTBEAT_S", 0.05)


@pytest.fixture
def make_worker(tmp_path: Path) -> Iterator[MakeWorker]:
    """Prepare workers, which are gone behind the test."""
    workers: list[Worker] = []

    def make_worker(python: object, **options: Any) -> Worker:
        workers.append(Worker(str(python), logs=tmp_path / "logs", **options))
        return workers[-1]

    yield make_worker
    for worker in workers:
        worker.kill()


@pytest.fixture
def model(tiny_target: Path) -> dict[str, Any]:
    """What a worker is to load: the tiny target, without drafts."""
    return {
        "flow": "pytorch",
        "model": str(tiny_target),
        "draft_kind": "none",
        "draft": None,
        "num_draft_tokens": 0,
        "max_seq_len": 2 * MANY,
        "dtype": "bfloat16",
        "tensor_parallel_size": 1,
    }


def said_of(asked: Generator[Any, None, Any]) -> tuple[list[Any], Any]:
    """Return what comes, and the result."""
    said: list[Any] = []
    while True:
        try:
            item = next(asked)
        except StopIteration as ended:
            return said, ended.value
        if item is not None:
            said.append(item)


def stream(worker: Worker, num_tokens: int, *, timeout_s: float = STEP_TIMEOUT_S) -> Any:
    return worker.ask(
        "stream",
        timeout_s,
        prompt=PROMPT,
        max_new_tokens=num_tokens,
        stop_token_ids=[],
        sampling=None,
    )


def tokens_of(worker: Worker, num_tokens: int = 4) -> list[int]:
    items, _ = said_of(stream(worker, num_tokens))
    return [token_id for item in items for token_id in item["tokens"]]


def pid_of(fake: FakeInstall) -> int:
    """Return the process that called the library last, as soon as one has."""
    deadline = monotonic() + START_TIMEOUT_S
    while not fake.read_calls():
        assert monotonic() < deadline
    pid = fake.read_calls()[-1]["pid"]
    assert isinstance(pid, int)
    return pid


def wait_for_the_death_of(worker: Worker) -> None:
    deadline = monotonic() + START_TIMEOUT_S
    while worker.is_alive:
        assert monotonic() < deadline


def replace_script(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Let this run as the worker, with `send` for its replies."""
    script = folder / "script.py"
    script.write_text(
        "import json, os, sys, time\n"
        "requests, replies = open(sys.argv[2]), open(sys.argv[4], 'w')\n"
        "def send(**reply): print(json.dumps(reply), file=replies, flush=True)\n" + text
    )
    monkeypatch.setattr(worker_process, "WORKER_SCRIPT", script)


# -- start


def test_a_worker_tells_how_it_loads_and_then_answers(install: Install, make_worker, model):
    worker = make_worker(install().python)
    said, _ = said_of(worker.open(START_TIMEOUT_S, **model))

    assert said[0] == "[TensorRT-LLM] TensorRT-LLM version: 1.2.1"
    assert said[-1] == "loading the models"
    assert worker.is_alive
    assert len(tokens_of(worker)) == 4


def test_a_library_that_prints_and_reads_standard_input_disturbs_nothing(
    install: Install, make_worker, model
):
    fake = install(Scenario(import_="stdin"))
    worker = make_worker(fake.python)
    said_of(worker.open(START_TIMEOUT_S, **model))

    assert len(tokens_of(worker)) == 4
    assert fake.read_calls("stdin")[0]["args"] == {"num_bytes": 0}
    assert "TensorRT-LLM version" in worker.log.read_text()


def test_a_launcher_that_keeps_standard_input_to_itself_is_put_before_it(
    install: Install, make_worker, model, tmp_path: Path
):
    launcher = tmp_path / "a launcher"
    launcher.write_text('#!/bin/sh\nshift\n"$@" </dev/null\n')
    launcher.chmod(0o755)
    fake = install()
    worker = make_worker(fake.python, launcher=f"'{launcher}' --here")
    said_of(worker.open(START_TIMEOUT_S, **model))

    assert len(tokens_of(worker)) == 4
    worker.kill()
    assert ends(pid_of(fake))


@pytest.mark.parametrize("options", [{}, {"launcher": "/none/mpirun -n 1"}])
def test_what_cannot_be_run_is_told_with_its_name(make_worker, options):
    worker = make_worker("/none/python", **options)

    with pytest.raises(ModelLoadError, match=r"cannot be run by '/none/\w+': No such file") as told:
        list(worker.open(START_TIMEOUT_S))
    assert str(told.value).startswith("loading failed: the worker cannot be run")
    assert not worker.is_alive


def test_a_worker_of_another_protocol_is_refused(
    monkeypatch: pytest.MonkeyPatch, make_worker, tmp_path: Path
):
    replace_script(monkeypatch, tmp_path, "send(type='hello', protocol=2)\ntime.sleep(600)\n")

    with pytest.raises(ModelLoadError, match="the worker speaks protocol 2, not 1"):
        list(make_worker(sys.executable).open(START_TIMEOUT_S))


def test_a_request_may_be_longer_than_a_pipe_holds(install: Install, make_worker, model):
    worker = make_worker(install().python)
    said_of(worker.open(START_TIMEOUT_S, **model))

    with pytest.raises(GenerationError, match=r"generating failed: 100000 \+ 1 tokens exceed"):
        list(worker.ask("begin", STEP_TIMEOUT_S, prompt=[5] * 100_000))


def test_a_worker_runs_in_a_process_that_has_many_files_open(install: Install, make_worker, model):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        worker = make_worker(install().python)
        said_of(worker.open(START_TIMEOUT_S, **model))
        assert len(tokens_of(worker)) == 4
        worker.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# -- limits


def test_a_start_that_takes_too_long_is_ended(install: Install, make_worker, model):
    worker = make_worker(install(Scenario(load="hang")).python)

    with pytest.raises(
        ModelLoadError, match=r"it took longer than 1 s \(its log, .*; .* raise start_timeout_s$"
    ):
        list(worker.open(1.0, **model))
    assert not worker.is_alive


def test_a_worker_that_never_says_hello_is_ended(install: Install, make_worker, tmp_path: Path):
    program = tmp_path / "sleeper"
    program.write_text("#!/bin/sh\necho waiting for a network\nexec sleep 600\n")
    program.chmod(0o755)

    with pytest.raises(ModelLoadError, match=r"longer than 1 s .*ends: waiting for a network\)"):
        list(make_worker(program).open(1.0))


def test_a_step_that_takes_too_long_is_ended_although_the_worker_gives_signs_of_life(
    install: Install, monkeypatch: pytest.MonkeyPatch, make_worker, model
):
    monkeypatch.setattr(worker_process, "SILENCE_LIMIT_S", 1.0)
    fake = install(Scenario(generate="hang"))
    worker = make_worker(fake.python)
    said_of(worker.open(START_TIMEOUT_S, **model))

    with pytest.raises(GenerationError, match=r"did not answer within 2 s and was ended .*anew"):
        said_of(stream(worker, 4, timeout_s=2.0))
    assert not worker.is_alive
    assert ends(pid_of(fake))


def test_a_worker_that_gives_no_sign_of_life_is_ended(
    install: Install, monkeypatch: pytest.MonkeyPatch, make_worker, model
):
    monkeypatch.setattr(worker_process, "SILENCE_LIMIT_S", 1.0)
    fake = install()
    worker = make_worker(fake.python)
    said_of(worker.open(START_TIMEOUT_S, **model))
    os.kill(pid_of(fake), signal.SIGSTOP)

    with pytest.raises(GenerationError, match="the worker gave no sign of life for 1 s and was"):
        tokens_of(worker)
    assert not worker.is_alive
    assert ends(pid_of(fake))


def test_who_waits_gets_a_chance_to_stop(install: Install, make_worker, model):
    worker = make_worker(install(Scenario(generate="hang")).python)
    said_of(worker.open(START_TIMEOUT_S, **model))

    assert next(stream(worker, 4)) is None


# -- errors and deaths


def test_an_error_of_the_library_leaves_the_worker_usable(install: Install, make_worker, model):
    worker = make_worker(install().python)
    said_of(worker.open(START_TIMEOUT_S, **model))

    with pytest.raises(GenerationError, match=r"^generating failed: the prompt is empty$"):
        list(worker.ask("begin", STEP_TIMEOUT_S, prompt=[]))
    assert worker.is_alive
    assert len(tokens_of(worker)) == 4


def test_an_error_while_loading_has_its_remedy_and_the_end_of_the_log(
    install: Install, make_worker, model
):
    worker = make_worker(install(Scenario(load="oom")).python)

    with pytest.raises(ModelLoadError) as told:
        list(worker.open(START_TIMEOUT_S, **model))
    text = str(told.value)
    assert text.startswith("loading failed: CUDA out of memory.")
    assert f"(its log, {worker.log}, ends: [TensorRT-LLM] TensorRT-LLM version: 1.2.1)" in text
    assert text.endswith("lower max_seq_len, use FP8, or more GPUs")
    assert not worker.is_alive


def die_while_importing(fake: FakeInstall) -> None:
    package = fake.site / "tensorrt_llm" / "__init__.py"
    package.write_text("import os\nprint('no driver', flush=True)\nos._exit(7)\n")


def test_a_worker_that_dies_while_importing_is_told(install: Install, make_worker, model):
    fake = install()
    die_while_importing(fake)
    worker = make_worker(fake.python)

    with pytest.raises(ModelLoadError) as told:
        list(worker.open(START_TIMEOUT_S, **model))
    assert str(told.value) == (
        f"loading failed: the worker ended with status 7 (its log, {worker.log}, ends: no driver)"
    )


def test_a_worker_that_dies_before_it_says_hello_is_told(make_worker):
    with pytest.raises(ModelLoadError, match=r"the worker ended with status 1 \(its log is /"):
        list(make_worker("/bin/false").open(START_TIMEOUT_S))


def test_a_worker_that_dies_while_loading_is_told(install: Install, make_worker, model):
    worker = make_worker(install(Scenario(load="die")).python)

    with pytest.raises(ModelLoadError, match="loading failed: the worker was killed by SIGKILL"):
        list(worker.open(START_TIMEOUT_S, **model))
    assert not worker.is_alive


def test_a_worker_that_dies_while_generating_is_told(install: Install, make_worker, model):
    worker = make_worker(install(Scenario(generate="die")).python)
    said_of(worker.open(START_TIMEOUT_S, **model))

    with pytest.raises(
        GenerationError, match=r"the worker was killed by SIGKILL \(its log, .*\); the next run"
    ):
        tokens_of(worker)
    assert not worker.is_alive


def test_a_worker_that_died_while_idle_is_no_longer_alive(install: Install, make_worker, model):
    fake = install()
    worker = make_worker(fake.python)
    said_of(worker.open(START_TIMEOUT_S, **model))
    os.kill(pid_of(fake), signal.SIGKILL)
    wait_for_the_death_of(worker)

    with pytest.raises(GenerationError, match="the worker was killed by SIGKILL"):
        tokens_of(worker)
    with pytest.raises(GenerationError, match="the worker is not running"):
        tokens_of(worker)


def test_a_worker_that_closes_its_pipe_is_ended(
    monkeypatch: pytest.MonkeyPatch, make_worker, tmp_path: Path
):
    monkeypatch.setattr(worker_process, "CLOSE_TIMEOUT_S", 0.2)
    replace_script(monkeypatch, tmp_path, "replies.close()\ntime.sleep(600)\n")

    with pytest.raises(ModelLoadError, match="the worker closed its pipe and was ended"):
        list(make_worker(sys.executable).open(START_TIMEOUT_S))


# -- stop


def test_what_is_cancelled_ends_and_the_worker_goes_on(install: Install, make_worker, model):
    fake = install()
    worker = make_worker(fake.python)
    said_of(worker.open(START_TIMEOUT_S, **model))
    whole = tokens_of(worker)
    asked = stream(worker, MANY)
    assert next(item for item in asked if item is not None)["tokens"] == whole[:1]

    worker.cancel(asked)

    assert fake.read_calls("abort") != []
    assert tokens_of(worker) == whole


def test_what_does_not_end_when_cancelled_is_killed(
    install: Install, monkeypatch: pytest.MonkeyPatch, make_worker, model
):
    monkeypatch.setattr(worker_process, "CLOSE_TIMEOUT_S", 0.1)
    fake = install(Scenario(generate="hang"))
    worker = make_worker(fake.python)
    said_of(worker.open(START_TIMEOUT_S, **model))
    asked = stream(worker, 4)
    next(asked)

    worker.cancel(asked)

    assert not worker.is_alive
    assert ends(pid_of(fake))


@pytest.mark.parametrize("fault", ["error", "die"])
def test_cancelling_what_fails_raises_nothing(install: Install, make_worker, model, fault: Any):
    worker = make_worker(install(Scenario(generate=fault)).python)
    said_of(worker.open(START_TIMEOUT_S, **model))
    asked = stream(worker, 4)
    worker.cancel(asked)

    assert not worker.is_alive  # the error is one of the device


def test_closing_the_start_ends_the_worker(install: Install, make_worker, model):
    fake = install(Scenario(load="hang"))
    worker = make_worker(fake.python)
    opening = worker.open(START_TIMEOUT_S, **model)
    while not fake.read_calls():
        next(opening)
    opening.close()

    assert not worker.is_alive
    assert ends(pid_of(fake))


# -- the end


def test_a_closed_worker_has_shut_the_library_down_and_left_nothing_but_its_log(
    install: Install, monkeypatch: pytest.MonkeyPatch, make_worker, model, tmp_path: Path
):
    lent = tmp_path / "temporary"
    lent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(lent))
    fake = install()
    worker = make_worker(fake.python)
    said_of(worker.open(START_TIMEOUT_S, **model))
    assert len(os.listdir(lent)) == 0  # the pipes are open, and their names gone

    worker.close()
    worker.close()

    assert len(fake.read_calls("LLM.shutdown")) == 1
    assert not worker.is_alive
    assert ends(pid_of(fake))
    assert os.listdir(lent) == []
    assert "TensorRT-LLM version" in worker.log.read_text()


def test_a_worker_that_does_not_shut_down_is_killed(
    install: Install, monkeypatch: pytest.MonkeyPatch, make_worker, model
):
    fake = install()
    worker = make_worker(fake.python)
    said_of(worker.open(START_TIMEOUT_S, **model))
    monkeypatch.setattr(worker_process, "SILENCE_LIMIT_S", 0.1)
    os.kill(pid_of(fake), signal.SIGSTOP)

    worker.close()

    assert ends(pid_of(fake))


def test_only_the_newest_logs_are_kept(make_worker, tmp_path: Path):
    logs = []
    for _ in range(NUM_LOGS_KEPT + 2):
        worker = make_worker("/bin/false")
        with pytest.raises(ModelLoadError):
            list(worker.open(START_TIMEOUT_S))
        logs.append(worker.log)

    assert sorted((tmp_path / "logs").iterdir()) == logs[-NUM_LOGS_KEPT:]


GRANDCHILD = """
import subprocess, sys
from trtllm_fake.state import log_call
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], {options})
log_call("grandchild", {{"pid": sleeper.pid}})
"""


@pytest.mark.parametrize("end", ["kill", "close", "die"])
@pytest.mark.parametrize("options", ["", "start_new_session=True"], ids=["group", "session"])
def test_what_the_worker_has_started_ends_with_it(
    install: Install, make_worker, model, end: str, options: str
):
    fake = install(Scenario(generate="die"))
    package = fake.site / "tensorrt_llm" / "__init__.py"
    package.write_text(package.read_text() + GRANDCHILD.format(options=options))
    worker = make_worker(fake.python)
    said_of(worker.open(START_TIMEOUT_S, **model))
    (grandchild,) = fake.read_calls("grandchild")
    assert psutil.pid_exists(grandchild["args"]["pid"])

    if end == "die":
        with pytest.raises(GenerationError, match="killed by SIGKILL"):
            tokens_of(worker)
    else:
        getattr(worker, end)()

    assert ends(grandchild["args"]["pid"])


PARENT = """
import json, sys
from pathlib import Path
from engines.tensorrt_llm_backend.worker_process import Worker

python, logs, model = sys.argv[1:]
worker = Worker(python, logs=Path(logs))
for said in worker.open(60.0, **json.loads(model)):
    print(said, flush=True)
print("loaded", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("load", "line"), [("", "loaded"), ("hang", "loading the models")], ids=["idle", "loading"]
)
def test_a_worker_whose_parent_is_killed_ends(
    install: Install, model, tmp_path: Path, load: Any, line: str
):
    fake = install(Scenario(load=load))
    arguments = [str(fake.python), str(tmp_path / "logs"), json.dumps(model)]
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments],
        cwd=PROJECT_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        while parent.stdout.readline().strip() != line:
            pass
        pid = pid_of(fake)
        assert psutil.pid_exists(pid)
        parent.kill()

    assert ends(pid)


def test_starts_and_ends_leave_no_file_open(
    monkeypatch: pytest.MonkeyPatch, make_worker, tmp_path: Path
):
    replace_script(monkeypatch, tmp_path, "send(type='hello', protocol=1)\ntime.sleep(600)\n")
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        worker = make_worker(sys.executable, env={"PYTHONDONTWRITEBYTECODE": "1"})
        opening = worker.open(START_TIMEOUT_S)
        next(opening)
        opening.close()

    assert len(os.listdir("/proc/self/fd")) == num_open


def test_two_threads_that_end_a_worker_at_once_touch_nothing_else(
    install: Install, monkeypatch: pytest.MonkeyPatch, make_worker, model
):
    fake = install()
    killed: list[str | None] = []
    monkeypatch.setattr(
        psutil.Process, "kill", lambda process: killed.append(process.environ().get(MARK))
    )
    for _ in range(3):
        worker = make_worker(fake.python)
        said_of(worker.open(START_TIMEOUT_S, **model))
        threads = [Thread(target=worker.kill) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not worker.is_alive

    assert None not in killed


def test_a_worker_at_work_is_closed_at_once_and_who_waits_is_told(
    install: Install, monkeypatch: pytest.MonkeyPatch, make_worker, model
):
    fake = install(Scenario(generate="hang"))
    worker = make_worker(fake.python)
    said_of(worker.open(START_TIMEOUT_S, **model))
    asked = stream(worker, MANY)
    assert next(asked) is None

    closing = Thread(target=worker.close)
    closing.start()
    with pytest.raises(GenerationError, match=r"the worker (is not running|was ended|was killed)"):
        said_of(asked)
    closing.join(5)

    assert not closing.is_alive()


def test_acceptance_that_the_environment_forces_is_not_let_in(
    install: Install, monkeypatch: pytest.MonkeyPatch, make_worker
):
    monkeypatch.setenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "3")
    fake = install()
    told = "import os; print(os.environ.get('TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS'))"
    worker = make_worker(fake.python, launcher=f'{sys.executable} -c "{told}"')

    with pytest.raises(ModelLoadError, match="ends: None"):
        said_of(worker.open(START_TIMEOUT_S))


def test_a_launcher_that_starts_a_worker_for_each_rank_is_told(
    install: Install, make_worker, model
):
    fake = install()
    worker = make_worker(fake.python, launcher="env OMPI_COMM_WORLD_RANK=1")

    with pytest.raises(ModelLoadError, match="let the launcher end with trtllm-llmapi-launch"):
        said_of(worker.open(START_TIMEOUT_S, **model))


def test_logs_that_cannot_be_written_are_told(install: Install, tmp_path: Path, model):
    fake = install()
    (tmp_path / "file").touch()
    worker = Worker(str(fake.python), logs=tmp_path / "file")

    with pytest.raises(ModelLoadError, match="the worker cannot be started"):
        said_of(worker.open(START_TIMEOUT_S, **model))
