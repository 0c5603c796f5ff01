"""The served page through its endpoints: runs, comparisons, stopping, errors, cost."""

from __future__ import annotations

import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from gradio_client.utils import Status

from engines import EngineSlot
from engines.errors import GenerationError, ModelLoadError
from specdec_ui.views import View
from tests.specdec_ui.browserless import PageClient
from tests.specdec_ui.conftest import WAIT_S, ScriptedBackend, ScriptedEngine, served

SLOW_S = 0.2  # a step that takes longer than a cancellation


@pytest.fixture
def client(slow_page: str) -> Client:
    return Client(slow_page, verbose=False)


def test_run_streams_and_ends_with_the_whole_run(client):
    job = client.submit(prompt="hello", max_new_tokens=40, api_name="/run")
    result = job.result(timeout=WAIT_S)
    assert result["num_output_tokens"] == 40
    assert result["finish_reason"] == "length"
    assert result["effective_settings"]["num_draft_tokens"] == 4
    updates = job.outputs()
    assert len(updates) >= 8  # ten steps: most of them reach the client before the end
    assert {update.get("state") for update in updates[:-1]} >= {"running"}


def test_compare_ends_with_both_sides(client):
    result = client.predict(prompt="hello", max_new_tokens=8, api_name="/compare")
    assert result["speculative"]["num_output_tokens"] == 8
    assert result["baseline"]["num_steps"] == 8
    assert result["speedup"] > 1
    assert result["identical"] is True
    assert result["first_difference"] is None


def test_build_reports_progress(client):
    job = client.submit(api_name="/build")
    assert job.result(timeout=WAIT_S) == {"state": "built", "built": ["bundled", "bundled-draft"]}
    updates = [(update["state"], update.get("message")) for update in job.outputs()]
    assert ("building", "writing") in updates


def test_a_run_says_when_it_waits_for_the_engine_and_when_it_loads():
    slot = EngineSlot(lambda name: ScriptedBackend(ScriptedEngine()))
    with served(slot) as url:
        assert list(slot.acquire()) == []
        job = Client(url, verbose=False).submit(prompt="hello", max_new_tokens=4, api_name="/run")
        assert next(iter(job))["state"] == "waiting"
        slot.release()
        assert job.result(timeout=WAIT_S)["num_output_tokens"] == 4
        states = [update.get("state") for update in job.outputs()]
    assert list(dict.fromkeys(states)) == ["waiting", "loading", "running", None]


def test_doctor_names_the_back_ends(client):
    report = client.predict(api_name="/doctor")
    assert report["backends"]["transformers"]["usable"] is True


def test_a_pair_is_checked(client, tiny_target: Path, tiny_draft: Path):
    found = client.predict(target=str(tiny_target), draft=str(tiny_draft), api_name="/check")
    assert found["outcome"] == "ok"
    assert {"token_texts", "rollback"} <= {rule["rule"] for rule in found["rules"]}
    with pytest.raises(AppError, match="there is no model '/nowhere'"):
        client.predict(target=str(tiny_target), draft="/nowhere", api_name="/check")


@pytest.mark.parametrize(
    ("api_name", "num_steps"),
    [
        pytest.param("/run", 3, id="in a run"),
        # A generation of one step warms one side up, one of four steps the other.
        pytest.param("/compare", 1, id="in a side's warm-up"),
        pytest.param("/compare", 2, id="in the other side's warm-up"),
        pytest.param("/compare", 6, id="in a comparison"),
    ],
)
def test_cancelling_the_job_ends_the_steps_within_one(api_name: str, num_steps: int):
    engine = ScriptedEngine(step_s=SLOW_S)
    with served(EngineSlot(lambda name: ScriptedBackend(engine))) as url:
        client = Client(url, verbose=False)
        job = client.submit(prompt="hello", max_new_tokens=4000, api_name=api_name)
        engine.wait_for(lambda: engine.num_steps >= num_steps)
        num_steps_at_cancel = engine.num_steps
        job.cancel()
        engine.wait_for(lambda: engine.num_closed == engine.num_generations)
        num_steps_in_all = engine.num_steps
        # The step that was going on, and one that may have begun while this was read.
        assert num_steps_in_all <= num_steps_at_cancel + 2
        again = client.predict(prompt="hello", max_new_tokens=4, api_name="/run")
        assert again["num_output_tokens"] == 4
        assert engine.num_steps == num_steps_in_all + 1


def wait_for_a_step(engine: ScriptedEngine) -> None:
    num_steps = engine.num_steps
    engine.wait_for(lambda: engine.num_steps > num_steps)


def test_who_waits_for_a_run_that_is_cancelled_gets_the_engine_when_it_is_free():
    engine = ScriptedEngine(step_s=SLOW_S)
    with served(EngineSlot(lambda name: ScriptedBackend(engine))) as url:
        first, second = (Client(url, verbose=False) for _ in range(2))
        cancelled = first.submit(prompt="hello", max_new_tokens=4000, api_name="/run")
        engine.wait_for(lambda: engine.num_steps >= 1)
        waiting = second.submit(prompt="hello", max_new_tokens=8, api_name="/run")
        while waiting.status().code is not Status.IN_QUEUE:
            wait_for_a_step(engine)
        cancelled.cancel()
        result = waiting.result(timeout=WAIT_S)
    assert result["num_output_tokens"] == 8
    assert result["finish_reason"] == "length"
    assert engine.log == ["1 begins", "1 is closed", "2 begins", "2 is closed"]


