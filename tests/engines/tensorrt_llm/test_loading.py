"""What is refused before anything is loaded: engines that do not fit, are damaged or too large."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from engines.config import EngineConfig, TensorRTOptions
from engines.errors import (
    EngineBuildError,
    EngineError,
    IncompatibleModelsError,
    ModelLoadError,
    ModelNotBuiltError,
)
from engines.slot import EngineSlot
from engines.store import EngineStore, StoreEntry
from engines.tensorrt_llm_backend.backend import TensorRTBackend
from engines.tensorrt_llm_backend.gpus import VISIBLE
from engines.tensorrt_llm_backend.installation import PYTHON_VARIABLE
from tests.conftest import write_tiny_model
from tests.engines.tensorrt_llm.conftest import MAX_SEQ_LEN, Install, MakeConfig
from tests.fake_tensorrt_llm.scenario import Gpu, Scenario
from tests.fake_tensorrt_llm.site import FakeInstall, write_site

REBUILD = "; press Build (or 'python -m engines build') to build the one that fits; the other stays"


@pytest.fixture(scope="module")
def built_store(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, tiny_draft: Path
) -> Path:
    """A store with both engines of the tiny pair."""
    root = tmp_path_factory.mktemp("built") / "store"
    with pytest.MonkeyPatch.context() as patch:
        fake = write_site(tmp_path_factory.mktemp("builder") / "install", Scenario())
        patch.setenv("PATH", f"{fake.bin}{os.pathsep}{os.environ['PATH']}")
        patch.setenv(PYTHON_VARIABLE, str(fake.python))
        patch.delenv(VISIBLE, raising=False)
        options = TensorRTOptions(max_seq_len=MAX_SEQ_LEN)
        config = EngineConfig(
            "tensorrt_llm", str(tiny_target), str(tiny_draft), tensorrt_llm=options
        )
        for _ in TensorRTBackend(EngineStore(root)).build(config):
            pass
    return root


@pytest.fixture
def store(built_store: Path, tmp_path: Path) -> EngineStore:
    """A copy of it, to do with as a test likes."""
    return EngineStore(Path(shutil.copytree(built_store, tmp_path / "store")))


def entry_of(store: EngineStore, role: str) -> StoreEntry:
    (entry,) = (entry for entry in store.entries() if entry.identity["role"] == role)
    return entry


def refusal(
    backend: TensorRTBackend, config: EngineConfig, kind: type[EngineError] = EngineBuildError
) -> str:
    with pytest.raises(EngineError) as caught:
        backend.load(config)
    assert type(caught.value) is kind
    return str(caught.value)


def assert_nothing_was_loaded(fake: FakeInstall) -> None:
    assert fake.read_calls("from_dir") == []


def test_engines_that_fit_are_loaded(
    install: Install, backend: TensorRTBackend, make_config: MakeConfig
):
    fake = install()

    with backend.load(make_config()) as engine:
        assert engine.info.target == "tiny-target"
        assert engine.info.dtype == "bfloat16"
    assert len(fake.read_calls("from_dir")) == 2


def test_what_is_not_built_is_told_and_the_slot_builds_it(
    install: Install,
    slot: EngineSlot,
    backend: TensorRTBackend,
    store: EngineStore,
    make_config: MakeConfig,
):
    fake = install()
    for entry in store.entries():
        store.remove(entry.key)

    assert refusal(backend, make_config(), ModelNotBuiltError) == (
        "the target engine of 'tiny-target' is not built yet; build it first (the Build button, or "
        "'python -m engines build --backend tensorrt_llm')"
    )
    assert_nothing_was_loaded(fake)
    assert slot.load(make_config()).is_open
    assert len(store.entries()) == 2


@pytest.mark.parametrize(
    ("scenario", "difference"),
    [
        (Scenario(version="1.1.0"), "built by TensorRT-LLM 1.2.1, and 1.1.0 is needed"),
        (
            Scenario(gpus=(Gpu("NVIDIA H100"),)),
            "built for the GPU NVIDIA H200, and NVIDIA H100 is needed",
        ),
    ],
    ids=["version", "gpu"],
)
def test_engines_of_another_version_or_gpu_are_refused_and_kept(
    scenario: Scenario,
    difference: str,
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    make_config: MakeConfig,
):
    fake = install(scenario)
    before = store.entries()

    assert refusal(backend, make_config()) == (
        f"the target engine of 'tiny-target' that is built does not fit: it is {difference}"
        f"{REBUILD}"
    )
    assert_nothing_was_loaded(fake)
    assert store.entries() == before


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"max_draft_len": 12}, "with max_draft_len 10, and 12 is needed"),
        ({"max_draft_len": 4}, "with max_draft_len 10, and 4 is needed"),
        ({"max_seq_len": 100}, "for a number of tokens of 211, and 111 is needed"),
        ({"quantization": "int8"}, "with quantization None, and W8A16 is needed"),
        ({"acceptance": "logits"}, "with gather_generation_logits False, and True is needed"),
        ({"tensor_parallel_size": 2}, "with tensor_parallel_size 1, and 2 is needed"),
    ],
    ids=str,
)
def test_engines_of_other_limits_are_refused(
    options: dict[str, Any],
    difference: str,
    install: Install,
    backend: TensorRTBackend,
    make_config: MakeConfig,
):
    fake = install(Scenario(gpus=(Gpu(), Gpu())))

    text = refusal(backend, make_config(**options))

    assert text.startswith("the target engine of 'tiny-target' that is built does not fit: it is ")
    assert f"built {difference}" in text
    assert text.endswith(REBUILD)
    assert_nothing_was_loaded(fake)


def test_of_an_engine_that_does_not_fit_the_one_that_does_is_built_beside(
    install: Install, backend: TensorRTBackend, store: EngineStore, make_config: MakeConfig
):
    install()
    config = make_config(max_draft_len=4)
    refusal(backend, config)

    for _ in backend.build(config):
        pass

    with backend.load(config) as engine:
        assert engine.is_open
    with backend.load(make_config()) as engine:
        assert engine.is_open
    assert len(store.entries()) == 3


def test_an_engine_of_another_commit_is_named_with_both(
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    make_config: MakeConfig,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    install()
    hub = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    model = hub / "models--org--tiny"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(tiny_target, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    config = make_config(target="org/tiny", draft=None)
    with pytest.raises(ModelNotBuiltError):
        backend.load(config)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers
    said = [step.message for step in backend.build(config) if step.message is not None]
    assert any(f"going on with the copy in {model}/snapshots/{'a' * 40}" in line for line in said)
    with backend.load(config) as engine:
        assert engine.info.target == "org/tiny"

    (model / "refs" / "main").write_text("b" * 40)

    assert refusal(backend, config) == (
        "the target engine of 'org/tiny' that is built does not fit: it is built from "
        f"org/tiny@{'a' * 40}, and org/tiny@{'b' * 40} is needed{REBUILD}"
    )


def test_a_model_whose_folder_is_renamed_keeps_its_engine(
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    make_config: MakeConfig,
    tiny_target: Path,
    tmp_path: Path,
):
    install()
    renamed = shutil.copytree(tiny_target, tmp_path / "renamed")

    with backend.load(make_config(target=renamed)) as engine:
        assert engine.info.target == "renamed"
    assert len(store.entries()) == 2


# Damage


def test_an_engine_that_is_cut_short_is_told(
    install: Install, backend: TensorRTBackend, store: EngineStore, make_config: MakeConfig
):
    fake = install()
    entry = entry_of(store, "draft")
    file = entry.path / "rank0.engine"
    size = file.stat().st_size
    file.write_bytes(b"123")

    assert refusal(backend, make_config()) == (
        f"the built engine '{entry.key}' is damaged: rank0.engine has 3 bytes, not {size}; remove "
        f"it with 'python -m engines engines remove {entry.key}' and build it again"
    )
    assert_nothing_was_loaded(fake)


def test_an_engine_without_its_file_is_told_and_the_other_one_still_loads(
    install: Install, backend: TensorRTBackend, store: EngineStore, make_config: MakeConfig
):
    install()
    (entry_of(store, "draft").path / "rank0.engine").unlink()

    assert "is damaged: rank0.engine is missing; remove it with" in refusal(backend, make_config())
    with backend.load(make_config(draft=None)) as engine:
        assert engine.draft_kinds == ("prompt_lookup", "none")


def test_a_config_of_the_right_size_that_means_nothing_is_told_and_can_be_mended(
    install: Install, backend: TensorRTBackend, store: EngineStore, make_config: MakeConfig
):
    fake = install()
    entry = entry_of(store, "target")
    file = entry.path / "config.json"
    file.write_bytes(b"x" * file.stat().st_size)

    assert refusal(backend, make_config()).startswith(
        f"the built engine '{entry.key}' is damaged (remove it with 'python -m engines engines "
        f"remove {entry.key}' and build it again): "
    )
    assert_nothing_was_loaded(fake)
    store.remove(entry.key)
    for _ in backend.build(make_config()):
        pass
    with backend.load(make_config()) as engine:
        assert engine.is_open


@pytest.mark.parametrize(
    ("written", "instead", "complaint"),
    [
        ('"max_draft_len": 10', '"max_draft_len": 9 ', "takes 9 drafts in a step, not 10: remove"),
        (
            '"max_num_tokens": 211',
            '"max_num_tokens": 100',
            "holds 100 tokens, and 211 are needed: remove",
        ),
        (
            '"use_paged_context_fmha": true',
            '"use_paged_context_fmha":false',
            "is built without paged context FMHA, without which drafts cannot be verified: remove",
        ),
    ],
    ids=["drafts", "tokens", "fmha"],
)
def test_limits_are_read_in_the_engine_itself(
    written: str,
    instead: str,
    complaint: str,
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    make_config: MakeConfig,
):
    fake = install()
    entry = entry_of(store, "target")
    file = entry.path / "config.json"
    text = file.read_text()
    assert written in text
    file.write_text(text.replace(written, instead))

    assert f"engine '{entry.key}' {complaint}" in refusal(backend, make_config())
    assert_nothing_was_loaded(fake)


# The pair, and its memory


def test_a_pair_that_shares_no_vocabulary_is_refused(
    install: Install,
    backend: TensorRTBackend,
    make_config: MakeConfig,
    tiny_draft: Path,
    tmp_path: Path,
):
    fake = install()
    draft = Path(shutil.copytree(tiny_draft, tmp_path / "draft"))
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))

    for flow in ("engine", "pytorch"):
        text = refusal(backend, make_config(draft=draft, flow=flow), IncompatibleModelsError)
        assert (
            "'draft' cannot draft for 'tiny-target': their tokenizers differ at 2 of 258 ids"
            in text
        )
    assert_nothing_was_loaded(fake)


def test_a_draft_wider_than_its_target_is_refused(
    install: Install,
    backend: TensorRTBackend,
    make_config: MakeConfig,
    tiny_draft: Path,
    tmp_path: Path,
):
    install()
    draft = Path(shutil.copytree(tiny_draft, tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "vocab_size": 384}))

    assert "'draft' has 384 rows of vocabulary and 'tiny-target' 320" in refusal(
        backend, make_config(draft=draft), IncompatibleModelsError
    )


def test_engines_that_do_not_fit_into_what_is_free_are_refused_with_both_numbers(
    install: Install, backend: TensorRTBackend, make_config: MakeConfig
):
    fake = install(Scenario(gpus=(Gpu(memory_free=0),)))

    assert refusal(backend, make_config(), ModelLoadError) == (
        "the engines and their KV caches take 0.0 GB of GPU 0 (NVIDIA H200), where 0.0 GB are "
        "free: end what else runs there, lower max_seq_len, use FP8, or more GPUs"
    )
    assert_nothing_was_loaded(fake)


def test_only_the_memory_of_the_gpus_in_use_counts(
    install: Install, backend: TensorRTBackend, make_config: MakeConfig
):
    install(Scenario(gpus=(Gpu(memory_free=0), Gpu())))

    with backend.load(make_config(devices=(1,), draft_devices=(1,))) as engine:
        assert engine.is_open


def test_memory_that_is_not_known_is_no_obstacle(
    install: Install, backend: TensorRTBackend, make_config: MakeConfig
):
    install(Scenario(gpus=(Gpu(memory_total=None, memory_free=None),)))

    with backend.load(make_config()) as engine:
        assert engine.is_open


@pytest.mark.parametrize("flow", ["engine", "pytorch"])
def test_the_record_names_the_weights_of_each_model(
    install: Install, slot: EngineSlot, make_config: MakeConfig, tmp_path: Path, flow: str
):
    install()
    target = write_tiny_model(tmp_path / "fp8-target", seed=1)
    quantization = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (target / "hf_quant_config.json").write_text(json.dumps(quantization), encoding="utf-8")

    info = slot.load(make_config(target=target, flow=flow)).info

    assert (info.dtype, info.draft_dtype) == ("FP8 (bfloat16)", "bfloat16")


def test_logits_of_different_widths_are_refused_before_anything_is_built(
    install: Install, backend: TensorRTBackend, make_config: MakeConfig, tmp_path: Path
):
    fake = install()
    target = write_tiny_model(tmp_path / "wide-target", seed=1, vocab_size=352)

    with pytest.raises(IncompatibleModelsError, match="352 wide and the draft's 320"):
        list(backend.build(make_config(target=target, acceptance="logits")))

    assert fake.read_calls("builder.build") == []
