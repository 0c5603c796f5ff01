"""The commands to take away: each is run, or held against what the library's own tools take."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from engines.child import PROJECT_ROOT
from engines.config import DraftKind, EngineConfig
from engines.errors import EngineError
from engines.store import EngineStore
from engines.tensorrt_llm_backend.commands import YAML_FILE, Snippet, take_away
from engines.tensorrt_llm_backend.engine_folder import read_engine_folder
from tests.engines.tensorrt_llm.conftest import Install, MakeConfig
from tests.fake_tensorrt_llm.scenario import Scenario

BUILD, TRTLLM_BUILD = "Build the engines, as it was done", "Build the engines, with trtllm-build"
GENERATE, SERVE = "Generate, with the PyTorch flow", "Serve, with the PyTorch flow"
# Of trtllm-build 1.2.1, from its documentation
TRTLLM_BUILD_OPTIONS = {
    "--checkpoint_dir",
    "--output_dir",
    "--max_batch_size",
    "--max_beam_width",
    "--max_input_len",
    "--max_seq_len",
    "--max_num_tokens",
    "--max_draft_len",
    "--speculative_decoding_mode",
    "--gather_generation_logits",
    "--gemm_plugin",
    "--use_paged_context_fmha",
}


def snippets_of(
    config: EngineConfig, store: EngineStore, kind: DraftKind = "model", number: int = 4
) -> dict[str, Snippet]:
    return {snippet.title: snippet for snippet in take_away(config, kind, number, store)}


def run_shell(text: str, python: Path, folder: Path) -> str:
    """Run commands from the project's folder as a person would, but for where they write."""
    text = text.replace("python3 ", f"{python} ")
    text = re.sub(
        r"(?<![\w/])((target|draft)-(engine|checkpoint)|timing\.cache)", rf"{folder}/\1", text
    )
    text = re.sub(r"(?<![\w/])(target|draft)\.json", rf"{folder}/\1.json", text)
    text = re.sub(r"^trtllm-build (.*\\\n)*.*$", "", text, flags=re.MULTILINE)
    result = subprocess.run(
        ["bash", "-euc", text], cwd=PROJECT_ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_build_commands_build_what_was_built(
    install: Install, make_config: MakeConfig, store: EngineStore, tmp_path: Path
):
    fake = install()
    config = make_config(max_draft_len=6)

    run_shell(snippets_of(config, store)[BUILD].text, fake.python, tmp_path)

    target = read_engine_folder(tmp_path / "target-engine")
    assert target.max_draft_len == 6
    assert target.has_paged_context_fmha
    assert read_engine_folder(tmp_path / "draft-engine").max_draft_len == 0


def test_the_checkpoints_for_trtllm_build_are_written(
    install: Install, make_config: MakeConfig, store: EngineStore, tmp_path: Path
):
    fake = install()

    run_shell(snippets_of(make_config(), store)[TRTLLM_BUILD].text, fake.python, tmp_path)

    for role in ("target", "draft"):
        files = {path.name for path in (tmp_path / f"{role}-checkpoint").iterdir()}
        assert {"config.json", "rank0.safetensors"} <= files


@pytest.mark.parametrize("options", [{}, {"acceptance": "logits"}, {"quantization": "int8"}])
def test_trtllm_build_is_given_options_that_it_has(
    install: Install, make_config: MakeConfig, store: EngineStore, options: dict[str, str]
):
    install()
    text = snippets_of(make_config(**options), store)[TRTLLM_BUILD].text
    commands = [
        command.replace("\\\n", " ")
        for command in re.findall(r"^trtllm-build (?:.*\\\n)*.*$", text, re.MULTILINE)
    ]

    assert len(commands) == 2
    for command in commands:
        assert set(re.findall(r"--\w+", command)) <= TRTLLM_BUILD_OPTIONS
        assert ("--gather_generation_logits" in command) == ("acceptance" in options)
        assert ("--gemm_plugin auto" in command) == ("quantization" not in options)
    assert "--max_draft_len 10" in commands[0]
    assert "draft_tokens_external" not in commands[1]


@pytest.mark.parametrize("version", ["1.0.0", "1.2.1", "1.4.0rc1"])
@pytest.mark.parametrize("kind", ["model", "prompt_lookup", "none"])
def test_the_python_script_generates(
    install: Install,
    make_config: MakeConfig,
    store: EngineStore,
    tmp_path: Path,
    version: str,
    kind: DraftKind,
):
    fake = install(Scenario(version=version))  # type: ignore[arg-type]
    config = make_config(flow="pytorch")
    script = tmp_path / "generate.py"
    script.write_text(
        snippets_of(config, store, kind, 0 if kind == "none" else 4)[GENERATE].text,
        encoding="utf-8",
    )

    result = subprocess.run([fake.python, script], capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) > 1  # the version, and the text


def test_no_engines_means_no_commands_to_build_them(
    install: Install, make_config: MakeConfig, store: EngineStore
):
    install(Scenario(version="1.4.0rc1"))

    assert set(snippets_of(make_config(), store)) == {GENERATE, SERVE, YAML_FILE}


def test_the_configuration_of_the_server_names_the_draft(
    install: Install, make_config: MakeConfig, store: EngineStore, tiny_draft: Path
):
    install()
    snippets = snippets_of(make_config(), store, number=3)

    lines = snippets[YAML_FILE].text.splitlines()
    assert "disable_overlap_scheduler: true" in lines
    assert lines[-4:] == [
        "speculative_config:",
        "  decoding_type: DraftTarget",
        "  max_draft_len: 3",
        f"  speculative_model: {json.dumps(str(tiny_draft.resolve()))}",
    ]
    assert f"--extra_llm_api_options {YAML_FILE}" in snippets[SERVE].text


def test_prompt_lookup_is_the_librarys_ngram(
    install: Install, make_config: MakeConfig, store: EngineStore
):
    install()

    text = snippets_of(make_config(draft=None), store, "prompt_lookup")[YAML_FILE].text

    assert "decoding_type: NGram" in text
    assert "max_matching_ngram_size: 3" in text


def test_plain_serving_needs_no_configuration(
    install: Install, make_config: MakeConfig, store: EngineStore, tiny_target: Path
):
    install()

    snippets = snippets_of(make_config(draft=None), store, "none", 0)

    assert YAML_FILE not in snippets
    assert snippets[SERVE].text == f"trtllm-serve {tiny_target.resolve()}\n"


def test_the_launcher_and_the_gpus_are_in_the_command(
    install: Install, make_config: MakeConfig, store: EngineStore
):
    from tests.fake_tensorrt_llm.scenario import Gpu

    install(Scenario(gpus=(Gpu(), Gpu())))
    config = make_config(
        flow="pytorch", tensor_parallel_size=2, launcher="mpirun -n 2 trtllm-llmapi-launch"
    )

    text = snippets_of(config, store)[SERVE].text

    assert text.startswith("mpirun -n 2 trtllm-llmapi-launch trtllm-serve ")
    assert "--tp_size 2" in text


def test_without_a_gpu_there_is_a_sentence(
    install: Install, make_config: MakeConfig, store: EngineStore
):
    install(Scenario(gpus=()))

    with pytest.raises(EngineError, match="shows no GPU"):
        take_away(make_config(), "model", 4, store)
