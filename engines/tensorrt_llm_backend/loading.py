"""Built engines, or models, to an engine that generates: checked first, then loaded in a worker."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from engines.base import EngineInfo
from engines.checkpoints import commits_of
from engines.config import DraftKind
from engines.environment import gigabytes
from engines.errors import IncompatibleModelsError, ModelLoadError, ModelNotBuiltError
from engines.pairs.compatibility import check_pair
from engines.pairs.profile import ModelProfile
from engines.tensorrt_llm_backend.engine_build import built_engine
from engines.tensorrt_llm_backend.engine_flow import EngineFlowEngine, Limits
from engines.tensorrt_llm_backend.engine_folder import (
    EngineFolder,
    check_limits,
    check_logits,
    check_target,
    padded,
    read_engine_folder,
)
from engines.tensorrt_llm_backend.engine_plan import (
    Role,
    check_draft_width,
    devices_of,
    engine_dtype,
    model_config,
    ready_made_algorithm,
)
from engines.tensorrt_llm_backend.pytorch_flow import Models, PyTorchFlowEngine
from engines.tensorrt_llm_backend.runtime.worker import CACHED_TEXTS
from engines.tensorrt_llm_backend.setup import Setup
from engines.text_engine import TextEngine
from engines.tokenizer import Text

WITHOUT_MODEL: tuple[DraftKind, ...] = ("prompt_lookup", "none")
ROUNDING_NOTE = (
    "a pass over several tokens rounds differently from passes over one, so greedy outputs may "
    "part where two tokens are nearly tied"
)
REUSE_NOTE = (
    "a prompt stays in the KV cache, from the warm-up or a run before, so the time to the first "
    "token is that of a prompt seen before, and one pass more"
)
RECORDED = (
    "acceptance",
    "quantization",
    "max_draft_len",
    "max_seq_len",
    "tensor_parallel_size",
    "draft_tensor_parallel_size",
    "launcher",
)
EXPERIMENTAL_NOTES = {
    "logits": "accepting by logits is experimental: it was never run on the real library",
    "parallel": "several GPUs are experimental: they were never run by this project",
}
ENGINE_NOTE = (
    "TensorRT-LLM's engine flow: it reports no probabilities, and a step includes this page's way "
    "to its process, some 0.2 ms, which the baseline does without"
)
PYTORCH_NOTE = (
    "TensorRT-LLM's PyTorch flow: its own loop reports which tokens it accepted, not which it "
    "dropped, no probabilities, and the time of drafting as a sum, if at all; the baseline is a "
    "load of its own, with the overlap scheduler, which drafting does without"
)


def load_text(setup: Setup) -> tuple[Text, tuple[str, ...]]:
    """Return the target's tokenizer, and what a reader must know of the pair.

    Raises:
        EngineError: A tokenizer cannot be read, or the draft means other text by its ids.
    """
    target, path = setup.references["target"], setup.checkpoint("target")
    text = Text.load(path, name=target.name)
    warnings: tuple[str, ...] = ()
    if "draft" in setup.references:
        draft, draft_path = setup.references["draft"], setup.checkpoint("draft")
        profile = ModelProfile.of(path, text.tokenizer, name=target.name)
        warnings = check_pair(profile, ModelProfile.load(draft_path, name=draft.name)).require()
        check_draft_width(path, target.name, draft_path, draft.name)
        if setup.config.tensorrt_llm.acceptance == "logits":
            _check_logit_widths(setup)
    return text, warnings


def load_engine_flow(setup: Setup) -> Generator[str | None, None, TextEngine]:
    """Load the built engines, yielding what the worker says and logs.

    Closing the generator ends the worker.

    Raises:
        ModelNotBuiltError: An engine is not built.
        EngineError: One does not fit, is damaged, or cannot be loaded.
    """
    options = setup.config.tensorrt_llm
    text, warnings = load_text(setup)
    folders = _engine_folders(setup)
    _check_memory(setup, folders, CACHED_TEXTS * setup.longest_text)
    worker = setup.worker()
    opened: dict[Role, dict[str, Any]] = {
        role: {"folder": str(folder.path), "devices": setup.worker_devices(role)}
        for role, folder in folders.items()
    }
    opening = worker.open(
        options.start_timeout_s,
        flow="engine",
        target=opened["target"],
        draft=opened.get("draft"),
        max_seq_len=setup.longest_text,
        max_draft_len=options.max_draft_len,
        gather_generation_logits=options.acceptance == "logits",
    )
    yield from opening
    return EngineFlowEngine(
        _info(
            setup,
            {role: folder.dtype_name for role, folder in folders.items()},
            (ENGINE_NOTE, *warnings),
        ),
        text,
        ("model", *WITHOUT_MODEL) if "draft" in folders else WITHOUT_MODEL,
        worker,
        Limits(
            max_seq_len=options.max_seq_len,
            max_draft_len=options.max_draft_len,
            step_timeout_s=options.step_timeout_s,
            accepts_logits=options.acceptance == "logits",
        ),
    )


def load_pytorch_flow(setup: Setup) -> TextEngine:
    """Return an engine that loads a side when it is run: how a side drafts is fixed by then.

    Raises:
        ModelNotBuiltError: A model must be fetched or converted first.
        EngineError: The models do not fit.
    """
    options = setup.config.tensorrt_llm
    text, warnings = load_text(setup)
    dtype = engine_dtype(setup.config)
    paths = {role: str(setup.checkpoint(role).resolve()) for role in setup.references}
    return PyTorchFlowEngine(
        _info(
            setup, {role: _weights_name(setup, role) for role in paths}, (PYTORCH_NOTE, *warnings)
        ),
        text,
        ("model", *WITHOUT_MODEL) if "draft" in paths else WITHOUT_MODEL,
        Models(
            model=paths["target"],
            draft=paths.get("draft"),
            dtype=dtype,
            max_seq_len=setup.longest_text,
            tensor_parallel_size=options.tensor_parallel_size,
            is_two_model=setup.installation.is_two_model,
        ),
        make_worker=setup.worker,
        look_at_gpus=setup.used_gpus,
        start_timeout_s=options.start_timeout_s,
        step_timeout_s=options.step_timeout_s,
    )


def _check_logit_widths(setup: Setup) -> None:
    """Refuse a pair whose logits cannot be compared, before its engines are built.

    Raises:
        IncompatibleModelsError: So it is; the text has both widths.
    """
    widths = [
        padded(
            int(model_config(setup.checkpoint(role), reference.name).get("vocab_size", 0)),
            len(devices_of(setup.config, role)),
        )
        for role, reference in setup.references.items()
    ]
    if len(set(widths)) > 1:
        raise IncompatibleModelsError(
            f"the target's logits are {widths[0]:,} wide and the draft's {widths[1]:,}: set "
            "acceptance to 'tokens' (greedy decoding only)"
        )


def _engine_folders(setup: Setup) -> dict[Role, EngineFolder]:
    """Return the built engines, each checked against what is asked of it."""
    options = setup.config.tensorrt_llm
    folders: dict[Role, EngineFolder] = {}
    for role in setup.references:
        plan = setup.plan(role)
        entry = built_engine(plan, setup.store)
        if entry is None:
            raise ModelNotBuiltError(
                f"the {role} engine of '{plan.name}' is not built yet; build it first (the Build "
                "button, or 'python -m engines build --backend tensorrt_llm')"
            )
        folders[role] = read_engine_folder(entry.path)
        check_limits(folders[role], max_seq_len=plan.identity["max_seq_len"])
    check_target(folders["target"], max_draft_len=options.max_draft_len)
    if options.acceptance == "logits" and "draft" in folders:
        check_logits(folders["target"], folders["draft"])
    return folders


def _check_memory(setup: Setup, folders: dict[Role, EngineFolder], num_cached_tokens: int) -> None:
    """Refuse what does not fit into what is free on a GPU.

    Raises:
        ModelLoadError: So it is; the text has both numbers.
    """
    for gpu in setup.used_gpus():
        needed = sum(
            folder.device_bytes(num_cached_tokens)
            for role, folder in folders.items()
            if gpu.index in devices_of(setup.config, role)
        )
        if gpu.free_bytes is not None and needed > gpu.free_bytes:
            raise ModelLoadError(
                f"the engines and their KV caches take {gigabytes(needed)} of GPU {gpu.index} "
                f"({gpu.name}), where {gigabytes(gpu.free_bytes)} are free: end what else runs "
                "there, lower max_seq_len, use FP8, or more GPUs"
            )


def _weights_name(setup: Setup, role: Role) -> str:
    """Return how a model's weights are kept where the library loads them as they are."""
    dtype, checkpoint = engine_dtype(setup.config), setup.checkpoint(role)
    algorithm = ready_made_algorithm(checkpoint, setup.references[role].name)
    return f"{algorithm} ({dtype})" if algorithm else dtype


