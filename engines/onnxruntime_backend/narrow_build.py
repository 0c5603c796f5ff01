"""A draft's matrices made narrow once: where they lie in the store, and the child that makes them.

`python -m engines.onnxruntime_backend.narrow_build CHECKPOINT FOLDER`; it may be killed at any
moment.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engines.building import build_into_store
from engines.checkpoints import Reference, built_path, checkpoint_identity
from engines.child import exit_code_of, own_module
from engines.errors import EngineBuildError, ModelNotBuiltError, translate_errors
from engines.onnxruntime_backend.llama import EMBEDDINGS, HEAD, LlamaShape
from engines.onnxruntime_backend.narrow import BITS, BLOCK_SIZE, narrowed
from engines.store import EngineStore, engine_key
from engines.tensor_files import Arrays, read_arrays, read_checkpoint, write_arrays

NARROW_VERSION = 1  # part of the key: raised when the layout changes
FILE = "narrow.safetensors"


def narrow_stage(reference: Reference, store: EngineStore) -> Generator[str | None, None, None]:
    """Make a built draft's matrices narrow, yielding log lines; nothing where that is done.

    Raises:
        EngineError: The draft is no Llama, is damaged, or there is no room.
    """
    checkpoint = built_path(reference, store)
    LlamaShape.load(checkpoint, name=reference.name)
    identity = _identity(reference, checkpoint)
    num_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    yield from build_into_store(
        store,
        _name(reference),
        engine_key(_name(reference), identity),
        identity,
        num_bytes=lambda: num_bytes,
        command=lambda folder: own_module(
            "engines.onnxruntime_backend.narrow_build", str(checkpoint), str(folder)
        ),
        action=f"narrowing {reference.name}",
    )


def narrow_arrays(reference: Reference, store: EngineStore) -> Arrays:
    """Return a draft's narrow matrices.

    Raises:
        ModelNotBuiltError: They must be made first.
        EngineError: They are damaged.
    """
    identity = _identity(reference, built_path(reference, store))
    entry = store.find(engine_key(_name(reference), identity))
    if entry is None:
        raise ModelNotBuiltError(f"'{reference.name}' is not narrowed yet; build it first")
    return read_arrays(entry.path / FILE)


def _name(reference: Reference) -> str:
    return f"{reference.name}, {BITS} bits"


def _identity(reference: Reference, checkpoint: Path) -> Mapping[str, Any]:
    return {
        "kind": "narrow",
        "checkpoint": checkpoint_identity(reference, checkpoint),
        "bits": BITS,
        "block_size": BLOCK_SIZE,
        "narrow_version": NARROW_VERSION,
    }


def narrow(checkpoint: Path, folder: Path) -> None:
    """Write the narrow matrices of a checkpoint. A head that is the embeddings gets its own.

    Raises:
        EngineError: The checkpoint is damaged, or the folder cannot be written.
    """
    arrays = read_checkpoint(checkpoint, checkpoint.name)
    with translate_errors(f"'{folder}' cannot be written", {OSError: EngineBuildError}):
        matrices = {name: array for name, array in arrays.items() if array.ndim == 2}
        embeddings = matrices.pop(EMBEDDINGS, None)
        if HEAD not in matrices and embeddings is not None:
            matrices[HEAD] = embeddings
        narrow: Arrays = {}
        for name, matrix in matrices.items():
            narrow |= narrowed(name, matrix.astype(np.float32, copy=False))
        write_arrays(narrow, folder / FILE)


def main(args: list[str]) -> int:
    """Narrow, and return the exit code."""
    checkpoint, folder = map(Path, args)
    return exit_code_of(lambda: narrow(checkpoint, folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
