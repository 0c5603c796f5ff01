"""Short ways to call the library of a scenario inside the test's own process."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.fake_tensorrt_llm.scenario import Scenario
from tests.fake_tensorrt_llm.site import FakeInstall

S, K = 96, 4  # longest text of the engines, and longest draft
PROMPT = [5, 6, 7]
GREEDY = {
    "end_id": -1,
    "pad_id": 0,
    "top_k": 1,
    "return_dict": True,
    "output_sequence_lengths": True,
}

Install = Callable[[Scenario], FakeInstall]


def lib(name: str) -> Any:
    return importlib.import_module(name)


def load_model(folder: Path, **kwargs: Any) -> Any:
    auto = lib("tensorrt_llm.models.automodel").AutoModelForCausalLM
    return auto.from_hugging_face(str(folder), dtype="bfloat16", **kwargs)


def build_config(mode: str, **changes: Any) -> Any:
    modes = lib("tensorrt_llm.models").SpeculativeDecodingMode
    settings = {
        "max_batch_size": 1,
        "max_beam_width": 1,
        "max_input_len": S,
        "max_seq_len": S,
        "max_num_tokens": S,
        "max_draft_len": K if mode == "DRAFT_TOKENS_EXTERNAL" else 0,
        "speculative_decoding_mode": modes[mode],
        "plugin_config": lib("tensorrt_llm.plugin").PluginConfig(gemm_plugin="auto"),
        "output_timing_cache": "timing.cache",
    }
    return lib("tensorrt_llm.builder").BuildConfig(**(settings | changes))


def save_engine(model: Path, folder: Path, mode: str, **changes: Any) -> Path:
    engine = lib("tensorrt_llm.builder").build(load_model(model), build_config(mode, **changes))
    engine.save(str(folder))
    return folder


def open_runner(folder: Path, **changes: Any) -> Any:
    settings = {
        "rank": 0,
        "max_input_len": S - K - 1,
        "max_output_len": K + 1,
        "kv_cache_enable_block_reuse": True,
        "kv_cache_free_gpu_memory_fraction": 0.3,
    }
    runner = lib("tensorrt_llm.runtime").ModelRunnerCpp
    return runner.from_dir(str(folder), **(settings | changes))


def ids_tensor(token_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.int32)


def generate(runner: Any, token_ids: Sequence[int], num_new_tokens: int, **changes: Any) -> Any:
    return runner.generate(
        [ids_tensor(token_ids)], max_new_tokens=num_new_tokens, **(GREEDY | changes)
    )


def new_ids(result: Any, num_prompt_tokens: int) -> list[int]:
    length = int(result["sequence_lengths"][0, 0])
    ids: list[int] = result["output_ids"][0, 0, num_prompt_tokens:length].tolist()
    return ids


def copy_checkpoint(source: Path, folder: Path, **changes: Any) -> Path:
    """Write a checkpoint's config, changed, and its tokenizer into a folder."""
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    tokenizer = (source / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    return folder
