"""What the page costs: server time and bytes of a long stream, memory over many runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.specdec_ui.browserless import PageClient

MEGABYTE = 2**20
NUM_RUNS = 200


@contextmanager
def page_process(*args: str) -> Iterator[tuple[str, psutil.Process]]:
    """Serve a page from a process of its own; lend its address and the process."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.specdec_ui.page_process", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
        finally:
            process.kill()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.mark.parametrize("step_s", [0.0, 0.01], ids=["a free back end", "a hundred steps a second"])
def test_two_thousand_tokens_cost_little_time_and_few_bytes(step_s):
    with page_process("scripted", str(step_s)) as (url, process):
        page = PageClient(url, session="one")
        before = cpu_seconds(process)
        inputs = page.inputs(max_new_tokens=2000, run_the_baseline=False)
        *updates, last = page.press("sd-run", inputs)
        assert last["msg"] == "process_completed"
        assert last["success"]
        assert cpu_seconds(process) - before < 2
        assert page.num_bytes < MEGABYTE
        if step_s:  # capped at 20 a second, and still a stream
            seconds = 500 * step_s
            assert seconds * 5 < len(updates) < seconds * 2 * 20


def test_many_runs_do_not_grow_the_memory(tiny_target: Path, tiny_draft: Path):
    with page_process("transformers") as (url, process):

        def run_often(num_runs: int) -> None:
            for number in range(num_runs):
                page = PageClient(url, session=f"tab {number % 10}")
                inputs = page.inputs(
                    target=str(tiny_target),
                    draft_model=str(tiny_draft),
                    draft_kind="model",
                    max_new_tokens=16,
                )
                *_, last = page.press("sd-run", inputs)
                assert last["success"]

        run_often(20)  # what is loaded once is loaded now
        before = process.memory_info().rss
        run_often(NUM_RUNS)
        assert process.memory_info().rss - before < 30 * MEGABYTE
