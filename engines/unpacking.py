"""Child process that puts a shipped draft together with its target's embeddings and tokenizer.

`python -m engines.unpacking PACKED TARGET OUTPUT`: folders. It may be killed at any moment.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from engines.child import exit_code_of
from engines.errors import EngineBuildError, translate_errors
from engines.packed import EMBEDDINGS, KEPT_FILES, SCALE, read_packed
from engines.tensor_files import Arrays, read_arrays, read_checkpoint, write_arrays
from engines.tokenizer import load_tokenizer


def unpack(packed: Path, target: Path, output: Path) -> None:
    """Write a shipped draft as a normal checkpoint, in bfloat16.

    Args:
        packed: The folder it is shipped in.
        target: Its target's folder, converted.
        output: An empty folder.

    Raises:
        EngineError: A file is missing or damaged, or the target is another one.
    """
    values = read_packed(packed)
    unreadable = dict.fromkeys((OSError, ValueError, KeyError), EngineBuildError)
    with translate_errors(f"the draft in '{packed}' cannot be unpacked", unreadable):
        for name, expected in values.files.items():
            if (actual := file_sha256(packed / name)) != expected:
                raise EngineBuildError(
                    f"'{packed / name}' is damaged: its SHA-256 is {actual}, not {expected}"
                )
        embeddings = embeddings_of(target)
        if hashlib.sha256(embeddings.tobytes()).hexdigest() != values.embeddings_sha256:
            raise EngineBuildError(
                f"the draft in '{packed}' is not for '{target}': its embeddings are others; build "
                f"it with '{values.target}'"
            )
        narrow: Arrays = {}
        for name in values.files:
            narrow |= read_arrays(packed / name)
        weights = {
            name: (weight * narrow[name + SCALE]).astype(ml_dtypes.bfloat16)
            if name + SCALE in narrow
            else weight
            for name, weight in narrow.items()
            if not name.endswith(SCALE)
        }
        write_arrays(weights | {EMBEDDINGS: embeddings}, output / "model.safetensors")
        for name in KEPT_FILES:
            if (packed / name).is_file():
                shutil.copyfile(packed / name, output / name)
        load_tokenizer(target, name=target.name).save_pretrained(output)


def embeddings_of(target: Path) -> np.ndarray[Any, Any]:
    """Return a target's embeddings [vocab_size, hidden_size] in bfloat16.

    Raises:
        EngineError: It has none, or they cannot be read.
    """
    arrays = read_checkpoint(target, target.name)
    if EMBEDDINGS not in arrays:
        raise EngineBuildError(f"'{target}' holds no embeddings called {EMBEDDINGS}")
    return arrays[EMBEDDINGS].astype(ml_dtypes.bfloat16)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(args: list[str]) -> int:
    """Unpack, and return the exit code."""
    packed, target, output = map(Path, args)
    return exit_code_of(lambda: unpack(packed, target, output))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
