"""Building of the engine flow: settings, build(), and the folder that Engine.save writes."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

from trtllm_fake import records
from trtllm_fake.api import Given, find, implements, implements_function
from trtllm_fake.models import PretrainedModel
from trtllm_fake.state import hang, print_line, require_gpus, scenario, suffer

FP8_WEIGHTS = ("FP8", "W4A8_AWQ", "NVFP4")
INTEGER_WEIGHTS = ("W8A16", "W4A16")


class BuildConfigFields(records.Record):
    """Limits and features of one engine."""

    def model_dump(self, given: Given) -> dict[str, Any]:
        return self.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json holds: the mode is an integer there."""
        fields = dict(vars(self))
        fields["speculative_decoding_mode"] = int(fields["speculative_decoding_mode"])
        fields["plugin_config"] = fields["plugin_config"].to_dict()
        fields["lora_config"] = {}
        return fields


@implements("tensorrt_llm.builder.EngineConfig")
class EngineConfig:
    """What config.json says."""

    pretrained_config: Any
    build_config: Any
    version: str

    def __init__(self, given: Given) -> None:
        vars(self).update(vars(given))

    def to_dict(self, given: Given | None = None) -> dict[str, Any]:
        return {
            "version": self.version,
            "pretrained_config": self.pretrained_config.to_dict(),
            "build_config": self.build_config.to_dict(),
        }


@implements("tensorrt_llm.builder.Engine")
class Engine:
    """An engine in memory."""

    config: EngineConfig
    engine: bytes | None

    def __init__(self, given: Given) -> None:
        vars(self).update(vars(given))

    def save(self, given: Given) -> None:
        folder = Path(given.engine_dir)
        folder.mkdir(parents=True, exist_ok=True)
        rank = self.config.pretrained_config.mapping.rank
        if rank == 0:
            text = json.dumps(self.config.to_dict(), indent=4, default=str)
            (folder / "config.json").write_text(text, encoding="utf-8")
        if self.engine is None:  # after a dry run
            return
        fault = scenario()["build"]
        whole = len(self.engine)
        (folder / f"rank{rank}.engine").write_bytes(
            self.engine[: whole // 2 if fault == "disk" else whole]
        )
        suffer(fault if fault == "disk" else "")


@implements_function("tensorrt_llm.builder.build")
def build(given: Given) -> Any:
    """Return the engine of a model, whose settings are copied and whose weights are used up."""
    model: PretrainedModel = given.model
    if model.is_built:
        raise RuntimeError("this model was built before and may have been changed: load it afresh")
    model.is_built = True
    config = copy.deepcopy(given.build_config)
    compute_cap = float(require_gpus()[0]["compute_cap"])
    _check_weights(model.config.quantization, compute_cap)
    _play_fault()
    log("Total time of constructing network from module object 0.42 seconds")
    _settle(config, model, compute_cap)
    if config.output_timing_cache:
        Path(config.output_timing_cache).write_bytes(b"timings")
    log("Build phase peak memory: 1234.5 MB")
    engine = {
        "num_token_ids": model.num_token_ids,
        "compute_cap": compute_cap,
        "rank": model.config.mapping.rank,
    }
    return find("Engine")(
        find("EngineConfig")(model.config, config, scenario()["version"]),
        None if config.dry_run else json.dumps(engine).encode(),
    )


def _check_weights(quantization: Any, compute_cap: float) -> None:
    has_integers = (
        quantization.quant_algo in INTEGER_WEIGHTS or quantization.kv_cache_quant_algo == "INT8"
    )
    if has_integers and 10.0 <= compute_cap < 12.0:
        raise RuntimeError("INT8/INT4 quantization is not supported on SM>=100")


def _play_fault() -> None:
    fault = scenario()["build"]
    if fault == "hang":
        log("Build engine ...")
        hang()
    if fault == "fail":
        raise RuntimeError("Engine building failed, please check error log.")
    if fault == "slow":
        for number in range(scenario()["slow_lines"]):
            print_line(f"[TRT-LLM] [I] tactic {number}")
            time.sleep(0.2)
    suffer(fault if fault in ("die", "oom") else "")


def _settle(config: Any, model: PretrainedModel, compute_cap: float) -> None:
    """Change the copied settings as the library does before it writes them down."""
    if config.max_seq_len is None:
        config.max_seq_len = model.config.to_dict()["max_position_embeddings"]
    if config.speculative_decoding_mode != find("SpeculativeDecodingMode").NONE:
        config.max_seq_len += config.max_draft_len
    config.max_input_len = min(config.max_input_len, config.max_seq_len)
    config.max_num_tokens = max(
        config.max_num_tokens, config.max_batch_size * (config.max_draft_len + 1)
    )
    config.kv_cache_type = "PAGED"
    plugins = config.plugin_config
    plugins.dtype = model.config.to_dict()["dtype"]
    plugins.paged_kv_cache = True
    kv_cache = model.config.quantization.kv_cache_quant_algo
    weights = model.config.quantization.quant_algo
    if (
        scenario()["build"] == "no_paged_fmha"
        or kv_cache == "INT8"
        or (kv_cache == "FP8" and (weights not in FP8_WEIGHTS or compute_cap < 8.9))
        or not plugins.context_fmha
        or plugins.streamingllm
    ):
        plugins.use_paged_context_fmha = False
        print_line("[TRT-LLM] [W] Paged Context FMHA is disabled")


@implements("tensorrt_llm.logger.Logger")
class Logger:
    """The library's own logger."""

    level = "warning"

    def __init__(self, given: Given) -> None: ...

    def set_level(self, given: Given) -> None:
        allowed = ("internal_error", "error", "warning", "info", "verbose", "debug", "trace")
        if given.min_severity not in allowed:
            raise ValueError(f"log level {given.min_severity!r} is none of {allowed}")
        Logger.level = given.min_severity


def log(text: str) -> None:
    if Logger.level in ("info", "verbose", "debug", "trace"):
        print_line(f"[TRT-LLM] [I] {text}")


records.record("tensorrt_llm.builder.BuildConfig", BuildConfigFields)
