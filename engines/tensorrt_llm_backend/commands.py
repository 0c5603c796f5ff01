"""The commands to take away: what was built and run, as TensorRT-LLM's own tools would do it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines.child import PROJECT_ROOT
from engines.config import DraftKind, EngineConfig
from engines.store import EngineStore
from engines.tensorrt_llm_backend.engine_build import BUILD_SCRIPT
from engines.tensorrt_llm_backend.engine_plan import EnginePlan, Role, engine_dtype
from engines.tensorrt_llm_backend.installation import release_of
from engines.tensorrt_llm_backend.runtime.worker import CACHED_TEXTS, NGRAM_SIZE
from engines.tensorrt_llm_backend.setup import Setup, setup_of

YAML_FILE = "speculative.yaml"


@dataclass(frozen=True, slots=True)
class Snippet:
    """One thing to copy."""

    title: str
    language: Literal["python", "shell", "yaml"]
    text: str


def take_away(
    config: EngineConfig,
    draft_kind: DraftKind,
    num_draft_tokens: int,
    store: EngineStore | None = None,
) -> tuple[Snippet, ...]:
    """Return the commands for what was built and run.

    Args:
        config: The pair, and how TensorRT-LLM builds and runs it.
        draft_kind: What drafts.
        num_draft_tokens: In a step; 0 with the draft kind `none`.
        store: Where its models lie.

    Raises:
        EngineError: It cannot be built here.
        ValueError: An option does not suit the machine.
    """
    setup = setup_of(config, store or EngineStore())
    snippets = []
    if setup.flow == "engine":
        plans = [setup.plan(role) for role in setup.references]
        snippets = [
            Snippet("Build the engines, as it was done", "shell", _build_commands(plans)),
            Snippet("Build the engines, with trtllm-build", "shell", _trtllm_build(plans)),
        ]
    generate = _generate_script(setup, draft_kind, num_draft_tokens)
    return (
        *snippets,
        Snippet("Generate, with the PyTorch flow", "python", generate),
        Snippet("Serve, with the PyTorch flow", "shell", _serve_command(setup, draft_kind)),
        *_serve_config(setup, draft_kind, num_draft_tokens),
    )


def _build_commands(plans: list[EnginePlan]) -> str:
    """Return the calls of the script that builds here: it needs TensorRT-LLM and nothing else."""
    script = BUILD_SCRIPT.relative_to(PROJECT_ROOT)
    lines = []
    for plan in plans:
        lines += [*_spec_lines(plan), f"python3 {script} {plan.role}.json", ""]
    return "\n".join(lines)


def _spec_lines(plan: EnginePlan) -> list[str]:
    spec = plan.build_spec(plan.checkpoint, Path(f"{plan.role}-engine"), Path("timing.cache"))
    return [
        f"mkdir -p {plan.role}-engine",
        f"cat > {plan.role}.json <<'END'",
        json.dumps(spec, indent=2),
        "END",
    ]


def _trtllm_build(plans: list[EnginePlan]) -> str:
    """Return the same by trtllm-build, which reads checkpoints of TensorRT-LLM's own."""
    script = BUILD_SCRIPT.relative_to(PROJECT_ROOT)
    lines = []
    for plan in plans:
        identity = plan.identity
        longest = identity["max_seq_len"]
        options = [
            f"--checkpoint_dir {plan.role}-checkpoint",
            f"--output_dir {plan.role}-engine",
            "--max_batch_size 1 --max_beam_width 1",
            f"--max_input_len {longest} --max_seq_len {longest} --max_num_tokens {longest}",
            "--use_paged_context_fmha enable",
        ]
        if identity["quantization"] is None:
            options.append("--gemm_plugin auto")
        if identity["max_draft_len"]:
            options.append("--speculative_decoding_mode draft_tokens_external")
            options.append(f"--max_draft_len {identity['max_draft_len']}")
        if identity["gather_generation_logits"]:
            options.append("--gather_generation_logits")
        lines += [
            *_spec_lines(plan),
            f"python3 {script} {plan.role}.json --checkpoint {plan.role}-checkpoint",
            " \\\n    ".join(["trtllm-build", *options]),
            "",
        ]
    return "\n".join(lines)


