"""Built engines as their config.json tells of them: sizes, limits, damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.errors import EngineBuildError
from engines.tensorrt_llm_backend.engine_folder import (
    EngineFolder,
    check_limits,
    check_logits,
    check_target,
    read_engine_folder,
)

NAME = "tiny-target-0123456789ab"
REMEDY = f"remove it with 'python -m engines engines remove {NAME}' and build it again"
MODEL: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "vocab_size": 321,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mapping": {"world_size": 1, "tp_size": 1},
    "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
}
BUILD: dict[str, Any] = {
    "max_seq_len": 210,
    "max_num_tokens": 205,
    "max_draft_len": 5,
    "speculative_decoding_mode": 2,
    "gather_generation_logits": False,
    "plugin_config": {"use_paged_context_fmha": True},
}


def write_engine(parent: Path, *, num_ranks: int = 1, model: Any = None, build: Any = None) -> Path:
    folder = parent / NAME
    folder.mkdir()
    config = {
        "version": "1.2.1",
        "pretrained_config": {**MODEL, **(model or {})},
        "build_config": {**BUILD, **(build or {})},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(num_ranks):
        (folder / f"rank{rank}.engine").write_bytes(bytes(1000))
    return folder


def read(parent: Path, **changes: Any) -> EngineFolder:
    return read_engine_folder(write_engine(parent, **changes))


def complaint(check: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(EngineBuildError) as caught:
        check(*args, **kwargs)
    return str(caught.value)


def test_an_engine_is_read_without_the_library(tmp_path: Path):
    folder = read(tmp_path)

    assert folder == EngineFolder(
        path=tmp_path / NAME,
        dtype="bfloat16",
        quant_algo=None,
        vocab_size=321,
        kv_bytes_per_token=2 * 3 * 2 * 8 * 2,  # keys and values, layers, heads, size, bytes
        num_bytes=1000,
        tensor_parallel_size=1,
        max_seq_len=210,
        max_num_tokens=205,
        max_draft_len=5,
        gathers_logits=False,
        has_paged_context_fmha=True,
    )
    assert folder.dtype_name == "bfloat16"


def test_a_quantised_engine_says_so_and_caches_in_a_byte(tmp_path: Path):
    folder = read(
        tmp_path, model={"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    )

    assert folder.dtype_name == "FP8 (bfloat16)"
    assert folder.kv_bytes_per_token == 2 * 3 * 2 * 8


def test_a_head_size_of_its_own_counts(tmp_path: Path):
    assert read(tmp_path, model={"head_size": 16}).kv_bytes_per_token == 2 * 3 * 2 * 16 * 2


def test_a_model_without_shared_heads_caches_all(tmp_path: Path):
    assert read(tmp_path, model={"num_key_value_heads": None}).kv_bytes_per_token == 2 * 3 * 32 * 2


def test_a_text_takes_memory_beside_the_weights(tmp_path: Path):
    assert read(tmp_path).device_bytes(10) == 1000 + 10 * 192


def test_gpus_share_the_weights_and_the_cache(tmp_path: Path):
    folder = read(tmp_path, num_ranks=2, model={"mapping": {"tp_size": 2}})

    assert folder.num_bytes == 2000
    assert folder.device_bytes(10) == 1000 + 10 * 96
    assert folder.padded_vocab_size == 322


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pretrained_config": {}}', "\0"])
def test_a_config_that_cannot_be_read_is_told_with_the_remedy(text: str, tmp_path: Path):
    folder = write_engine(tmp_path)
    (folder / "config.json").write_text(text)

    assert complaint(read_engine_folder, folder).startswith(
        f"the built engine '{NAME}' is damaged ({REMEDY}): "
    )


@pytest.mark.parametrize(
    "model",
    [{"mapping": None}, {"vocab_size": "wide"}, {"num_attention_heads": 0}, {"mapping": {}}],
    ids=str,
)
def test_a_config_with_a_part_that_means_nothing_is_damaged(model: dict[str, Any], tmp_path: Path):
    assert complaint(read, tmp_path, model=model).startswith(
        f"the built engine '{NAME}' is damaged ({REMEDY}): "
    )


def test_a_rank_that_is_missing_is_told(tmp_path: Path):
    assert complaint(read, tmp_path, model={"mapping": {"tp_size": 2}}) == (
        f"the built engine '{NAME}' is damaged: rank1.engine is missing; {REMEDY}"
    )


def test_an_engine_for_its_drafts_will_do(tmp_path: Path):
    check_target(read(tmp_path), max_draft_len=5)


@pytest.mark.parametrize(
    ("build", "most"),
    [({}, 5), ({"speculative_decoding_mode": 1}, 0), ({"max_draft_len": 0}, 0)],
)
def test_an_engine_for_fewer_drafts_is_refused(build: dict[str, int], most: int, tmp_path: Path):
    assert complaint(check_target, read(tmp_path, build=build), max_draft_len=6) == (
        f"the target engine '{NAME}' takes {most} drafts in a step, not 6: {REMEDY}"
    )


def test_an_engine_that_holds_the_text_will_do(tmp_path: Path):
    check_limits(read(tmp_path), max_seq_len=205)


@pytest.mark.parametrize("build", [{}, {"max_seq_len": 205, "max_num_tokens": 8192}])
def test_the_smaller_of_two_limits_counts(build: dict[str, int], tmp_path: Path):
    assert complaint(check_limits, read(tmp_path, build=build), max_seq_len=1206) == (
        f"the engine '{NAME}' holds 205 tokens, and 1,206 are needed: {REMEDY}"
    )


def test_an_engine_that_cannot_verify_is_refused(tmp_path: Path):
    folder = read(tmp_path, build={"plugin_config": {"use_paged_context_fmha": False}})

    assert complaint(check_limits, folder, max_seq_len=1) == (
        f"the engine '{NAME}' is built without paged context FMHA, without which drafts cannot be "
        f"verified: {REMEDY}"
    )


def gathering_pair(parent: Path, *, draft_vocab_size: int) -> tuple[EngineFolder, EngineFolder]:
    gathers = {"gather_generation_logits": True}
    (parent / "draft").mkdir()
    return read(parent, build=gathers), read(
        parent / "draft", build=gathers, model={"vocab_size": draft_vocab_size}
    )


def test_a_pair_of_one_width_that_gathers_can_accept_by_logits(tmp_path: Path):
    check_logits(*gathering_pair(tmp_path, draft_vocab_size=321))


def test_logits_of_two_widths_are_refused(tmp_path: Path):
    assert complaint(check_logits, *gathering_pair(tmp_path, draft_vocab_size=320)) == (
        "the target's logits are 321 wide and the draft's 320: set acceptance to 'tokens' (greedy "
        "decoding only)"
    )


def test_an_engine_that_does_not_gather_is_refused(tmp_path: Path):
    target, _ = gathering_pair(tmp_path, draft_vocab_size=321)
    (tmp_path / "plain").mkdir()

    assert complaint(check_logits, target, read(tmp_path / "plain")) == (
        f"the draft engine '{NAME}' does not gather its logits: {REMEDY}, with acceptance 'logits'"
    )
