"""The command line: what each command prints, its JSON, its exit code, one sentence on failure."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.base import BuildProgress
from engines.benchmark import RunEvent, RunRecord
from engines.child import PROJECT_ROOT
from engines.cli import _Progress, main
from engines.distill import DistillProgress, DistillSpec
from engines.events import Finish, Prefill, Step, Token
from engines.recording import read_recording, write_recording
from engines.store import EngineStore
from engines.terminal import distill_text
from tests.engines.pairs.tokenizers_of_kinds import WORDS, bpe, write_model

RUN_NAMES = {
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_accepted_tokens_per_pos",
    "acceptance_rate",
    "mean_acceptance_length",
    "num_output_tokens",
    "output_token_ids",
    "text",
    "time_to_first_token_s",
    "decode_s",
    "elapsed_s",
    "tokens_per_second",
    "draft_s",
    "target_s",
    "finish_reason",
}
COMPARISON_NAMES = {"speculative", "baseline", "speedup", "identical", "first_difference"}
SHARED_NAMES = {"prompt", "effective_settings", "environment"}
ESCAPES = "\x1b[2J\x9b31m\x07<script>alert(1)</script>"

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> Cli:
    """Runs a command in this process: exit code, standard output, standard error."""
    monkeypatch.setenv("SPECDEC_STORE", str(store.root))

    def run(*args: object) -> tuple[int, str, str]:
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return run


def child(*args: object, **options: Any) -> subprocess.Popen[str]:
    """Run a command as a user does."""
    return subprocess.Popen(
        [sys.executable, "-m", "engines", *map(str, args)],
        cwd=PROJECT_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def last_json(out: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(out.splitlines()[-1])
    return value


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A compared run whose texts try to steer the terminal."""
    settings = {"temperature": 0, "repeats": 1, "notes": [ESCAPES], "target": ESCAPES}
    record = RunRecord(ESCAPES, settings)
    kept = Token(5, f"yes{ESCAPES}", "accepted", target_prob=0.5)
    dropped = Token(6, f"no{ESCAPES}", "rejected")
    following = Token(7, "end", "recovered")
    plain = [Step((Token(id_, "t", "target"),), (), 0, 0, 0.1, 0.1 * id_) for id_ in (5, 7)]
    speculative = [Step((kept, following), (dropped,), 2, 0.1, 0.2, 0.4)]
    for side, steps in (("speculative", speculative), ("baseline", plain)):
        for event in (Prefill(3, 2, 0.1), *steps, Finish("length", 0.9)):
            record.apply(RunEvent(side, 0, event))  # type: ignore[arg-type]
    write_recording(record, tmp_path / "run.jsonl")
    return tmp_path / "run.jsonl"


# -- run


def test_a_run_prints_one_json_object_last(cli: Cli, tiny_target: Path, tiny_draft: Path):
    code, out, err = cli(
        "run", "--target", tiny_target, "--draft", tiny_draft, "--prompt", "hello", "--json",
        "--num-draft-tokens", 3, "--max-new-tokens", 8,
    )  # fmt: skip

    result = last_json(out)
    assert code == 0
    assert err == ""
    assert len(out.splitlines()) == 1
    assert result.keys() >= RUN_NAMES | SHARED_NAMES
    assert result["num_output_tokens"] == len(result["output_token_ids"]) == 8
    assert result["effective_settings"]["draft_kind"] == "model"
    assert result["effective_settings"]["num_draft_tokens"] == 3


def test_a_run_prints_its_text_and_figures_for_people(cli: Cli, tiny_target: Path):
    code, out, _ = cli(
        "run", "--target", tiny_target, "--prompt", "one two one two", "--max-new-tokens", 8,
        "--repeats", 2,
    )  # fmt: skip

    assert code == 0
    assert "[speculative, run 1 of 2]" in out
    assert "[speculative, run 2 of 2]" in out
    assert "speculative: 8 tokens in" in out
    assert "baseline" not in out


def test_a_compared_run_has_both_sides_and_what_differs(cli: Cli, tiny_target: Path):
    _, out, _ = cli(
        "run", "--target", tiny_target, "--prompt", "one two one two", "--max-new-tokens", 8,
        "--baseline", "--json",
    )  # fmt: skip

    result = last_json(out)
    assert result.keys() >= COMPARISON_NAMES | SHARED_NAMES
    assert result["speculative"].keys() >= RUN_NAMES
    assert result["baseline"].keys() >= RUN_NAMES
    assert result["identical"] is True
    assert result["first_difference"] is None
    assert result["speedup"] > 0