CLIENT_THAT_RUNS = (
    "import sys; from gradio_client import Client\n"
    "client = Client(sys.argv[1], verbose=False)\n"
    "client.submit(prompt='hello', max_new_tokens=4000, api_name='/run').result()"
)
TAB_THAT_RUNS = (
    "import sys; from tests.specdec_ui.browserless import PageClient\n"
    "tab = PageClient(sys.argv[1], session='a tab')\n"
    "list(tab.press('sd-run', tab.inputs(max_new_tokens=4000, run_the_baseline=False)))"
)


@pytest.mark.parametrize(
    "script",
    [pytest.param(CLIENT_THAT_RUNS, id="a client"), pytest.param(TAB_THAT_RUNS, id="a tab")],
)
def test_a_closed_connection_ends_the_steps(slow_page, slow_engine, script: str):
    # A visitor that dies without a word.
    visitor = subprocess.Popen([sys.executable, "-c", script, slow_page])
    try:
        slow_engine.wait_for(lambda: slow_engine.num_steps >= 3)
    finally:
        visitor.kill()
        visitor.wait()
    slow_engine.wait_for(lambda: slow_engine.num_closed == 1)
    num_steps = slow_engine.num_steps
    page = PageClient(slow_page, session="another tab")
    assert "Done." in run_on_page(page, max_new_tokens=4, run_the_baseline=False)
    assert slow_engine.num_steps == num_steps + 1


def run_on_page(page: PageClient, **changes: Any) -> str:
    """Return the status line in which a run on the page ends."""
    *_, last = page.press("sd-run", page.inputs(**changes))
    assert last["success"]
    return str(last["output"]["data"][View.names().index("status")])


@pytest.mark.parametrize("value", [0, -1, 1000, "x", None, 2.5])
def test_a_bad_number_on_the_page_is_named_in_an_alert(slow_page, slow_engine, value: Any):
    status = run_on_page(PageClient(slow_page, session="a tab"), num_draft_tokens=value)
    assert f"role='alert'>num_draft_tokens is {escape(repr(value))}: use " in status
    assert slow_engine.num_generations == 0


def test_a_prompt_of_100_kb_of_emoji_is_answered_in_an_alert(tiny_target: Path):
    with served(EngineSlot()) as url:
        page = PageClient(url, session="a tab")
        status = run_on_page(
            page, target=str(tiny_target), draft_kind="prompt_lookup", prompt="🙂" * 25_000
        )
    assert "role='alert'>the prompt has 100,00" in status
    assert "the context holds 5" in status


@pytest.mark.parametrize(
    ("argument", "value", "named"),
    [
        ("prompt", "", "the prompt is empty"),
        ("prompt", " \n ", "the prompt is empty"),
        ("num_draft_tokens", 0, "num_draft_tokens is 0"),
        ("num_draft_tokens", -1, "num_draft_tokens is -1"),
        ("num_draft_tokens", 1000, "num_draft_tokens is 1000"),
        ("num_draft_tokens", "x", "num_draft_tokens is 'x'"),
        ("draft_kind", "magic", "draft_kind is 'magic'"),
        ("temperature", -1, "temperature is -1"),
        ("max_new_tokens", 0, "max_new_tokens is 0"),
        ("repeats", 100, "repeats is 100"),
        ("target", " ", "target is"),
    ],
)
def test_a_bad_argument_is_named_in_one_sentence(client, argument, value, named):
    arguments = {"prompt": "hello", "max_new_tokens": 4, argument: value}
    with pytest.raises(AppError) as raised:
        client.predict(**arguments, api_name="/run")
    assert str(raised.value).startswith(named)
    assert "\n" not in str(raised.value)


def test_an_engine_that_cannot_load_says_why_and_the_next_run_works():
    backend = ScriptedBackend(ScriptedEngine(), error=ModelLoadError("the model has no weights"))
    with served(EngineSlot(lambda name: backend)) as url:
        client = Client(url, verbose=False)
        with pytest.raises(AppError, match="the model has no weights"):
            client.predict(prompt="hello", api_name="/run")
        backend.error = None
        assert client.predict(prompt="hello", api_name="/run")["num_output_tokens"] == 64


def test_an_engine_that_fails_while_generating_says_why():
    class FailingEngine(ScriptedEngine):
        def generate(self, request):
            events = super().generate(request)
            yield next(events)
            yield next(events)
            raise GenerationError("the device is gone")

    with served(EngineSlot(lambda name: ScriptedBackend(FailingEngine()))) as url:
        client = Client(url, verbose=False)
        with pytest.raises(AppError, match="the device is gone"):
            client.predict(prompt="hello", api_name="/run")
