"""A distillation in this process: what it refuses, what its text depends on, what stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engines.distill import RECORD, DistillProgress, DistillSpec
from engines.distill.card import command_of
from engines.distill.pipeline import Distillation
from engines.distill.workspace import Workspace
from engines.errors import EngineBuildError, EngineError
from tests.engines.conftest import largest_file
from tests.engines.distill.conftest import float32_model

SHORT = {"num_layers": 2, "minutes": 0.01, "sequence_length": 48, "max_tokens": 1600}


@pytest.fixture
def spec(plain_target: Path, tmp_path: Path) -> DistillSpec:
    return DistillSpec(str(tmp_path / "draft"), str(plain_target), **SHORT)  # type: ignore[arg-type]


def run_until(spec: DistillSpec, *phases: str) -> list[DistillProgress]:
    """Run until a phase reports for the first time, or to the end, then stop."""
    reports = []
    running = Distillation(spec).run()
    for report in running:
        reports.append(report)
        if report.phase in phases:
            break
    running.close()
    return reports


def failure_of(spec: DistillSpec) -> str:
    """Run until it fails, keeping nothing of it: what it holds holds the folder."""
    try:
        run_until(spec)
    except EngineBuildError as exc:
        return str(exc)
    pytest.fail("it did not fail")


def chunks_of(spec: DistillSpec) -> list[list[bytes]]:
    workspace = Workspace(spec.folder)
    chunks = []
    for number in range(len(list(workspace.work.glob("text-*.npz")))):
        chunks.append([part.numpy().tobytes() for part in workspace.read_chunk(number)])
    return chunks


# -- refusals: one sentence, and the folder is as it was


def other_architecture(spec: DistillSpec, folder: Path) -> DistillSpec:
    config = transformers.GPT2Config(vocab_size=258, n_embd=32, n_layer=2, n_head=4)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    return replace(spec, target=str(folder / "gpt2"))


def bad_prompts(spec: DistillSpec, folder: Path) -> DistillSpec:
    (folder / "prompts.jsonl").write_text("{}")
    return replace(spec, prompts=str(folder / "prompts.jsonl"))


def bad_evaluation(spec: DistillSpec, folder: Path) -> DistillSpec:
    return replace(spec, evaluation=str(folder / "none.txt"))


def evaluation_of_beginnings(spec: DistillSpec, folder: Path) -> DistillSpec:
    (folder / "asked.jsonl").write_text('{"prompt": "Whole"}\n{"beginning": "Begun"}')
    return replace(spec, evaluation=str(folder / "asked.jsonl"))


def evaluation_that_is_trained_on(spec: DistillSpec, folder: Path) -> DistillSpec:
    (folder / "own.txt").write_text("One\nTwo\nThree")
    (folder / "asked.txt").write_text("Three\nOne")
    return replace(spec, prompts=str(folder / "own.txt"), evaluation=str(folder / "asked.txt"))


def taken_folder(spec: DistillSpec, folder: Path) -> DistillSpec:
    return replace(spec, output=str(folder))  # of pytest's own: it holds a file


REFUSALS: list[tuple[Callable[[DistillSpec, Path], DistillSpec], str]] = [
    (other_architecture, "'gpt2' cannot be distilled: it is a 'gpt2' model"),
    (lambda spec, _: replace(spec, num_layers=5), "num_layers is 5, and the target has 4"),
    (lambda spec, _: replace(spec, layers=(0, 4)), "layers is 0,4: use numbers from 0 to 3"),
    (lambda spec, _: replace(spec, num_layers=2, layers=(5, 5)), "layers is 5,5: name each once"),
    (lambda spec, _: replace(spec, num_layers=2, layers=(9, 1)), "layers is 9,1: .* lowest first"),
    (
        lambda spec, _: replace(spec, sequence_length=513),
        "sequence_length is 513, and the target's context holds 512 tokens: use fewer",
    ),
    (lambda spec, _: replace(spec, output="x" * 300), "'x{300}' cannot be used: .*too long"),
    (lambda spec, _: replace(spec, target="/none"), "'/none'"),
    (lambda spec, _: replace(spec, target="org/none"), "org/none"),
    (lambda spec, _: replace(spec, device="cuda"), "PyTorch sees no CUDA device here"),
    (lambda spec, _: replace(spec, resume=True), "holds no interrupted run"),
    (bad_prompts, "line 1 of '.*prompts.jsonl' is no prompt"),
    (bad_evaluation, "the prompt file '.*none.txt' cannot be read"),
    (evaluation_of_beginnings, "'.*asked.jsonl' holds beginnings: a draft is evaluated on whole"),
    (evaluation_that_is_trained_on, "every prompt of '.*asked.txt' is trained on: evaluate on"),
    (taken_folder, "is not empty"),
]


@pytest.mark.parametrize(("change", "told"), REFUSALS, ids=[told for _, told in REFUSALS])
def test_what_cannot_be_done_is_refused_before_the_folder_is_touched(
    spec: DistillSpec, tmp_path: Path, change: Callable[[DistillSpec, Path], DistillSpec], told: str
):
    (tmp_path / "note.txt").write_text("")
    changed = change(spec, tmp_path)
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises((EngineError, ValueError), match=told) as caught:
        Distillation(changed)

    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


# -- the text


def test_one_seed_writes_the_same_data_and_another_other(spec: DistillSpec):
    texts = []
    for seed, output in ((3, "a"), (3, "b"), (4, "c")):
        seeded = replace(spec, seed=seed, output=f"{spec.output}-{output}")
        run_until(seeded, "train")
        texts.append(chunks_of(seeded))

    assert len(texts[0]) == 3  # of 768 tokens: the first whole ones that are 1600 or more
    assert texts[0] == texts[1]
    assert all(chunk not in texts[0] for chunk in texts[2])


def test_an_interrupted_text_goes_on_as_if_it_had_not_been(spec: DistillSpec):
    run_until(spec, "train")
    whole = chunks_of(spec)
    work = spec.folder / "distill"
    state = json.loads((work / "state.json").read_text())
    assert state["phases"]["generate"].pop("is_done") is True
    state["phases"]["generate"].update(num_chunks=1, num_tokens=768)
    Workspace(spec.folder).write_state(state)  # as it was kept after its first chunk
    (work / "text-00001.npz").unlink()
    (work / "text-00002.npz").write_bytes(b"")  # of no run that this state knows of
    first = (work / "text-00000.npz").stat()

    run_until(replace(spec, resume=True), "train")

    again = (work / "text-00000.npz").stat()
    assert (again.st_mtime_ns, again.st_ino) == (first.st_mtime_ns, first.st_ino)
    assert chunks_of(spec) == whole


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 1}, "begun with another seed (0, not 1)"),
        ({"num_layers": 3}, "begun with another layers ([0, 3], not [0, 1, 3])"),
        ({"sequence_length": 64}, "begun with another sequence_length (48, not 64)"),
        ({"minutes": 1}, "begun with another minutes (0.01, not 1)"),
        ({"max_tokens": 700}, "begun with another max_tokens (1600, not 700)"),
        ({"prompts": "own"}, "begun with another prompts ("),
    ],
)
def test_a_resumed_run_may_not_be_another_one(
    spec: DistillSpec, tmp_path: Path, changes: dict[str, Any], told: str
):
    run_until(spec, "prepare")
    if "prompts" in changes:
        (tmp_path / "own.txt").write_text("Hello!")
        changes = {"prompts": str(tmp_path / "own.txt")}

    with pytest.raises(EngineBuildError) as caught:
        Distillation(replace(spec, resume=True, **changes))

    assert told in str(caught.value)


def test_a_folder_where_a_run_is_at_work_is_refused(spec: DistillSpec):
    running = Distillation(spec).run()
    next(running)

    with pytest.raises(EngineBuildError, match=r"another run is at work in '.*/draft': wait for"):
        Distillation(replace(spec, resume=True))

    running.close()
    del running
    run_until(replace(spec, resume=True), "prepare")


def test_a_damaged_text_is_told_in_a_sentence(spec: DistillSpec):
    run_until(spec, "train")
    path = spec.folder / "distill" / "text-00001.npz"
    path.write_bytes(path.read_bytes()[:100])

    assert failure_of(replace(spec, resume=True)).startswith(f"'{path}' cannot be read: ")


def test_a_damaged_checkpoint_is_told_in_a_sentence(spec: DistillSpec):
    run_until(spec, "evaluate")
    state = json.loads((spec.folder / "distill" / "state.json").read_text())
    del state["phases"]["train"]["is_done"]
    Workspace(spec.folder).write_state(state)
    path = spec.folder / "distill" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-100])

    assert failure_of(replace(spec, resume=True)).startswith(f"'{path}' cannot be read: ")


# -- prompts of one's own


def messages_of(spec: DistillSpec) -> list[str]:
    return [report.message or "" for report in run_until(spec, "generate")]


def test_prompts_too_few_to_keep_some_apart_are_told(spec: DistillSpec, tmp_path: Path):
    told = "there are too few prompts to keep some apart"
    path = tmp_path / "prompts.txt"
    for number, (num_prompts, is_told) in enumerate([(7, True), (8, False)]):
        path.write_text("\n".join(map(str, range(num_prompts))))
        own = replace(spec, prompts=str(path), output=f"{spec.output}-{number}")
        assert any(told in message for message in messages_of(own)) == is_told

    assert not any(told in message for message in messages_of(spec))  # without any of one's own


def test_prompts_to_evaluate_on_that_are_trained_on_are_left_out(spec: DistillSpec, tmp_path: Path):
    own, asked = tmp_path / "prompts.txt", tmp_path / "questions.jsonl"
    own.write_text("\n".join(["Hello!", *map(str, range(8))]))
    questions = [
        {"prompt": "Hello!", "category": "known"},
        {"turns": ["7"], "category": "known"},
        {"prompt": "New?", "category": "new"},
    ]
    asked.write_text("\n".join(map(json.dumps, questions)))

    reports = run_until(replace(spec, prompts=str(own), evaluation=str(asked)))

    results = json.loads((spec.folder / RECORD).read_text())["evaluate"]["results"]
    assert results["greedy"].keys() == {"all", "new"}
    assert results["greedy"]["all"]["num_prompts"] == 1
    assert "2 prompts to evaluate on are among those trained on, and left out" in [
        report.message for report in reports
    ]


def test_a_kept_prompt_ends_where_the_users_turn_ended_with_whatever_token(
    chat_target: Path, tmp_path: Path
):
    spec = DistillSpec(str(tmp_path / "draft"), str(chat_target), **SHORT)  # type: ignore[arg-type]
    distillation = Distillation(spec)
    script, tokenizer = distillation._script, distillation._tokenizer
    other_id = tokenizer.convert_tokens_to_ids("</s>")
    distillation._script = replace(script, stop_ids=script.stop_ids | {other_id})
    switch = [*script.turns[0].switch, *tokenizer("No.").input_ids, script.end_id]
    question = [*script.opening, *tokenizer("Who?").input_ids]
    rows = [[*question, end_id, *switch] for end_id in (script.end_id, other_id)]
    rows += [[*question, *tokenizer("x" * (len(switch) + 1)).input_ids]]  # not ended
    token_ids = torch.tensor(rows * 8)
    distillation.workspace.write_chunk(0, token_ids, torch.ones_like(token_ids) > 0)

    prompts = [prompt.text for prompt in distillation._kept_prompts()]

    assert prompts == ["Who?", "Who?" + "x" * (len(switch) + 1)]  # each once


# -- the rest


def test_a_disk_that_fills_up_is_told_and_what_is_done_goes_on_later(spec: DistillSpec):
    with largest_file(20_000):
        told = failure_of(spec)

    assert told.startswith(f"'{spec.folder}' cannot be written: ")
    assert len(chunks_of(spec)) == 3

    reports = run_until(replace(spec, resume=True))
    assert "generate" not in {report.phase for report in reports}
    assert (spec.folder / RECORD).is_file()


def test_an_own_evaluation_has_its_categories_in_the_card(spec: DistillSpec, tmp_path: Path):
    path = tmp_path / "questions.jsonl"
    questions = [
        {"category": "writing", "turns": ["Write."]},
        {"category": "coding", "turns": ["Code."]},
        {"category": "coding", "turns": ["x" * 700]},
    ]
    path.write_text("\n".join(map(json.dumps, questions)))
    evaluated = replace(spec, evaluation=str(path))

    reports = run_until(evaluated)

    card = (spec.folder / "README.md").read_text()
    record = json.loads((spec.folder / RECORD).read_text())
    results = record["evaluate"]["results"]
    assert [report.phase for report in reports if report.fraction == 1][-2:] == ["evaluate", "save"]
    assert "The prompts of `questions.jsonl`, never trained on (1 longer than 600 tokens" in card
    for sampling in ("greedy", "temperature 1"):
        assert results[sampling].keys() == {"all", "writing", "coding"}
        assert card.count(f"### {sampling.capitalize()}\n") == 1
    assert card.count("| all | 2 |") == card.count("| coding | 1 |") == 2
    agreement = results["greedy"]["all"]["agreement"]
    assert f"| {agreement:.3f} |" in card
    assert record["command"] == command_of(evaluated)
    assert f"| made with | `{record['command']}` |" in card
    assert str(tmp_path) not in card.replace(spec.target, "")


def test_the_kept_draft_is_the_best_of_the_curve(spec: DistillSpec):
    run_until(spec)

    train = json.loads((spec.folder / RECORD).read_text())["train"]
    best = max(point["agreement"] for point in train["curve"])
    assert train["best"]["agreement"] == best
    assert train["best"] == next(p for p in train["curve"] if p["agreement"] == best)


def test_embeddings_and_head_of_the_draft_are_the_targets(spec: DistillSpec):
    run_until(spec)

    target, draft = float32_model(Path(spec.target)), float32_model(spec.folder)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        expected = target.state_dict()[name].bfloat16().float()
        assert torch.equal(draft.state_dict()[name], expected)
