"""The transformers back end: builds, refusals of every broken checkpoint, and the engine's life."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import MambaConfig, MambaForCausalLM

from engines.base import Engine
from engines.benchmark import WarmUp, run
from engines.config import DraftKind, DTypeName, EngineConfig, GenerationRequest, SamplingParams
from engines.drafting import PREFILL_CHUNK_TOKENS
from engines.errors import (
    BackendUnavailableError,
    EngineBuildError,
    EngineError,
    GenerationError,
    IncompatibleModelsError,
    ModelLoadError,
)
from engines.events import Step
from engines.stats import GenerationStats, stats_of
from engines.store import EngineStore
from engines.tokenizer import load_gguf_tokenizer
from engines.transformers_backend.backend import TransformersBackend
from engines.transformers_backend.engine import TransformersEngine
from tests.engines.conftest import largest_file

NUM_TOKENS = 258  # of the tiny tokenizer; the tiny models have 320 rows
PROMPT = "one two three one two"


def write_tiny_gguf(path: Path, *, splitting: str = "gpt-2") -> Path:
    """Write a random Llama of one layer with a byte-level tokenizer as a GGUF file."""
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "12"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 257)
    writer.add_tokenizer_pre(splitting)
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd": (len(tokens), 32),
        "output": (len(tokens), 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_norm": (32,),
        "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape, scale=0.4).astype("f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def backend(store: EngineStore) -> TransformersBackend:
    return TransformersBackend(store)


@pytest.fixture
def copy(tiny_target: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return shutil.copytree(tiny_target, tmp_path / "copy")


def build(backend: TransformersBackend, config: EngineConfig) -> list[str]:
    return [step.message for step in backend.build(config) if step.message is not None]


def generate(engine: Engine, **options: Any) -> GenerationStats:
    token_ids = engine.encode(PROMPT, chat_template=False)
    return stats_of(engine.generate(GenerationRequest(token_ids, max_new_tokens=8, **options)))


def left_in(store: EngineStore) -> list[str]:
    """What lies in the store, locks apart."""
    return [path.name for path in store.root.glob("*") if path.name != ".locks"]


# -- building


def test_the_probe_names_versions_and_devices(backend: TransformersBackend):
    status = backend.probe()

    assert status.usable
    assert status.detail.startswith("torch ")
    assert status.devices[-1] == "cpu"


def test_a_gguf_file_is_converted_once_and_generates(
    backend: TransformersBackend, store: EngineStore, tiny_gguf: Path
):
    config = EngineConfig(target=str(tiny_gguf))

    first, second = build(backend, config), build(backend, config)

    assert [entry.name for entry in store.entries()] == ["tiny"]
    assert "dequantising the weights" in first
    assert "built already" in second
    assert first[-1] == second[-1] == "tiny: llama, 12 tensors"
    with backend.load(config) as engine:
        assert generate(engine).num_output_tokens == 8
        assert engine.encode("12", chat_template=False) == (NUM_TOKENS,)


@pytest.mark.parametrize(("splitting", "num_tokens"), [("gpt-2", 1), ("smollm", 2)])
def test_a_gguf_tokenizer_splits_digits_as_its_family_does(
    tmp_path: Path, splitting: str, num_tokens: int
):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", splitting=splitting)

    assert len(load_gguf_tokenizer(path)("12").input_ids) == num_tokens


@pytest.mark.parametrize(
    "damage",
    [lambda content: b"not a GGUF file", lambda content: content[: len(content) // 2]],
    ids=["another format", "half a file"],
)
def test_a_gguf_file_that_cannot_be_converted_is_told_and_leaves_nothing(
    backend: TransformersBackend,
    store: EngineStore,
    tiny_gguf: Path,
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
):
    path = tmp_path / "bad.gguf"
    path.write_bytes(damage(tiny_gguf.read_bytes()))

    with pytest.raises(EngineBuildError, match=r"^'bad\.gguf' cannot be read: .+"):
        build(backend, EngineConfig(target=str(path)))
    assert left_in(store) == []


def test_a_disk_too_full_to_convert_is_told_before_it_begins(
    backend: TransformersBackend,
    store: EngineStore,
    tiny_gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))

    with pytest.raises(
        EngineBuildError, match=r"needs about 67 MB in .*, where 1 MB are free: .* SPECDEC_STORE"
    ):
        build(backend, EngineConfig(target=str(tiny_gguf)))
    assert left_in(store) == []


def test_a_disk_that_fills_up_is_told_and_leaves_nothing(
    backend: TransformersBackend, store: EngineStore, tiny_gguf: Path
):
    with (
        largest_file(4096),
        pytest.raises(EngineBuildError, match=r"cannot be converted: .*File too large"),
    ):
        build(backend, EngineConfig(target=str(tiny_gguf)))

    assert left_in(store) == []


def test_closing_a_build_kills_the_conversion_and_leaves_nothing(
    backend: TransformersBackend, store: EngineStore, tiny_gguf: Path
):
    others = set(psutil.Process().children())
    progress = backend.build(EngineConfig(target=str(tiny_gguf)))
    while not any(name.startswith(".building-") for name in left_in(store)):
        next(progress)
    next(progress)
    (child,) = set(psutil.Process().children()) - others

    progress.close()

    assert not child.is_running()
    assert left_in(store) == []
    with store.lock(next(store.root.glob(".locks/*")).stem):
        pass


def test_a_bundled_build_in_another_tab_is_not_disturbed(
    backend: TransformersBackend,
    store: EngineStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(b"half")
    monkeypatch.setenv("SPECDEC_BUNDLED_GGUF", str(copy))
    first = backend.build(EngineConfig())
    while next(first).message is None:
        pass

    with pytest.raises(EngineBuildError, match="is being built or removed already"):
        build(backend, EngineConfig())

    with pytest.raises(EngineBuildError, match="is not whole: it has 4 bytes"):
        list(first)


def test_a_pair_that_fits_is_built_without_loading_it(
    backend: TransformersBackend, tiny_target: Path, tiny_draft: Path
):
    messages = build(backend, EngineConfig(target=str(tiny_target), draft=str(tiny_draft)))

    assert messages == [
        "tiny-target: llama, 21 tensors",
        "tiny-draft: llama, 12 tensors",
        "the draft can propose for the target",
    ]


# -- checkpoints that cannot be used


def edit_json(path: Path, **changed: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def edit_config(**changed: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changed)


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def cut_weights(num_bytes: int) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:num_bytes])

    return damage


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def drop_a_shard(folder: Path) -> None:
    weight_map = {"lm_head.weight": "model-00001-of-00001.safetensors"}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    (folder / "model.safetensors").unlink()


def drop_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def become_recurrent(folder: Path) -> None:
    config = MambaConfig(vocab_size=320, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(folder)


CUSTOM_CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
UNSEEN_BY_BUILD = {
    "a weight missing": (drop_a_weight, r"is incomplete: 1 weights are missing, model\.norm"),
    "weights of another shape": (
        edit_config(hidden_size=64),
        r"do not fit its config\.json: lm_head\.weight is \[320, 32\], not \[320, 64\]",
    ),
    "no such number of layers": (edit_config(num_hidden_layers=-1), "cannot be loaded"),
    "not a causal model": (edit_config(model_type="t5"), "Unrecognized configuration class"),
    "recurrent": (become_recurrent, "its cache cannot be rolled back"),
    "generation settings not JSON": (
        write("generation_config.json", "{"),
        r"generation_config\.json' cannot be read",
    ),
    "generation settings no object": (
        write("generation_config.json", "[1]"),
        r"generation_config\.json' cannot be read",
    ),
}
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (drop_weights, "no weights|no file named model"),
    "a shard missing": (drop_a_shard, r"No such file.*model-00001-of-00001"),
    "weights cut short": (cut_weights(5000), "incomplete metadata, file not fully covered"),
    "weights cut in the header": (cut_weights(100), "cannot be (read|loaded): .*header"),
    "weights empty": (cut_weights(0), "cannot be (read|loaded): .*header"),
    "config not JSON": (write("config.json", "{"), "is not a valid JSON file"),
    "config no object": (write("config.json", "[]"), "cannot be (read|loaded)"),
    "config empty": (write("config.json", "{}"), "Unrecognized model"),
    "config of wrong types": (edit_config(hidden_size="x"), "field 'hidden_size'"),
    "config that divides by zero": (edit_config(num_attention_heads=0), "zero"),
    "an unknown architecture": (
        edit_config(model_type="brand_new"),
        "does not recognize this architecture",
    ),
    "code of its own": (
        edit_config(model_type="theirs", auto_map=CUSTOM_CODE),
        "contains custom code",
    ),
    "no tokenizer": (drop_tokenizer, r"are tokenizer\.json and config\.json whole\?"),
    "tokenizer not JSON": (
        write("tokenizer.json", "{"),
        "the tokenizer of 'copy' cannot be loaded",
    ),
    "tokenizer of unknown kind": (
        write("tokenizer.json", '{"version": "1.0", "model": {"type": "Brand New"}}'),
        "the tokenizer of 'copy' cannot be loaded",
    ),
}


@pytest.mark.parametrize(("damage", "sentence"), BROKEN.values(), ids=BROKEN)
def test_the_build_refuses_a_broken_checkpoint(
    backend: TransformersBackend, copy: Path, damage: Callable[[Path], object], sentence: str
):
    damage(copy)

    with pytest.raises(ModelLoadError, match=sentence) as failure:
        build(backend, EngineConfig(target=str(copy)))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [*BROKEN.values(), *UNSEEN_BY_BUILD.values()],
    ids=[*BROKEN, *UNSEEN_BY_BUILD],
)
def test_loading_refuses_a_broken_checkpoint(
    backend: TransformersBackend, copy: Path, damage: Callable[[Path], object], sentence: str
):
    damage(copy)

    with pytest.raises(EngineError, match=sentence) as failure:
        backend.load(EngineConfig(target=str(copy)))
    assert "\n" not in str(failure.value)


def test_code_that_comes_with_a_checkpoint_is_not_offered_to_run(
    backend: TransformersBackend, copy: Path, capsys: pytest.CaptureFixture[str]
):
    edit_json(copy / "config.json", model_type="theirs", auto_map=CUSTOM_CODE)

    with pytest.raises(ModelLoadError):
        backend.load(EngineConfig(target=str(copy)))
    assert "Do you wish to run" not in capsys.readouterr().out


@pytest.mark.parametrize("ask", [build, TransformersBackend.load])
def test_a_draft_with_another_tokenizer_is_refused_before_any_weights_are_read(
    backend: TransformersBackend,
    tiny_target: Path,
    copy: Path,
    ask: Callable[[TransformersBackend, EngineConfig], object],
):
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    cat, dog = (next(text for text, id_ in vocabulary.items() if id_ == n) for n in (42, 43))
    vocabulary[cat], vocabulary[dog] = 43, 42
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    if ask is not build:  # a build reads the weights' headers first, to name every broken file
        drop_weights(copy)

    with pytest.raises(IncompatibleModelsError) as failure:
        ask(backend, EngineConfig(target=str(tiny_target), draft=str(copy)))

    assert "'copy' cannot draft for 'tiny-target': their tokenizers differ at 2 of 258 ids" in str(
        failure.value
    )
    assert f"id 42 is {cat!r} in the target, {dog!r} in the draft; id 43 is {dog!r} in" in str(
        failure.value
    )
    assert "or the draft kind 'prompt_lookup', which needs none" in str(failure.value)


def test_a_replaced_tokenizer_changes_the_answer(
    backend: TransformersBackend, tiny_target: Path, copy: Path
):
    config = EngineConfig(target=str(tiny_target), draft=str(copy))
    backend.load(config).close()
    tokenizer = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(tokenizer.replace('"A":', '"changed":'))

    with pytest.raises(IncompatibleModelsError):
        backend.load(config)


def test_a_missing_cuda_device_is_told(
    backend: TransformersBackend, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(BackendUnavailableError, match=r"device is 'cuda'.*use 'cpu' or 'auto'"):
        backend.load(EngineConfig(target=str(tiny_target), device="cuda"))


# -- what an engine says of itself


@pytest.mark.parametrize(
    ("settings", "notes"),
    [
        ({}, []),
        ({"repetition_penalty": 1.05}, ["repetition_penalty=1.05 is not applied"]),
        ({"min_p": 0.1, "top_k": 5}, ["min_p=0.1 is not applied, on neither side"]),
        ({"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_p": None}, []),
    ],
)
def test_settings_of_the_checkpoint_that_are_not_applied_are_noted(
    backend: TransformersBackend, copy: Path, settings: dict[str, object], notes: list[str]
):
    edit_json(copy / "generation_config.json", **settings)

    with backend.load(EngineConfig(target=str(copy))) as engine:
        assert len(engine.info.notes) == len(notes)
        assert all(note in told for note, told in zip(notes, engine.info.notes, strict=True))


def test_half_precision_is_noted(backend: TransformersBackend, tiny_target: Path):
    with backend.load(EngineConfig(target=str(tiny_target), dtype="bfloat16")) as engine:
        assert engine.info.dtype == "bfloat16"
        assert "greedy outputs may part" in engine.info.notes[0]


@pytest.mark.parametrize(
    ("dtype", "capability", "dtypes"),
    [
        ("auto", "AVX512", ("float32", "bfloat16")),
        ("auto", "AVX2", ("float32", "float32")),
        ("float32", "AVX512", ("float32", "float32")),
        ("bfloat16", "AVX2", ("bfloat16", "bfloat16")),
    ],
)
def test_a_draft_is_narrower_by_itself_where_the_cpu_is_quick_at_it(
    backend: TransformersBackend,
    tiny_target: Path,
    tiny_draft: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: DTypeName,
    capability: str,
    dtypes: tuple[str, str],
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    config = EngineConfig(target=str(tiny_target), draft=str(tiny_draft), dtype=dtype)

    with backend.load(config) as engine:
        models = (engine_of(engine).target_model, engine_of(engine).draft_model)
        assert (engine.info.dtype, engine.info.draft_dtype) == dtypes
        assert tuple(str(model.dtype).removeprefix("torch.") for model in models) == dtypes
        assert generate(engine, draft_kind="model", num_draft_tokens=2).num_output_tokens == 8


def test_without_a_draft_model_there_is_no_draft_dtype(
    backend: TransformersBackend, tiny_target: Path
):
    with backend.load(EngineConfig(target=str(tiny_target))) as engine:
        assert engine.info.draft_dtype is None


def test_an_engine_without_a_draft_model_does_not_offer_one(
    backend: TransformersBackend, tiny_target: Path
):
    with backend.load(EngineConfig(target=str(tiny_target))) as engine:
        assert engine.draft_kinds == ("prompt_lookup", "none")
        with pytest.raises(ValueError, match=r"no draft model is loaded: name one, or use one of"):
            generate(engine, draft_kind="model", num_draft_tokens=2)


# -- generating


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("padded", ["target", "draft"])
def test_ids_that_only_pad_the_vocabulary_are_never_drawn(
    backend: TransformersBackend, tiny_target: Path, copy: Path, padded: str, temperature: float
):
    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"][NUM_TOKENS:] *= 1000  # about half of these become likeliest by far
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    other = str(tiny_target)
    target, draft = (str(copy), other) if padded == "target" else (other, str(copy))

    with backend.load(EngineConfig(target=target, draft=draft)) as engine:
        token_ids = engine.encode(PROMPT, chat_template=False)
        request = GenerationRequest(
            token_ids, "model", 3, max_new_tokens=16, sampling=SamplingParams(temperature)
        )
        steps = [event for event in engine.generate(request) if isinstance(event, Step)]

    drawn = [token.id for step in steps for token in step.tokens_in_place]
    assert drawn
    assert max(drawn) < NUM_TOKENS


def test_a_prompt_longer_than_the_context_is_told_with_both_lengths(tiny_engine: Engine):
    assert len(tiny_engine.encode("a" * 511, chat_template=False)) == 511
    with pytest.raises(ValueError, match="the prompt has 512 tokens, and the context holds 512"):
        tiny_engine.encode("a" * 512, chat_template=False)


def test_the_output_ends_where_the_context_does(tiny_engine: Engine):
    request = GenerationRequest(
        tiny_engine.encode("a" * 505, chat_template=False),
        "model",
        4,
        max_new_tokens=100,
        sampling=SamplingParams(temperature=2, seed=1),
    )
    stats = stats_of(tiny_engine.generate(request))

    assert stats.num_output_tokens == 512 - 505
    assert stats.finish_reason == "length"


@pytest.mark.parametrize("token_id", [-1, NUM_TOKENS, 10**9])
def test_ids_that_no_model_knows_are_told(tiny_engine: Engine, token_id: int):
    with pytest.raises(ValueError, match=rf"the token id {token_id}, and the models know 0 to 257"):
        tiny_engine.generate(GenerationRequest((5, token_id)))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no users here') }}", "no users here"),
        ("{% for %}", "Expected an expression"),
    ],
)
def test_a_chat_template_that_fails_is_told(
    backend: TransformersBackend, copy: Path, template: str, reason: str
):
    (copy / "chat_template.jinja").write_text(template)

    with (
        backend.load(EngineConfig(target=str(copy))) as engine,
        pytest.raises(ValueError, match=rf"{reason}.*: switch 'chat template' off"),
    ):
        engine.encode(PROMPT, chat_template=True)


def test_a_missing_chat_template_is_told(backend: TransformersBackend, copy: Path):
    (copy / "chat_template.jinja").unlink()

    with (
        backend.load(EngineConfig(target=str(copy))) as engine,
        pytest.raises(ValueError, match="no chat template: switch 'chat template' off"),
    ):
        engine.encode(PROMPT, chat_template=True)


def test_a_busy_engine_says_so_and_goes_on(tiny_engine: Engine):
    request = GenerationRequest(tiny_engine.encode(PROMPT, chat_template=False), max_new_tokens=8)
    first = tiny_engine.generate(request)
    next(first)

    with pytest.raises(GenerationError, match="the engine is busy"):
        next(tiny_engine.generate(request))

    assert stats_of(first).num_output_tokens == 8
    assert generate(tiny_engine).num_output_tokens == 8


def test_a_closed_generation_leaves_the_engine_free(tiny_engine: Engine):
    request = GenerationRequest(tiny_engine.encode(PROMPT, chat_template=False), max_new_tokens=8)
    first = tiny_engine.generate(request)
    next(first)
    first.close()

    assert generate(tiny_engine).num_output_tokens == 8


def test_an_engine_is_usable_after_it_ran_out_of_memory(tiny_engine: Engine):
    expected = generate(tiny_engine).output_token_ids

    def run_out(module: torch.nn.Module, inputs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left\nand a long story")

    with (
        torch.nn.modules.module.register_module_forward_pre_hook(run_out),
        pytest.raises(GenerationError, match=r"^generating failed: no memory left$"),
    ):
        generate(tiny_engine)

    assert generate(tiny_engine).output_token_ids == expected


# -- warming up


def engine_of(engine: Engine) -> TransformersEngine:
    assert isinstance(engine, TransformersEngine)
    return engine


@contextmanager
def passes_of(model: torch.nn.Module) -> Iterator[list[int]]:
    """Collect how many tokens each pass of a model reads."""
    lengths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, inputs: lengths.append(inputs[0].shape[1])
    )
    try:
        yield lengths
    finally:
        hook.remove()


def request_of(engine: Engine, kind: DraftKind, num_draft_tokens: int) -> GenerationRequest:
    token_ids = engine.encode(PROMPT, chat_template=False)
    return GenerationRequest(token_ids, kind, num_draft_tokens)


@pytest.mark.parametrize("kind", ["model", "prompt_lookup"])
def test_between_two_signs_of_a_warm_up_lies_one_pass(tiny_engine: Engine, kind: DraftKind):
    items = run(tiny_engine, request_of(tiny_engine, kind, 4), baseline=True)

    with passes_of(engine_of(tiny_engine).target_model) as passes:
        for _ in takewhile(lambda item: isinstance(item, WarmUp), items):
            assert len(passes) <= 1
            passes.clear()
    items.close()


@pytest.mark.parametrize("num_items", range(1, 7))  # a prompt and two rounds, on both sides
def test_a_run_that_is_closed_while_it_warms_up_makes_no_further_pass(
    tiny_engine: Engine, num_items: int
):
    items = run(tiny_engine, request_of(tiny_engine, "model", 4), baseline=True)

    with passes_of(engine_of(tiny_engine).target_model) as passes:
        begun = list(islice(items, num_items))
        num_passes = len(passes)
        items.close()

    assert all(isinstance(item, WarmUp) for item in begun)
    assert len(passes) == num_passes <= num_items
    assert generate(tiny_engine).num_output_tokens == 8


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 32])
@pytest.mark.parametrize("kind", ["model", "prompt_lookup"])
@pytest.mark.parametrize("prompt", [PROMPT, "a"])
def test_a_warm_up_verifies_as_many_drafts_as_the_request(
    tiny_engine: Engine, prompt: str, kind: DraftKind, num_draft_tokens: int
):
    token_ids = tiny_engine.encode(prompt, chat_template=False)
    request = GenerationRequest(token_ids, kind, num_draft_tokens)
    with passes_of(engine_of(tiny_engine).target_model) as passes:
        list(tiny_engine.warm_up(request))

    rounds = passes[1:] if len(token_ids) > 1 else passes  # the first reads the prompt
    assert max(rounds) == num_draft_tokens + 1


@pytest.mark.parametrize(("kind", "is_run"), [("model", True), ("prompt_lookup", False)])
def test_a_warm_up_runs_the_draft_model_where_the_request_does(
    tiny_engine: Engine, kind: DraftKind, is_run: bool
):
    with passes_of(engine_of(tiny_engine).draft_model) as passes:
        list(tiny_engine.warm_up(request_of(tiny_engine, kind, 4)))

    prompt, *drafts = passes or [0]
    assert (prompt == len(PROMPT) - 1) == is_run
    assert (len(drafts) >= 4) == is_run
    assert set(drafts) <= {1, 2}  # behind a draft that was kept whole, two tokens are unread


def test_a_warm_up_of_plain_decoding_reads_token_by_token(tiny_engine: Engine):
    with passes_of(engine_of(tiny_engine).target_model) as passes:
        list(tiny_engine.warm_up(request_of(tiny_engine, "model", 4).plain()))

    assert passes == [len(PROMPT) - 1, 1, 1]


def test_a_warm_up_reads_no_more_than_a_chunk_of_a_long_prompt(tiny_engine: Engine):
    token_ids = tiny_engine.encode("a" * 500, chat_template=False)
    with passes_of(engine_of(tiny_engine).target_model) as passes:
        list(tiny_engine.warm_up(GenerationRequest(token_ids)))

    assert sum(passes) <= PREFILL_CHUNK_TOKENS + 1


@pytest.mark.parametrize("kind", ["prompt_lookup", "none"])
def test_a_warm_up_ends_where_the_context_does(
    backend: TransformersBackend, copy: Path, kind: DraftKind
):
    edit_config(max_position_embeddings=len(PROMPT) + 1)(copy)
    with backend.load(EngineConfig(target=str(copy))) as engine:
        request = request_of(engine, kind, 0 if kind == "none" else 4)
        with passes_of(engine_of(engine).target_model) as passes:
            list(engine.warm_up(request))

    assert passes == [len(PROMPT) - 1, 1]


def test_a_warm_up_that_runs_out_of_memory_is_told(tiny_engine: Engine):
    def run_out(module: torch.nn.Module, inputs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    with (
        torch.nn.modules.module.register_module_forward_pre_hook(run_out),
        pytest.raises(GenerationError, match=r"^warming up failed: no memory left$"),
    ):
        list(tiny_engine.warm_up(request_of(tiny_engine, "model", 4)))


def test_a_warm_up_refuses_what_generating_refuses(backend: TransformersBackend, tiny_target: Path):
    engine = backend.load(EngineConfig(target=str(tiny_target)))
    drafting, plain = request_of(engine, "model", 4), request_of(engine, "none", 0)
    with pytest.raises(ValueError, match="no draft model is loaded"):
        list(engine.warm_up(drafting))
    engine.close()

    with pytest.raises(GenerationError, match="the engine is closed; load it again"):
        list(engine.warm_up(plain))


# -- comparing two tokens


@pytest.mark.parametrize("text", ["a", PROMPT, "one two " * 60], ids=["token", "words", "chunks"])
def test_the_gap_between_two_tokens_is_that_of_the_targets_logits(tiny_engine: Engine, text: str):
    token_ids = tiny_engine.encode(text, chat_template=False)
    with torch.inference_mode():
        logits = engine_of(tiny_engine).target_model(torch.tensor([token_ids])).logits[0, -1]
    first, second = logits[:NUM_TOKENS].topk(2).indices.tolist()
    expected = float(logits[first] - logits[second])

    assert expected > 0
    assert tiny_engine.logit_gap(token_ids, first, second) == pytest.approx(expected, abs=1e-4)
    assert tiny_engine.logit_gap(token_ids, second, first) == pytest.approx(-expected, abs=1e-4)


# -- the end


def test_a_closed_engine_says_so(backend: TransformersBackend, tiny_target: Path):
    engine = backend.load(EngineConfig(target=str(tiny_target)))
    engine.close()
    engine.close()

    with pytest.raises(GenerationError, match="the engine is closed; load it again"):
        generate(engine)


@pytest.mark.bundled
@pytest.mark.timeout(60)
def test_a_prompt_of_100_kb_of_emoji_is_told_in_reasonable_time(bundled_engine: Engine):
    with pytest.raises(ValueError, match=r"the prompt has [\d,]+ tokens, and the context holds"):
        bundled_engine.encode("🙂" * 25_000, chat_template=True)
