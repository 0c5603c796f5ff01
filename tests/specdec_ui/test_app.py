"""The served page through its endpoints: runs, comparisons, stopping, errors, cost."""

from __future__ import annotations

import subprocess
import sys

import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from engines import EngineSlot
from engines.errors import GenerationError, ModelLoadError
from tests.specdec_ui.conftest import WAIT_S, ScriptedBackend, ScriptedEngine, served


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
    assert job.result(timeout=WAIT_S) == {"state": "built", "built": ["bundled"]}
    assert any(update.get("message") == "writing" for update in job.outputs())


def test_doctor_names_the_back_ends(client):
    report = client.predict(api_name="/doctor")
    assert report["backends"]["transformers"]["usable"] is True


def test_cancelling_the_job_ends_the_steps_within_one(client, slow_engine):
    job = client.submit(prompt="hello", max_new_tokens=4000, api_name="/run")
    slow_engine.wait_for(lambda: slow_engine.num_steps >= 5)
    job.cancel()
    slow_engine.wait_for(lambda: slow_engine.num_closed == 1)
    num_steps = slow_engine.num_steps
    again = client.predict(prompt="hello", max_new_tokens=4, api_name="/run")
    assert again["num_output_tokens"] == 4
    assert slow_engine.num_steps == num_steps + 1


def test_a_closed_connection_ends_the_steps(slow_page, slow_engine):
    # A client that dies without a word, as a closed tab does.
    script = (
        "import sys; from gradio_client import Client\n"
        "client = Client(sys.argv[1], verbose=False)\n"
        "client.submit(prompt='hello', max_new_tokens=4000, api_name='/run').result()"
    )
    visitor = subprocess.Popen([sys.executable, "-c", script, slow_page])
    try:
        slow_engine.wait_for(lambda: slow_engine.num_steps >= 3)
    finally:
        visitor.kill()
        visitor.wait()
    slow_engine.wait_for(lambda: slow_engine.num_closed == 1)


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
        ("draft_kind", "model", "the draft is empty"),
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
