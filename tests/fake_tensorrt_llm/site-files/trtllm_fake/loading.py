"""Opens an engine folder for a runner: what the executor refuses before it runs anything."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_fake.api import Given
from trtllm_fake.state import hang, require_gpus, say, scenario, suffer
from trtllm_fake.table import TableModel

NONE, DRAFT_TOKENS_EXTERNAL = 1, 2  # SpeculativeDecodingMode, as config.json writes it
MOST_OF_THE_MEMORY = 0.7  # with more than this for one runner, a second finds too little


@dataclass(frozen=True)
class LoadedEngine:
    """An engine folder that passed every check."""

    config: dict[str, Any]
    model: TableModel

    @property
    def limits(self) -> dict[str, Any]:
        limits: dict[str, Any] = self.config["build_config"]
        return limits

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = self.config["pretrained_config"]
        return facts

    @property
    def verifies_drafts(self) -> bool:
        return bool(self.limits["speculative_decoding_mode"] == DRAFT_TOKENS_EXTERNAL)

    @property
    def max_prompt_len(self) -> int:
        """Longest prompt that the executor takes, whatever max_input_len says."""
        return int(min(self.limits["max_seq_len"] - 1, self.limits["max_num_tokens"]))


def load(given: Given) -> LoadedEngine:
    """Return the engine of ModelRunnerCpp.from_dir, or raise as the library does."""
    folder = Path(given.engine_dir)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    limits, facts = config["build_config"], config["pretrained_config"]
    world_size = facts["mapping"]["world_size"]
    assert given.rank == 0, "rank must be the MPI rank"
    _check_size(given, limits)
    _check_ranks(given, world_size)
    _play_fault()
    if config["version"] != scenario()["version"]:
        _refuse_version(config["version"])
    engines = [json.loads((folder / f"rank{r}.engine").read_bytes()) for r in range(world_size)]
    gpus = require_gpus(world_size)
    if engines[0]["compute_cap"] != float(gpus[0]["compute_cap"]):
        raise RuntimeError("The engine plan file is not compatible with this GPU, please rebuild.")
    say(f"[INFO] Engine version {config['version']} found in the config file")
    _check_drafting(given, limits)
    padded = -(-facts["vocab_size"] // facts["mapping"]["tp_size"]) * facts["mapping"]["tp_size"]
    is_draft = limits["speculative_decoding_mode"] == NONE
    return LoadedEngine(config, TableModel(engines[0]["num_token_ids"], padded, is_draft))


def _check_size(given: Given, limits: dict[str, Any]) -> None:
    for name in ("max_batch_size", "max_beam_width"):
        asked = getattr(given, name)
        assert asked is None or asked <= limits[name], f"{name} {asked} > {limits[name]}"
    if given.max_output_len is not None:
        input_len = given.max_input_len or limits["max_input_len"]
        asked = input_len + given.max_output_len
        assert asked <= limits["max_seq_len"], f"{asked} tokens > {limits['max_seq_len']}"


def _check_ranks(given: Given, world_size: int) -> None:
    if given.is_orchestrator_mode:
        devices = given.device_ids if given.device_ids is not None else list(range(world_size))
        if len(devices) != world_size:
            raise RuntimeError(f"device ids {devices} do not match world size {world_size}")
        require_gpus(max(devices) + 1)
    elif world_size != 1:
        raise RuntimeError(
            f"MPI world size 1 must be equal to the engine's world size {world_size}"
        )


def _play_fault() -> None:
    fault = scenario()["load"]
    if fault == "version":
        _refuse_version("another version")
    if fault == "hang":
        hang()
    suffer(fault)


def _refuse_version(version: str) -> None:
    raise RuntimeError(
        "The engine plan file is not compatible with this version of TensorRT: "
        f"it was built by TensorRT-LLM {version}, please rebuild."
    )


def _check_drafting(given: Given, limits: dict[str, Any]) -> None:
    is_target = limits["speculative_decoding_mode"] == DRAFT_TOKENS_EXTERNAL
    if is_target and limits["max_draft_len"] < 1:
        raise RuntimeError(
            "max_draft_len has to be larger than 0 for decoding with external draft tokens"
        )
    if is_target and not given.kv_cache_enable_block_reuse:
        raise RuntimeError(
            "KV cache block reuse must be enabled for speculative decoding target model"
        )
    if given.kv_cache_enable_block_reuse and not limits["plugin_config"]["use_paged_context_fmha"]:
        raise RuntimeError("model has to be built with paged context FMHA support")
    if is_target and (given.max_beam_width or limits["max_beam_width"]) > 1:
        raise RuntimeError("Speculative decoding only works for beam width == 1")
