"""Runs in TensorRT-LLM's interpreter: builds one engine from a Hugging Face folder, and ends.

`python build_engine.py SPEC`, a JSON file. With `--checkpoint FOLDER` it writes what trtllm-build
reads instead. Standard library and TensorRT-LLM only. It prints what the library logs; a failure
ends in one line behind `error: `.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from typing import Any

ERROR_PREFIX = "error: "  # as in engines.child


def main() -> int:
    """Build what the spec says; every rank of a tensor-parallel engine, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("spec")
    parser.add_argument("--checkpoint", help="write TensorRT-LLM's own checkpoint here, no engine")
    parser.add_argument("--tied", action="store_true", help="end with standard input")
    args = parser.parse_args()
    if args.tied:
        end_with_standard_input()
    with open(args.spec, encoding="utf-8") as file:
        spec = json.load(file)
    try:
        if args.checkpoint:
            write_checkpoint(spec, args.checkpoint)
        else:
            build_ranks(spec)
            check_built(spec["output"])
    except Exception as exc:  # the library raises all kinds; the page shows one sentence
        first_line = str(exc).strip().partition("\n")[0]
        sys.stdout.flush()
        say(f"\n{ERROR_PREFIX}{type(exc).__name__}: {first_line}")
        return 1
    return 0


def end_with_standard_input() -> None:
    """Kill this process group as soon as whoever holds the other end is gone."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the library may read, too
    os.close(nothing)

    def wait() -> None:
        while os.read(pipe, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def build_ranks(spec: dict[str, Any]) -> None:
    """Load, build and save each rank. A build may change the model, so each loads its own."""
    from tensorrt_llm.builder import build
    from tensorrt_llm.logger import logger
    from tensorrt_llm.mapping import Mapping

    logger.set_level("info")
    size = spec["tensor_parallel_size"]
    for rank in range(size):
        say(f"rank {rank + 1} of {size}: loading the weights")
        model = load(spec, Mapping(world_size=size, rank=rank, tp_size=size))
        say(f"rank {rank + 1} of {size}: building the engine")
        engine = build(model, build_config(spec))
        keep_timings(spec)
        say(f"rank {rank + 1} of {size}: saving the engine")
        engine.save(spec["output"])
        del model, engine


def write_checkpoint(spec: dict[str, Any], folder: str) -> None:
    """Write each rank of the checkpoint that an engine is built from."""
    from tensorrt_llm.mapping import Mapping

    os.makedirs(folder, exist_ok=True)
    size = spec["tensor_parallel_size"]
    for rank in range(size):
        model = load(spec, Mapping(world_size=size, rank=rank, tp_size=size))
        model.save_checkpoint(folder, save_config=rank == 0)


def load(spec: dict[str, Any], mapping: Any) -> Any:
    """Return the model with its weights, quantised where the spec says so."""
    from tensorrt_llm.models.automodel import AutoModelForCausalLM
    from tensorrt_llm.models.modeling_utils import QuantConfig
    from tensorrt_llm.quantization import QuantAlgo

    checkpoint, quantization = spec["checkpoint"], spec["quantization"]
    quant_config = None
    if quantization is not None:
        given = {"quant_algo": QuantAlgo(quantization["quant_algo"])}
        if quantization.get("kv_cache_quant_algo"):
            given["kv_cache_quant_algo"] = QuantAlgo(quantization["kv_cache_quant_algo"])
        if quantization.get("exclude_modules"):
            given["exclude_modules"] = list(quantization["exclude_modules"])
        quant_config = QuantConfig(**given)
    if quantization is not None and quantization["needs_calibration"]:
        model_class = AutoModelForCausalLM.get_trtllm_model_class(
            checkpoint, trust_remote_code=False
        )
        calibrated = spec["output"] + "-calibrated"
        if not os.path.isdir(calibrated):  # once for all ranks
            say("calibrating on the library's own data set, which it downloads")
            model_class.quantize(
                checkpoint,
                calibrated,
                dtype=spec["dtype"],
                mapping=mapping,
                quant_config=quant_config,
            )
        return model_class.from_checkpoint(calibrated, rank=mapping.rank)
    return AutoModelForCausalLM.from_hugging_face(
        checkpoint,
        dtype=spec["dtype"],
        mapping=mapping,
        quant_config=quant_config,
        load_model_on_cpu=True,
        trust_remote_code=False,
    )


def build_config(spec: dict[str, Any]) -> Any:
    """Return small explicit limits. Names are the library's: it ignores those it does not know."""
    from tensorrt_llm.builder import BuildConfig
    from tensorrt_llm.models.modeling_utils import SpeculativeDecodingMode
    from tensorrt_llm.plugin import PluginConfig

    is_target = spec["max_draft_len"] > 0
    mode = SpeculativeDecodingMode
    plugins: dict[str, Any] = {"use_paged_context_fmha": True}
    if spec["quantization"] is None:
        plugins["gemm_plugin"] = "auto"
    cache = spec["timing_cache"]
    return BuildConfig(
        max_batch_size=1,
        max_beam_width=1,
        max_input_len=spec["max_seq_len"],
        max_seq_len=spec["max_seq_len"],  # the library adds max_draft_len to a target's
        max_num_tokens=spec["max_seq_len"],
        max_draft_len=spec["max_draft_len"],
        speculative_decoding_mode=mode.DRAFT_TOKENS_EXTERNAL if is_target else mode.NONE,
        gather_generation_logits=spec["gather_generation_logits"],
        plugin_config=PluginConfig(**plugins),
        input_timing_cache=cache if os.path.isfile(cache) else None,
        output_timing_cache=new_timings(spec),
    )


def new_timings(spec: dict[str, Any]) -> str:
    """Return the file that a build writes its measurements to."""
    return f"{spec['output']}-timing.cache"


def keep_timings(spec: dict[str, Any]) -> None:
    """Let them take the place of the shared file at one stroke: other builds may read it now."""
    if os.path.isfile(new_timings(spec)):
        os.replace(new_timings(spec), spec["timing_cache"])


def check_built(folder: str) -> None:
    """Refuse an engine that cannot reuse its cache: the library switches that off in silence."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        plugins = json.load(file)["build_config"]["plugin_config"]
    if not plugins.get("use_paged_context_fmha"):
        raise RuntimeError(
            "the library has switched paged context FMHA off for this quantization and GPU"
        )


def say(line: str) -> None:
    """Print a line for the log."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
