"""Building engines into the store: a child process for each, in TensorRT-LLM's interpreter."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

from engines.building import OFFLINE, build_into_store
from engines.errors import EngineBuildError, translate_errors
from engines.store import EngineStore, StoreEntry
from engines.tensorrt_llm_backend.engine_plan import EnginePlan, misread_word
from engines.tensorrt_llm_backend.error_texts import remedy_for, with_remedy
from engines.tensorrt_llm_backend.gpus import only
from engines.tensorrt_llm_backend.installation import Installation

BUILD_SCRIPT = Path(__file__).parent / "runtime" / "build_engine.py"
SPEC = "build.json"
ENGINE = "engine"  # the part of the lent folder that is kept
LINK = "checkpoint"
COMPARED = {  # what of an identity is named where an engine does not fit, and how
    "tensorrt_llm": "by TensorRT-LLM",
    "gpu": "for the GPU",
    "dtype": "in",
    "quantization": "with quantization",
    "tensor_parallel_size": "with tensor_parallel_size",
    "max_seq_len": "for a number of tokens of",
    "max_draft_len": "with max_draft_len",
    "gather_generation_logits": "with gather_generation_logits",
    "checkpoint": "from",
}


def build_lines(
    plan: EnginePlan, store: EngineStore, installation: Installation, *, timeout_s: float
) -> Generator[str | None, None, None]:
    """Build an engine, or find that it is built, yielding what is logged.

    Raises:
        EngineBuildError: It failed, took too long, or is being built by somebody else.
    """
    action = f"building the {plan.role} engine of {plan.name}"

    def command(folder: Path) -> list[str]:
        # The library looks for words in the path, so it gets one without any.
        link = folder / LINK
        if word := misread_word(str(link)):
            raise EngineBuildError(
                f"the path '{link}' holds '{word}', which TensorRT-LLM takes for a model of "
                "that name: set SPECDEC_STORE to another folder"
            )
        spec = plan.build_spec(link, folder / ENGINE, store.root / _timing_cache(plan))
        with translate_errors(f"{action} in {folder}", {OSError: EngineBuildError}):
            link.symlink_to(plan.checkpoint.resolve(), target_is_directory=True)
            (folder / ENGINE).mkdir()
            (folder / SPEC).write_text(json.dumps(spec), encoding="utf-8")
        return [installation.python, str(BUILD_SCRIPT), str(folder / SPEC), "--tied"]

    env = {**OFFLINE, **only(plan.devices if plan.needs_calibration else plan.devices[:1])}
    if plan.needs_calibration:
        del env["HF_HUB_OFFLINE"]  # it downloads a data set
    told = ""  # why, where the error itself does not say
    try:
        for line in build_into_store(
            store,
            plan.title,
            plan.key,
            plan.identity,
            num_bytes=lambda: _weight_bytes(plan.checkpoint),
            command=command,
            action=action,
            result=ENGINE,
            env=env,
            timeout_s=timeout_s,
            is_tied=True,  # nobody else may build on, beside the next who tries
        ):
            if line is not None and remedy_for(line):
                told = line
            yield line
    except EngineBuildError as exc:
        text = with_remedy(str(exc))
        if told and remedy_for(str(exc)) is None:
            text = with_remedy(f"{exc} ({told})")
        raise EngineBuildError(text) from exc


def built_engine(plan: EnginePlan, store: EngineStore) -> StoreEntry | None:
    """Return a plan's engine, None where neither it nor one like it is built.

    It may bear another name: its model's folder was renamed or copied since.

    Raises:
        EngineBuildError: It is damaged; or there is one of this model that does not fit, which is
            kept: an engine is built anew where a person asks for it.
    """
    entry = store.find(plan.key)
    if entry is not None:
        return entry
    others = store.entries()[::-1]  # the newest first
    if renamed := next((other for other in others if other.identity == plan.identity), None):
        return store.find(renamed.key)
    for other in others:
        is_alike = all(
            other.identity.get(name) == plan.identity[name] for name in ("kind", "role")
        ) and _is_same_model(str(other.identity.get("checkpoint")), plan.identity["checkpoint"])
        if is_alike:
            raise EngineBuildError(
                f"the {plan.role} engine of '{plan.name}' that is built does not fit: "
                f"{_differences(other, plan)}; press Build (or 'python -m engines build') to build "
                "the one that fits; the other stays"
            )
    return None


def _is_same_model(checkpoint: str, other: str) -> bool:
    """Return whether two checkpoint identities are of one model: the revision may differ."""
    return checkpoint == other or (
        "@" in checkpoint and checkpoint.partition("@")[0] == other.partition("@")[0]
    )


def _timing_cache(plan: EnginePlan) -> str:
    """Return the name of the file in which builds of a kind of GPU share their measurements."""
    version, capability = plan.identity["tensorrt_llm"], plan.identity["compute_capability"]
    return f".timing-{version}-{capability}.cache"


def _differences(entry: StoreEntry, plan: EnginePlan) -> str:
    parts = [
        f"it is built {words} {_said(entry.identity.get(name))}, and {_said(plan.identity[name])} "
        "is needed"
        for name, words in COMPARED.items()
        if entry.identity.get(name) != plan.identity[name]
    ]
    return "; ".join(parts) or "it is built by another version of this project"


def _said(value: object) -> str:
    """Return a value of an identity for people: a quantization by its name."""
    return str(value["quant_algo"] if isinstance(value, dict) else value)


def _weight_bytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