def _info(setup: Setup, dtypes: Mapping[Role, str], notes: Sequence[str]) -> EngineInfo:
    installation, draft = setup.installation, setup.references.get("draft")
    options = setup.config.tensorrt_llm
    experimental = {
        "logits": options.acceptance == "logits",
        "parallel": len(setup.devices) > 1 or bool(options.launcher),
    }
    names = [gpu.name for gpu in setup.gpus if gpu.index in setup.devices]
    versions = {"tensorrt_llm": installation.version, "torch": installation.torch_version}
    return EngineInfo(
        backend="tensorrt_llm",
        target=setup.references["target"].described,
        draft=None if draft is None else draft.described,
        dtype=dtypes["target"],
        device=names[0] if len(names) == 1 else f"{len(names)} x {names[0]}",
        context_length=setup.config.tensorrt_llm.max_seq_len,
        draft_dtype=dtypes.get("draft"),
        notes=(
            *notes,
            *(EXPERIMENTAL_NOTES[name] for name, is_so in experimental.items() if is_so),
            ROUNDING_NOTE,
            REUSE_NOTE,
        ),
        settings={name: getattr(options, name) for name in RECORDED} | {"flow": setup.flow},
        commits=commits_of(
            {role: (model, setup.checkpoint(role)) for role, model in setup.references.items()}
        ),
        versions={name: version for name, version in versions.items() if version},
    )
