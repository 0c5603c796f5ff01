"""A runner opens an engine folder, or says what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fake_tensorrt_llm.calls import (
    PROMPT,
    Install,
    K,
    build_config,
    generate,
    lib,
    load_model,
    new_ids,
    open_runner,
    save_engine,
)
from tests.fake_tensorrt_llm.scenario import Gpu, Scenario


@pytest.mark.parametrize(
    ("mode", "build", "opening", "error", "message"),
    [
        ("DRAFT_TOKENS_EXTERNAL", {}, {"rank": 1}, AssertionError, "rank"),
        ("DRAFT_TOKENS_EXTERNAL", {}, {"max_output_len": 99}, AssertionError, "tokens"),
        ("DRAFT_TOKENS_EXTERNAL", {}, {"max_batch_size": 2}, AssertionError, "max_batch_size"),
        (
            "DRAFT_TOKENS_EXTERNAL",
            {},
            {"kv_cache_enable_block_reuse": False},
            RuntimeError,
            "KV cache block reuse must be enabled for speculative decoding target model",
        ),
        (
            "DRAFT_TOKENS_EXTERNAL",
            {"max_draft_len": 0},
            {},
            RuntimeError,
            "max_draft_len has to be larger than 0",
        ),
        (
            "DRAFT_TOKENS_EXTERNAL",
            {"max_beam_width": 2},
            {},
            RuntimeError,
            "only works for beam width == 1",
        ),
        ("NONE", {}, {"device_ids": [0, 1], "is_orchestrator_mode": True}, RuntimeError, "world"),
    ],
)
def test_a_runner_is_refused(
    mode: str,
    build: dict[str, Any],
    opening: dict[str, Any],
    error: type[Exception],
    message: str,
    install: Install,
    tiny_target: Path,
):
    install(Scenario())
    folder = save_engine(tiny_target, Path("engine"), mode, **build)

    with pytest.raises(error, match=message):
        open_runner(folder, **opening)


def test_an_engine_of_another_version_or_gpu_is_refused(install: Install, tiny_target: Path):
    install(Scenario())
    folder = save_engine(tiny_target, Path("engine"), "NONE").resolve()

    for scenario in (Scenario(version="1.1.0"), Scenario(gpus=(Gpu(compute_cap="8.9"),))):
        install(scenario)
        with pytest.raises(RuntimeError, match="is not compatible with this"):
            open_runner(folder)


def test_a_first_runner_without_a_memory_limit_leaves_nothing(install: Install, tiny_target: Path):
    install(Scenario())
    folder = save_engine(tiny_target, Path("engine"), "NONE")
    first = open_runner(folder, kv_cache_free_gpu_memory_fraction=None)

    with pytest.raises(RuntimeError, match="out of memory"):
        open_runner(folder)
    first.session.shutdown()
    open_runner(folder)
    with pytest.raises(RuntimeError, match="shut down"):
        generate(first, PROMPT, 1)


def test_two_ranks_need_an_orchestrator(install: Install, tiny_target: Path):
    fake = install(Scenario(gpus=(Gpu(), Gpu())))
    builder, mapping = lib("tensorrt_llm.builder"), lib("tensorrt_llm.mapping").Mapping
    with pytest.raises(ValueError, match="world_size must equal"):
        mapping(world_size=2, rank=0, tp_size=1)
    for rank in range(2):
        model = load_model(tiny_target, mapping=mapping(world_size=2, rank=rank, tp_size=2))
        builder.build(model, build_config("DRAFT_TOKENS_EXTERNAL")).save("engine")
    assert sorted(file.name for file in Path("engine").iterdir()) == [
        "config.json",
        "rank0.engine",
        "rank1.engine",
    ]

    with pytest.raises(RuntimeError, match="world size"):
        open_runner(Path("engine"))
    runner = open_runner(Path("engine"), is_orchestrator_mode=True, device_ids=[0, 1])

    assert len(new_ids(generate(runner, PROMPT, K), len(PROMPT))) == K
    assert fake.read_calls("from_dir")[-1]["args"]["device_ids"] == [0, 1]


@pytest.mark.parametrize(("fault", "message"), [("oom", "out of memory"), ("version", "rebuild")])
def test_a_load_may_fail(fault: Any, message: str, install: Install, tiny_target: Path):
    install(Scenario(load=fault))

    with pytest.raises(RuntimeError, match=message):
        open_runner(save_engine(tiny_target, Path("engine"), "NONE"))
