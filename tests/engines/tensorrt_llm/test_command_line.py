"""TensorRT-LLM from the command line: a compared run, the commands to take away, bad options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.cli import main
from engines.store import EngineStore
from tests.engines.tensorrt_llm.conftest import MAX_SEQ_LEN, Install
from tests.fake_tensorrt_llm.scenario import Scenario

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    store: EngineStore,
    tiny_target: Path,
    tiny_draft: Path,
) -> Cli:
    """Runs a command for the tiny pair: exit code, standard output, standard error."""
    monkeypatch.setenv("SPECDEC_STORE", str(store.root))

    def run(command: str, *args: object) -> tuple[int, str, str]:
        pair = ["--backend", "tensorrt_llm", "--target", tiny_target, "--draft", tiny_draft]
        limits = ["--max-seq-len", MAX_SEQ_LEN]
        try:
            code = main([str(arg) for arg in (command, *pair, *limits, *args)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return run


PROMPT = ("--prompt", "one two three", "--no-chat-template", "--max-new-tokens", 12)


@pytest.mark.parametrize("flow", ["engine", "pytorch"])
def test_a_compared_run_builds_loads_and_tells_how_it_went(install: Install, cli: Cli, flow: str):
    install()

    code, out, err = cli("run", *PROMPT, "--flow", flow, "--baseline", "--json")

    result = json.loads(out.splitlines()[-1])
    assert code == 0
    assert result["identical"]
    assert result["effective_settings"]["backend"] == "tensorrt_llm"
    assert result["effective_settings"]["versions"]["tensorrt_llm"] == "1.2.1"
    assert ("build the target engine" in err) == (flow == "engine")
    assert "load" in err  # what the worker says meanwhile


def test_the_commands_are_printed_with_their_titles(install: Install, cli: Cli):
    install()

    code, out, _ = cli("commands", "--num-draft-tokens", 3)

    assert code == 0
    assert "# Build the engines, with trtllm-build\n" in out
    assert "max_draft_len: 3\n" in out


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--num-draft-tokens", 11), "the target engine is built for 10 at most"),
        (("--temperature", 1), "engines that accept by tokens decode greedily only"),
        (("--devices", "0,0"), "devices is (0, 0): name 1 different GPU(s), or none"),
        (("--devices", "3"), "devices need GPU 3, and visible are 0"),
        (("--max-draft-len", 99), "max_draft_len is 99: use 1 to 32"),
        (("--launcher", "mpirun 'x"), "close its quotes"),
    ],
)
def test_a_bad_option_is_a_bad_argument_in_a_sentence(
    install: Install, cli: Cli, args: tuple[object, ...], sentence: str
):
    install()

    code, out, err = cli("run", *PROMPT, *args)

    assert code == 2
    assert out.strip() == ""
    assert sentence in err


@pytest.mark.parametrize(
    ("scenario", "sentence"),
    [
        (Scenario(gpus=()), "shows no GPU"),
        (Scenario(import_="libpython"), "install libpython3-dev"),
        (Scenario(load="oom"), "the GPU has too little free memory"),
        (Scenario(build="fail"), "building the target engine"),
    ],
)
def test_what_fails_is_a_sentence(install: Install, cli: Cli, scenario: Scenario, sentence: str):
    install(scenario)

    code, _, err = cli("run", *PROMPT)

    assert code == 1
    assert err.splitlines()[-1].startswith("error: ")
    assert sentence in err.splitlines()[-1]