def test_plain_decoding_drafts_nothing(cli: Cli, tiny_target: Path):
    _, out, _ = cli(
        "run", "--target", tiny_target, "--prompt", "hi", "--max-new-tokens", 4,
        "--draft-kind", "none", "--json",
    )  # fmt: skip

    result = last_json(out)
    assert (result["num_draft_tokens"], result["acceptance_rate"]) == (0, None)


def test_one_seed_gives_one_output_and_another_another(cli: Cli, tiny_target: Path):
    def output(seed: int) -> list[int]:
        _, out, _ = cli(
            "run", "--target", tiny_target, "--prompt", "hi", "--max-new-tokens", 16,
            "--temperature", 1, "--seed", seed, "--json",
        )  # fmt: skip
        ids: list[int] = last_json(out)["output_token_ids"]
        return ids

    assert output(0) == output(0) != output(1)


def test_a_prompt_may_come_from_a_file_and_go_as_it_stands(
    cli: Cli, tiny_target: Path, tmp_path: Path
):
    (tmp_path / "prompt.txt").write_text("🙂 hi", encoding="utf-8")
    _, out, _ = cli(
        "run", "--target", tiny_target, "--prompt-file", tmp_path / "prompt.txt",
        "--max-new-tokens", 2, "--no-chat-template", "--json",
    )  # fmt: skip

    result = last_json(out)
    assert result["prompt"] == "🙂 hi"
    assert result["num_prompt_tokens"] == len("🙂 hi".encode())


def test_a_recorded_run_replays_as_the_same_run(cli: Cli, tiny_target: Path, tmp_path: Path):
    path = tmp_path / "run.jsonl"
    _, out, err = cli(
        "run", "--target", tiny_target, "--prompt", "hi", "--max-new-tokens", 4, "--baseline",
        "--record", path, "--json",
    )  # fmt: skip
    _, replayed, _ = cli("replay", path, "--json")

    assert err == f"recorded to {path}\n"
    assert last_json(replayed) == last_json(out)


# -- the other commands


def test_a_build_of_folders_is_a_check(cli: Cli, tiny_target: Path, tiny_draft: Path):
    pair = ("--target", tiny_target, "--draft", tiny_draft)
    code, out, err = cli("build", "--backend", "transformers", *pair)

    assert code == 0
    assert out == f"built: {tiny_target} and {tiny_draft}\n"
    assert err.startswith("[1/1] check\n")


def test_a_replay_prints_the_run_for_people(cli: Cli, recording: Path):
    code, out, _ = cli("replay", recording, "--speed", "1000")

    assert code == 0
    assert "[speculative]" in out
    assert "yes" in out
    assert "accepted 1 of 2 drafted (50%), 2.00 tokens a draft" in out
    assert "speedup 1.00x, output identical" in out


def test_built_engines_are_listed_and_removed(cli: Cli, store: EngineStore):
    with store.aside("tiny-0123") as folder:
        (folder / "weights").write_bytes(b"12345")
        store.commit(folder, key="tiny-0123", name=f"tiny{ESCAPES}", identity={})

    _, listed, _ = cli("engines", "list")
    _, as_json, _ = cli("engines", "list", "--json")
    code, removed, _ = cli("engines", "remove", "tiny-0123", "--json")
    _, empty, _ = cli("engines", "list")

    assert listed.startswith("tiny-0123  0.0 GB  ")
    assert "\x1b" not in listed
    assert last_json(as_json)["engines"][0]["num_bytes"] == 5
    assert (code, last_json(removed)) == (0, {"removed": "tiny-0123", "num_bytes": 5})
    assert empty.startswith("no engine is built yet: ")


def test_the_doctor_tells_people_and_programs(cli: Cli, store: EngineStore):
    code, out, _ = cli("doctor")
    _, as_json, _ = cli("doctor", "--json")

    assert code == 0
    assert "back end transformers: usable (torch " in out
    assert f"engine store {store.root}: 0 built" in out
    assert last_json(as_json)["backends"]["transformers"]["usable"] is True


# -- distill


