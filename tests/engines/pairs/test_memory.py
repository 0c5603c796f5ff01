"""Memory: what a pair takes by its configurations, told and refused, and what it really took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.backends import create_backend
from engines.child import PROJECT_ROOT
from engines.config import BUNDLED, BUNDLED_DRAFT, EngineConfig
from engines.errors import ModelLoadError
from engines.pairs.memory import (
    CACHES,
    MemoryNeed,
    MemoryPart,
    kv_bytes,
    need_of,
    size_text,
    weight_bytes,
)
from tests.conftest import write_tiny_model
from tests.engines.pairs.tokenizers_of_kinds import bpe, write_model

QWEN3 = {  # Qwen3 0.6B
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
NEED = MemoryNeed((MemoryPart("target", 9 * 10**9), MemoryPart(CACHES, 10**9)), 10**9, "the GPU")


def test_weights_and_caches_are_reckoned_from_the_configuration():
    assert weight_bytes(QWEN3, "bfloat16") == 2 * 596049920
    assert kv_bytes([(QWEN3, "bfloat16"), (QWEN3, "float32")]) == (2 + 4) * 57344 * 2048


@pytest.mark.parametrize(
    "config",
    [{"model_type": "brand_new"}, {"model_type": "llama"}, {**QWEN3, "quantization_config": {}}],
)
def test_what_is_not_known_is_not_guessed(config: dict[str, Any]):
    assert weight_bytes(config, "float32") is None
    assert need_of({"target": None, "draft": 5}, free_bytes=9, device="x") is None


def test_fr67_a_pair_that_does_not_fit_is_refused_with_both_numbers_and_what_would():
    with pytest.raises(ModelLoadError) as raised:
        NEED.require()
    text = str(raised.value)
    assert "the pair takes about 10.0 GB of the GPU" in text
    assert "; 1.0 GB are free: 9.0 GB are missing" in text
    assert "choose a smaller target or draft, or the draft kind 'prompt_lookup'" in text


def test_what_the_loaded_pair_gives_back_counts():
    NEED.require(freed_bytes=9 * 10**9)
    with pytest.raises(ModelLoadError, match=r"8\.0 GB more without the loaded pair: 1\.0"):
        NEED.require(freed_bytes=8 * 10**9)


@pytest.mark.parametrize(
    ("size", "text"), [(1, "0 MB"), (999 * 10**6, "999 MB"), (10**9, "1.0 GB")]
)
def test_sizes_are_told_in_what_suits_them(size: int, text: str):
    assert size_text(size) == text


@pytest.mark.parametrize("backend", ["auto", "onnxruntime", "transformers"])
def test_nothing_but_the_configuration_is_read(backend: str, tmp_path: Path):
    target = write_model(tmp_path / "target", bpe())
    draft = write_model(tmp_path / "draft", bpe(), num_hidden_layers=1)
    need = create_backend(backend).memory_need(EngineConfig(backend, str(target), str(draft)))
    assert need is not None
    assert [part.name for part in need.parts] == ["target", "draft", CACHES]
    assert need.device == "memory"


def test_a_model_that_onnxruntime_cannot_run_is_reckoned_as_the_one_that_can(tmp_path: Path):
    folder = write_model(tmp_path / "target", bpe())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    config_ = EngineConfig(target=str(folder))
    assert create_backend("onnxruntime").memory_need(config_) is None
    need = create_backend("auto").memory_need(config_)
    assert need == create_backend("transformers").memory_need(config_)


def test_a_model_that_is_not_built_is_not_reckoned():
    assert create_backend("auto").memory_need(EngineConfig(target="org/far")) is None


def test_a_pair_beyond_all_memory_is_refused_unread(tmp_path: Path):
    from engines.slot import EngineSlot

    small = write_tiny_model(tmp_path / "small", seed=1, head_dim=16)
    large = write_model(tmp_path / "large", bpe(), num_hidden_layers=10**9)
    slot = EngineSlot()
    engine = slot.load(EngineConfig(target=str(small)))
    with pytest.raises(ModelLoadError, match="are missing; choose a smaller target"):
        slot.load(EngineConfig(target=str(large)))
    assert engine.is_open
    assert slot.load(EngineConfig(target=str(small))) is engine
    slot.close()


MEASURING = """
import gc, json, re, sys
from engines.backends import create_backend
from engines.checkpoints import built_path, parse_reference
from engines.config import EngineConfig, GenerationRequest
from engines.store import EngineStore
from engines.tokenizer import load_tokenizer

def resident():
    gc.collect()
    told = open("/proc/self/smaps_rollup").read()
    return int(re.search(r"^Rss:\\s+(\\d+)", told, re.M)[1]) * 1024

name, target, draft = sys.argv[1:]
config = EngineConfig(name, target, draft)
backend = create_backend(name)
need = backend.memory_need(config)
import onnxruntime, torch
import engines.onnxruntime_backend.engine, engines.transformers_backend.engine
load_tokenizer(built_path(parse_reference(target), EngineStore()), name="x")
torch.ones(9) @ torch.ones(9)
before = resident()
engine = backend.load(config)
list(engine.generate(GenerationRequest(tuple(range(20, 30)), "model", 4, 8)))
took = resident() - before
print(json.dumps({"took": took, "parts": need.to_dict()["parts"]}))
"""


@pytest.mark.bundled
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the system tells it in its own way"
)
@pytest.mark.parametrize("backend", ["onnxruntime", "transformers"])
def test_the_bundled_pair_took_what_was_reckoned(backend: str):
    result = subprocess.run(
        [sys.executable, "-c", MEASURING, backend, BUNDLED, BUNDLED_DRAFT],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    measured = json.loads(result.stdout.splitlines()[-1])
    reckoned = measured["parts"]["target"] + measured["parts"]["draft"]  # few tokens are cached yet
    assert measured["took"] == pytest.approx(reckoned, rel=0.1)