def _generate_script(setup: Setup, draft_kind: DraftKind, num_draft_tokens: int) -> str:
    options = setup.config.tensorrt_llm
    longest = setup.longest_text
    names = ["LLM", "KvCacheConfig", "SamplingParams"]
    drafting: list[str] = []
    if draft_kind == "model":
        names.append("DraftTargetDecodingConfig")
        drafting = [
            "    speculative_config=DraftTargetDecodingConfig(",
            f"        max_draft_len={num_draft_tokens},",
            f"        {_draft_field(setup)}={_model(setup, 'draft')!r},",
            "    ),",
        ]
    elif draft_kind == "prompt_lookup":
        names.append("NGramDecodingConfig")
        drafting = [
            "    speculative_config=NGramDecodingConfig(",
            f"        max_draft_len={num_draft_tokens},",
            f"        max_matching_ngram_size={NGRAM_SIZE},",
            "    ),",
        ]
    if drafting:
        drafting.append("    disable_overlap_scheduler=True,")
    return "\n".join(
        [
            f"from tensorrt_llm.llmapi import {', '.join(sorted(names))}",
            "",
            "if __name__ == '__main__':  # LLM starts processes",
            "    llm = LLM(",
            f"        model={_model(setup, 'target')!r},",
            f'        dtype="{engine_dtype(setup.config)}",',
            f"        tensor_parallel_size={options.tensor_parallel_size},",
            "        max_batch_size=1,",
            f"        max_seq_len={longest},",
            f"        max_num_tokens={longest},",
            f"        kv_cache_config=KvCacheConfig(max_tokens={CACHED_TEXTS * longest}),",
            *(f"    {line}" for line in drafting),
            "    )",
            "    output = llm.generate('Hello.', SamplingParams(max_tokens=64, temperature=0.0))",
            "    print(output.outputs[0].text)",
            "    llm.shutdown()",
            "",
        ]
    )


def _serve_command(setup: Setup, kind: DraftKind) -> str:
    options = setup.config.tensorrt_llm
    parts = ["trtllm-serve", shlex.quote(_model(setup, "target"))]
    if options.tensor_parallel_size > 1:
        parts.append(f"--tp_size {options.tensor_parallel_size}")
    if kind != "none":
        parts.append(f"--extra_llm_api_options {YAML_FILE}")
    command = " ".join(parts)
    return f"{options.launcher} {command}\n" if options.launcher else f"{command}\n"


def _serve_config(setup: Setup, kind: DraftKind, num_draft_tokens: int) -> tuple[Snippet, ...]:
    """Return what `trtllm-serve` is to read. JSON's strings are YAML's."""
    if kind == "none":
        return ()
    longest = setup.longest_text
    lines = ["max_batch_size: 1", f"max_seq_len: {longest}", f"max_num_tokens: {longest}"]
    lines += ["kv_cache_config:", f"  max_tokens: {CACHED_TEXTS * longest}"]
    lines += ["disable_overlap_scheduler: true", "enable_iter_perf_stats: true"]
    lines += ["speculative_config:"]
    if kind == "model":
        lines += [
            "  decoding_type: DraftTarget",
            f"  max_draft_len: {num_draft_tokens}",
            f"  {_draft_field(setup)}: {json.dumps(_model(setup, 'draft'))}",
        ]
    else:
        lines += [
            "  decoding_type: NGram",
            f"  max_draft_len: {num_draft_tokens}",
            f"  max_matching_ngram_size: {NGRAM_SIZE}",
        ]
    return (Snippet(YAML_FILE, "yaml", "\n".join([*lines, ""])),)


def _draft_field(setup: Setup) -> str:
    is_old = release_of(setup.installation.version) < (1, 2)
    return "speculative_model_dir" if is_old else "speculative_model"


def _model(setup: Setup, role: Role) -> str:
    """Return a model as the library can be told it: a Hub id stays one."""
    reference = setup.references[role]
    if reference.source == "hub" and reference.revision is None:
        return str(reference.repo)
    return str(setup.checkpoint(role).resolve())