def test_a_distillation_ends_in_a_draft_and_one_json_object(
    cli: Cli, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "draft"
    code, out, err = cli(
        "distill", "--target", tiny_target, "--output", folder, "--take", "1", "--minutes", "0.01",
        "--max-tokens", 1, "--sequence-length", 48, "--seed", 3, "--json",
    )  # fmt: skip

    result = last_json(out)
    assert code == 0
    assert len(out.splitlines()) == 1
    assert result["output"] == str(folder)
    assert (result["layers"], result["spec"]["seed"]) == ([1], 3)
    assert result["generate"]["num_tokens"] == 16 * 48
    assert result["evaluate"]["results"].keys() >= {"greedy", "temperature 1"}
    assert err.startswith("[1/1] check\n")
    for start in (
        "prepare, target ",
        "generate, 100%, 768 tokens written",
        "train, ",
        "evaluate, ",
    ):
        assert f"\n{start}" in err
    assert err.splitlines()[-1] == f"save, 100%, saved in {folder}"
    assert (folder / "model.safetensors").is_file()


def test_a_distillation_stopped_before_it_began_has_nothing_to_go_on_with(
    cli: Cli, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stopped(_: DistillSpec) -> Iterator[None]:
        yield None
        raise KeyboardInterrupt

    monkeypatch.setattr("engines.cli.distill", stopped)
    code, out, err = cli(
        "distill", "--target", tiny_target, "--output", tmp_path / "draft", "--json"
    )

    assert code == 130
    assert last_json(out) == {"output": str(tmp_path / "draft")}
    assert err.splitlines()[-1] == "stopped before anything was done"


def test_a_report_is_one_line_of_what_concerns_its_phase():
    reports = {
        DistillProgress("prepare", 0, message="4 layers"): "prepare, 4 layers",
        DistillProgress("train", 1): "train",
        DistillProgress("evaluate", 3, fraction=0.254, remaining_s=0.0): "evaluate, 25%",
        DistillProgress(
            "generate", 2, fraction=0.5, remaining_s=90.0, num_tokens=123456,
            tokens_per_second=28000.4,
        ): "generate, 50%, 123,456 tokens, 28,000 tokens/s, about 1.5 minutes left",
        DistillProgress(
            "train", 2, fraction=1.0, num_tokens=5, loss=1.23456, agreement=0.5, message="kept",
        ): "train, 100%, kept, loss 1.235",
    }  # fmt: skip

    assert [distill_text(report) for report in reports] == list(reports.values())


# -- bad input


def run_with(*args: str) -> list[str]:
    return ["run", "--target", "TINY", "--prompt", "hi", *args]


def distill_with(*args: str) -> list[str]:
    return ["distill", "--target", "TINY", "--output", "OUT", *args]


BAD_INPUT: list[tuple[list[str], int, list[str]]] = [
    ([], 2, ["COMMAND", "--help"]),
    (["fly"], 2, ["'fly'", "choose from", "run"]),
    (["engines"], 2, ["ACTION"]),
    (["run"], 2, ["--prompt", "--prompt-file"]),
    (["run", "--prompt", "hi", "--prompt-file", "x"], 2, ["--prompt-file", "not allowed with"]),
    (["run", "--prompt", "hi", "--fast"], 2, ["--fast"]),
    (["run", "--prompt", "hi", "--target", "/none"], 1, ["'/none'", "name a folder"]),
    (["run", "--prompt", "hi", "--target", "gpt2"], 1, ["'gpt2'", "org/name"]),
    (["run", "--prompt", "hi", "--target", "BROKEN"], 1, ["broken/config.json'", "cannot be read"]),
    (["run", "--prompt", "hi", "--target", "MISSING.gguf"], 1, ["MISSING.gguf", "name a folder"]),
    (["run", "--prompt", "hi", "--target", " "], 2, ["target is ' '", "name a model"]),
    (["run", "--prompt", "hi", "--backend", "abacus"], 2, ["'abacus'", "transformers"]),
    (["run", "--prompt", "hi", "--backend", "replay"], 2, ["'replay'", "transformers"]),
    (["run", "--backend", "replay", "--target", "x.jsonl", "--prompt", "hi"], 2, ["'replay'"]),
    (["build", "--backend", "replay"], 2, ["'replay'", "transformers"]),
    (["run", "--prompt", "", "--target", "TINY"], 2, ["the prompt is empty", "type some text"]),
    (["run", "--prompt", " \n", "--target", "TINY"], 2, ["the prompt is empty"]),
    (["run", "--prompt", "a\udcff", "--target", "TINY"], 2, ["at character 1", "UTF-8"]),
    (["run", "--prompt", "a" * 600, "--target", "TINY"], 2, ["602 tokens", "shorten the prompt"]),
    (["run", "--prompt-file", "/none.txt"], 2, ["'/none.txt'", "No such file"]),
    (["run", "--prompt-file", "/"], 2, ["'/'", "Is a directory"]),
    (["run", "--prompt-file", "LATIN1"], 2, ["latin1.txt", "can't decode"]),
    (
        ["run", "--prompt-file", "EMOJI", "--target", "TINY"],
        2,
        ["100,002 tokens", "the context holds 512", "shorten the prompt"],
    ),
    (run_with("--num-draft-tokens", "0"), 2, ["num_draft_tokens is 0", "use 1 to 32"]),
    (run_with("--num-draft-tokens", "-1"), 2, ["num_draft_tokens is -1", "use 1 to 32"]),
    (run_with("--num-draft-tokens", "1000"), 2, ["num_draft_tokens is 1000", "use 1 to 32"]),
    (run_with("--num-draft-tokens", "x"), 2, ["num_draft_tokens is 'x'", "use 1 to 32"]),
    (run_with("--draft-kind", "none", "--num-draft-tokens", "3"), 2, ["is 3", "use 0"]),
    (run_with("--draft-kind", "model"), 2, ["no draft model is loaded", "prompt_lookup"]),
    (run_with("--draft-kind", "model", "--baseline"), 2, ["no draft model is loaded"]),
    (run_with("--draft-kind", "luck"), 2, ["'luck'", "prompt_lookup"]),
    (run_with("--draft", "/none"), 1, ["'/none'", "name a folder"]),
    (run_with("--temperature", "nan"), 2, ["temperature is nan", "use 0 (greedy) to 10"]),
    (run_with("--temperature", "-1"), 2, ["temperature is -1", "use 0 (greedy) to 10"]),
    (run_with("--temperature", "warm"), 2, ["temperature is 'warm'", "0 to 10"]),
    (run_with("--top-p", "0"), 2, ["top_p is 0", "use more than 0"]),
    (run_with("--top-k", "1.5"), 2, ["top_k is '1.5'", "whole number"]),
    (run_with("--seed", "-1"), 2, ["seed is -1", "from 0"]),
    (run_with("--max-new-tokens", "0"), 2, ["max_new_tokens is 0", "use a whole number from 1"]),
    (run_with("--repeats", "0"), 2, ["0", "choose from 1, 2"]),
    (run_with("--repeats", "often"), 2, ["repeats is 'often'", "use 1 to 9"]),
    (run_with("--record", "/none/run.jsonl"), 1, ["'/none/run.jsonl'", "make it first"]),
    (run_with("--record", "/"), 1, ["'/'", "is not a file"]),
    (["replay", "/none.jsonl"], 1, ["'/none.jsonl'", "No such file"]),
    (["replay", "LATIN1"], 1, ["latin1.txt", "can't decode"]),
    (["replay", "BROKEN/config.json"], 1, ["config.json", "line 1 is not JSON"]),
    (["replay", "x", "--speed", "0"], 2, ["speed is '0'", "use 0.01 to 1000"]),
    (["replay", "x", "--speed", "nan"], 2, ["speed is 'nan'", "use 0.01 to 1000"]),
    (["build", "--target", "TINY", "--draft", "BROKEN"], 1, ["'broken'", "cannot be read"]),
    (["distill", "--target", "TINY"], 2, ["--output"]),
    (["distill", "--output", " ", "--target", "TINY"], 2, ["output is empty", "name a folder"]),
    (["distill", "--output", "OUT", "--target", "/none"], 1, ["'/none'", "name a folder"]),
    (distill_with("--layers", "0"), 2, ["num_layers is 0", "from 1 to"]),
    (distill_with("--layers", "-1"), 2, ["num_layers is -1", "from 1 to"]),
    (distill_with("--layers", "few"), 2, ["layers is 'few'", "whole number"]),
    (distill_with("--layers", "3"), 1, ["num_layers is 3", "the target has 2", "use 1 to 2"]),
    (distill_with("--take", "0,x"), 2, ["take is '0,x'", "0,1,28,29"]),
    (distill_with("--take", "0,1", "--layers", "1"), 2, ["names 2 layers", "num_layers is 1"]),
    (distill_with("--minutes", "0"), 2, ["minutes is 0.0", "use more than 0"]),
    (distill_with("--minutes", "soon"), 2, ["minutes is 'soon'", "above 0"]),
    (distill_with("--seed", "-1"), 2, ["seed is -1", "from 0"]),
    (distill_with("--sequence-length", "8"), 2, ["sequence_length is 8", "from 32 to 4,096"]),
    (distill_with("--max-tokens", "0"), 2, ["max_tokens is 0", "from 1"]),
    (distill_with("--device", "tpu"), 2, ["'tpu'", "cuda"]),
    (
        ["distill", "--output", "FULL", "--target", "TINY", "--layers", "1"],
        1,
        ["full' is not empty", "name a new or an empty one"],
    ),
    (distill_with("--take", "1,1"), 1, ["layers is 1,1", "name each once"]),
    (distill_with("--take", "1,0"), 1, ["layers is 1,0", "the lowest first"]),
    (distill_with("--prompts", "~nosuchuser/x"), 2, ["'~nosuchuser/x'"]),
    (["distill", "--output", "~nosuchuser/x"], 2, ["there is no folder '~nosuchuser/x'"]),
    (["distill", "--output", "x" * 300], 1, ["x'", "cannot be used", "too long"]),
    (
        [
            "distill",
            "--target",
            "TINY",
            "--output",
            "OUT",
            "--layers",
            "1",
            "--sequence-length",
            "513",
        ],
        1,
        ["sequence_length is 513", "holds 512 tokens", "use fewer"],
    ),
    (
        ["pack", "--draft", "TINY", "--target", "TINY", "--output", "OUT"],
        2,
        ["target is '", "name it as others can", "'bundled'"],
    ),
    (["pack", "--draft", "TINY", "--target", "~nosuchuser/x", "--output", "OUT"], 1, []),
    (["engines", "remove", "none-123"], 1, ["'none-123'", "built are: none"]),
    (["engines", "remove", "../x"], 1, ["'../x'", "built are: none"]),
]


@pytest.mark.parametrize(
    ("args", "exit_code", "told"), BAD_INPUT, ids=[" ".join(args)[:60] for args, *_ in BAD_INPUT]
)
def test_bad_input_ends_in_one_sentence_and_its_exit_code(
    cli: Cli,
    tiny_target: Path,
    tmp_path: Path,
    args: list[str],
    exit_code: int,
    told: list[str],
):
    broken, latin1 = tmp_path / "broken", tmp_path / "latin1.txt"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    latin1.write_bytes("é".encode("latin-1"))
    emoji = tmp_path / "emoji.txt"
    emoji.write_text("🙂" * 25_000, encoding="utf-8")  # 100 kB
    shutil.copytree(broken, tmp_path / "full")
    places = {"TINY": tiny_target, "BROKEN": broken, "LATIN1": latin1, "EMOJI": emoji}
    places |= {"FULL": tmp_path / "full", "OUT": tmp_path / "draft"}
    for name, path in places.items():
        args = [arg.replace(name, str(path)) for arg in args]

    code, out, err = cli(*args)

    lines = [line for line in err.splitlines() if line[0] not in "[ "]  # not of a build's progress
    assert code == exit_code
    assert out == ""
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert all(part in lines[0] for part in told), lines[0]
    assert not (tmp_path / "draft").exists()


def test_a_target_that_no_draft_can_be_made_of_is_told_in_one_sentence(
    cli: Cli, tiny_target: Path, tmp_path: Path
):
    from transformers import GPT2Config, GPT2LMHeadModel

    target = tmp_path / "other"
    shutil.copytree(tiny_target, target)
    sizes = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(target)

    code, out, err = cli("distill", "--target", target, "--output", tmp_path / "draft")

    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == (
        "error: distilling: 'other' cannot be distilled: it is a 'gpt2' model, and drafts are "
        "made of the 'llama' architecture only"
    )
    assert err.count("error: ") == 1
    assert not (tmp_path / "draft").exists()


# -- terminals


def test_what_a_recording_says_does_not_steer_the_terminal(cli: Cli, recording: Path):
    _, out, _ = cli("replay", recording)

    assert "<script>" in out  # harmless in a terminal, and what the model said
    assert not any(character in out for character in "\x1b\x9b\x07")


@pytest.mark.parametrize("args", [["replay", ESCAPES], ["run", f"--{ESCAPES}"], [ESCAPES]])
def test_what_a_user_pastes_does_not_steer_the_terminal(cli: Cli, args: list[str]):
    code, _, err = cli(*args)

    assert code in (1, 2)
    assert not any(character in err for character in "\x1b\x9b\x07")


def test_json_holds_a_hostile_text_as_it_is_but_escaped(cli: Cli, recording: Path):
    _, out, _ = cli("replay", recording, "--json")

    assert last_json(out)["speculative"]["text"] == f"yes{ESCAPES}end"
    assert out.isascii()
    assert "\x1b" not in out


# -- as a process


def test_a_failure_has_its_exit_code_and_no_traceback(tmp_path: Path):
    with child("replay", tmp_path / "none.jsonl") as process:
        out, err = process.communicate()

    assert process.returncode == 1
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_a_reader_that_leaves_early_sees_no_traceback(recording: Path, json_option: list[str]):
    with child("replay", recording, *json_option) as process:
        assert process.stdout is not None
        process.stdout.close()  # as `head -0` does
        assert process.stderr is not None
        err = process.stderr.read()

    assert process.returncode == 1
    assert err == ""


def test_a_terminal_that_knows_only_ascii_shows_question_marks(recording: Path):
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with child("replay", recording, env=env) as process:
        out, err = process.communicate()

    assert process.returncode == 0
    assert err == ""
    assert "?" in out


def test_stopping_a_run_keeps_what_there_is_of_it(tiny_target: Path, tmp_path: Path):
    path = tmp_path / "run.jsonl"
    process = child(
        "run", "--target", tiny_target, "--prompt", "hi", "--max-new-tokens", 500,
        "--draft-kind", "none", "--repeats", 9, "--record", path,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        while "[speculative, run 1 of 9]" not in process.stdout.readline():
            assert process.poll() is None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()

    stats = read_recording(path).stats("speculative")
    assert process.returncode == 130
    assert err == f"stopped\nrecorded to {path}\n"
    assert stats[-1].finish_reason == "cancelled"
    assert f"speculative: {stats[-1].num_output_tokens} tokens in" in out


def test_a_download_is_told_at_every_tenth(capsys: pytest.CaptureFixture[str]):
    show = _Progress()
    for done in range(0, 101, 5):
        show(BuildProgress(1, 2, "fetch org/x", 0.0, done_bytes=done * 10**6, total_bytes=10**8))
    told = capsys.readouterr().err.splitlines()
    assert told[:3] == ["[1/2] fetch org/x", "  0 of 100 MB", "  10 of 100 MB"]
    assert len(told) == 1 + 11


def test_a_pair_is_checked_rule_by_rule(cli: Cli, tiny_target: Path, tiny_draft: Path):
    code, out, _ = cli("check", "--target", tiny_target, "--draft", tiny_draft)
    first, *rules, memory = out.splitlines()
    assert code == 0
    assert memory.startswith("memory: about ")
    assert first == "tiny-draft for tiny-target: compatible"
    assert "ok       token_texts: all 258 ids mean the same text on both sides" in rules
    assert len(rules) == 9


def test_a_pair_that_does_not_fit_fails_with_every_reason(cli: Cli, tmp_path: Path):
    target = write_model(tmp_path / "target", bpe())
    draft = write_model(tmp_path / "draft", bpe(list(reversed(WORDS))))
    code, out, _ = cli("check", "--target", target, "--draft", draft, "--json")
    result = last_json(out)
    assert code == 1
    assert (result["target"], result["draft"], result["outcome"]) == ("target", "draft", "refused")
    refused = [rule for rule in result["rules"] if rule["outcome"] == "refused"]
    assert [rule["rule"] for rule in refused] == ["token_texts"]
    assert len(refused[0]["differences"]) == 5

    code, out, _ = cli("check", "--target", target, "--draft", draft)
    assert code == 1
    assert out.splitlines()[:2][0] == "draft for target: not compatible"
    assert out.splitlines()[1].startswith(
        "refused  token_texts: their tokenizers differ at 10 of 10"
    )


def test_a_check_without_a_draft_says_what_is_missing(cli: Cli, tiny_target: Path):
    code, _, err = cli("check", "--target", tiny_target)
    assert (code, err) == (2, "error: draft is missing: name a draft model with --draft\n")


def test_stopping_a_distillation_keeps_what_there_is_of_it(tiny_target: Path, tmp_path: Path):
    folder = tmp_path / "draft"
    process = child(
        "distill", "--target", tiny_target, "--output", folder, "--layers", 1, "--minutes", 60,
        "--sequence-length", 48, "--json", env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    with process:
        assert process.stderr is not None
        while not (folder / "distill" / "state.json").is_file():
            process.stderr.readline()
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()

    lines = [line for line in err.splitlines() if not line.startswith("generate, ")]
    assert process.returncode == 130
    assert lines == [f"stopped; what is done is in {folder}, and --resume goes on with it"]
    assert last_json(out) == {"output": str(folder)}
