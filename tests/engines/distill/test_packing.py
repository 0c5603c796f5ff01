"""Shipping a draft: what is left out comes back, and only for its own target."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.base import Engine
from engines.benchmark import RunRecord, run, settings_of
from engines.bundled import DRAFT_FOLDER
from engines.config import BUNDLED, DEFAULT_NUM_DRAFT_TOKENS, EngineConfig, GenerationRequest
from engines.distill.packing import MAX_FILE_BYTES, main, pack
from engines.distill.student import make_student, save_student
from engines.errors import EngineBuildError, ModelLoadError
from engines.packed import EMBEDDINGS, PACKED_FILE, read_packed
from engines.slot import EngineSlot
from engines.stats import stats_of
from engines.tokenizer import load_tokenizer
from engines.transformers_backend.model import load_model
from engines.unpacking import main as unpacking_main, unpack
from tests.conftest import load_engine, write_tiny_model

SHIPPED_BYTES = 32_000_000
CPU = torch.device("cpu")


def write_draft(target: Path, folder: Path) -> Path:
    model = load_model(target, name="target", dtype=torch.float32, device=CPU)
    save_student(make_student(model, (0, 1)), folder)
    load_tokenizer(target, name="target").save_pretrained(folder)
    (folder / "README.md").write_text("# A card\n", encoding="utf-8")
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = write_tiny_model(tmp_path / "target", seed=3, num_layers=3)
    # Tied, as the embeddings of a draft that is packed are.
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def draft(target: Path, tmp_path: Path) -> Path:
    return write_draft(target, tmp_path / "draft")


@pytest.fixture
def packed(target: Path, draft: Path, tmp_path: Path) -> Path:
    pack(draft, target, str(target), tmp_path / "packed")
    return tmp_path / "packed"


def test_a_packed_draft_lacks_embeddings_head_and_tokenizer(packed: Path) -> None:
    names = {name for file in packed.glob("*.safetensors") for name in load_file(file)}
    assert names
    assert not any("embed" in name or "lm_head" in name for name in names)
    assert not list(packed.glob("tokenizer*"))
    assert "8-bit" in (packed / "README.md").read_text(encoding="utf-8")


def test_unpacking_gives_the_draft_back_within_its_rounding(
    draft: Path, target: Path, packed: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    output.mkdir()
    unpack(packed, target, output)
    before, after = load_file(draft / "model.safetensors"), load_file(output / "model.safetensors")
    assert before.keys() == after.keys()
    assert torch.equal(before[EMBEDDINGS], after[EMBEDDINGS])
    for name, weight in before.items():
        if weight.ndim == 2 and name != EMBEDDINGS:
            step = weight.float().abs().amax(dim=1, keepdim=True) / 127
            # Half a step of the integers, and bfloat16's own rounding on top.
            bound = step / 2 + weight.float().abs() * 2**-8
            assert ((weight.float() - after[name].float()).abs() <= bound + 1e-6).all()
        else:
            assert torch.equal(weight, after[name])
    vocabulary = load_tokenizer(output, name="draft").get_vocab()
    assert vocabulary == load_tokenizer(target, name="target").get_vocab()


def test_a_packed_folder_is_built_and_used_like_any_draft(
    target: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_STORE", str(tmp_path / "store"))
    config = EngineConfig(target=str(target), draft=str(packed), dtype="float32")
    stages = [progress.name for progress in EngineSlot().build(config)]
    assert "unpack packed" in stages
    assert "unpack packed" not in [progress.name for progress in EngineSlot().build(config)]
    with load_engine(config) as engine:
        ids = engine.encode("hello", chat_template=False)
        events = list(engine.generate(GenerationRequest(ids, "model", 2, 8)))
    assert events


def test_another_target_is_refused(packed: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", seed=4, num_layers=3)
    with pytest.raises(EngineBuildError, match=r"is not for .*other"):
        unpack(packed, other, tmp_path)


def test_a_draft_with_other_embeddings_is_not_packed(draft: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", seed=4, num_layers=3)
    with pytest.raises(EngineBuildError, match="its embeddings are not those of 'mine'"):
        pack(draft, other, "mine", tmp_path / "packed-other")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), "is damaged: its SHA-256"),
        (lambda path: path.unlink(), "cannot be unpacked"),
    ],
)
def test_a_damaged_part_is_refused(damage, sentence, target, packed, tmp_path) -> None:
    damage(packed / "part-1.safetensors")
    with pytest.raises(EngineBuildError, match=re.escape(sentence)):
        unpack(packed, target, tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2}', '{"version": 1, "target": "x"}'])
def test_an_unreadable_description_is_a_sentence(text, target, packed, tmp_path) -> None:
    (packed / PACKED_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(EngineBuildError, match=re.escape(PACKED_FILE)):
        unpack(packed, target, tmp_path)


def test_the_child_process_says_in_one_sentence_why_it_failed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert unpacking_main([str(tmp_path)] * 3) == 1
    assert capsys.readouterr().out.startswith("error: ")
    assert main([str(tmp_path), str(tmp_path), "target", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("error: ")


# -- the draft that the project ships


def test_the_shipped_draft_is_small_and_whole(tmp_path: Path) -> None:
    sizes = [path.stat().st_size for path in DRAFT_FOLDER.iterdir()]
    assert sum(sizes) <= SHIPPED_BYTES
    assert max(sizes) <= MAX_FILE_BYTES
    packed = read_packed(DRAFT_FOLDER)
    assert packed.target == BUNDLED
    assert {path.name for path in DRAFT_FOLDER.glob("*.safetensors")} == set(packed.files)
    shutil.copytree(DRAFT_FOLDER, tmp_path / "copy")
    # The files are whole, or this would be the sentence: the target is looked at behind them.
    with pytest.raises(ModelLoadError, match="has no weights"):
        unpack(tmp_path / "copy", tmp_path, tmp_path)


def test_the_card_says_how_the_shipped_draft_was_made_and_what_it_measured() -> None:
    card = (DRAFT_FOLDER / "README.md").read_text(encoding="utf-8")
    record = json.loads((DRAFT_FOLDER / "distill.json").read_text(encoding="utf-8"))
    assert record["command"] in card
    assert f"{record['generate']['num_tokens']:,} tokens written" in card
    assert f"{record['train']['num_tokens']:,} tokens read" in card
    for results in (record["evaluate"]["results"], record["evaluate_packed"]["results"]):
        for sampling in ("greedy", "temperature 1"):
            for category, figures in results[sampling].items():
                lengths = " | ".join(
                    f"{figures['num_draft_tokens'][number]['mean_acceptance_length']:.2f}"
                    for number in ("2", "4", "8")
                )
                assert f"{figures['agreement']:.3f} | {lengths} |" in card, category
    greedy = record["evaluate_packed"]["results"]["greedy"]
    assert greedy["all"]["agreement"] >= 0.62
    assert greedy["coding"]["agreement"] >= 0.70
    assert greedy["all"]["num_draft_tokens"]["4"]["mean_acceptance_length"] >= 2.2


@pytest.mark.bundled
def test_the_shipped_draft_is_accepted_as_its_card_says(bundled_engine: Engine) -> None:
    """On prompts of our own; the card's are not ours to copy."""
    prompts = (
        "Write a Python function that reverses a string.",
        "What is photosynthesis?",
        "Translate German to English: Der Hund schläft unter dem Tisch.",
        "A box holds 6 rows of 8 pens. How many pens are in 3 boxes?",
    )
    num_drafts = num_accepted = 0
    for prompt in prompts:
        ids = bundled_engine.encode(prompt, chat_template=True)
        plain = stats_of(bundled_engine.generate(GenerationRequest(ids, max_new_tokens=48)))
        request = GenerationRequest(ids, "model", 4, 48)
        stats = stats_of(bundled_engine.generate(request))
        assert stats.output_token_ids == plain.output_token_ids
        assert stats.num_drafts is not None
        assert stats.num_accepted_tokens is not None
        num_drafts += stats.num_drafts
        num_accepted += stats.num_accepted_tokens
    mean_acceptance_length = 1 + num_accepted / num_drafts
    assert mean_acceptance_length >= 2.2  # the card: 2.88 at four draft tokens, over all categories


@pytest.mark.bundled
@pytest.mark.parametrize(
    "prompt",
    [
        "Write a Python function that checks if a number is prime.",
        "Tell the beginning of a story about a clock that runs backwards.",
    ],
)
def test_the_bundled_pair_is_faster_than_its_target_alone_by_default(
    bundled_engine: Engine, prompt: str
) -> None:
    ids = bundled_engine.encode(prompt, chat_template=True)
    request = GenerationRequest(ids, "model", DEFAULT_NUM_DRAFT_TOKENS["model"], 64)
    record = RunRecord("", settings_of(bundled_engine, request, chat_template=True, repeats=3))
    for item in run(bundled_engine, request, baseline=True, repeats=3):
        record.apply(item)
    result = record.to_dict()
    assert result["identical"] is True
    assert result["speedup"] > 1
