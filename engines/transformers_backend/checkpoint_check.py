"""The last stage of a build: checkpoints can be read, and the pair fits."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

from safetensors import safe_open

from engines.checkpoints import Reference, built_path
from engines.errors import translate_errors
from engines.pairs.compatibility import FITTING, check_pair
from engines.pairs.profile import ModelProfile
from engines.store import EngineStore
from engines.tensor_files import weight_files
from engines.tokenizer import LOAD_ERRORS
from engines.transformers_backend.model import load_config


def check_checkpoints(
    references: Sequence[Reference], store: EngineStore
) -> Generator[str | None, None, None]:
    """Read configurations, tokenizers and the headers of the weights, yielding what was found.

    Args:
        references: The target, then the draft where there is one.
        store: Where converted checkpoints lie.

    Raises:
        EngineError: A file is missing or cut short, or the tokenizers differ.
    """
    profiles = []
    for reference in references:
        path = built_path(reference, store)
        config = load_config(path, name=reference.name)
        with translate_errors(f"the model '{reference.name}' cannot be read", LOAD_ERRORS):
            num_tensors = sum(_num_tensors(file) for file in weight_files(path, reference.name))
        profiles.append(ModelProfile.load(path, name=reference.name))
        yield f"{reference.name}: {config.model_type}, {num_tensors} tensors"
    if len(references) == 2:
        warnings = check_pair(*profiles).require()
        yield FITTING
        yield from warnings


def _num_tensors(file: Path) -> int:
    with safe_open(file, framework="pt") as tensors:
        return len(tensors.keys())
