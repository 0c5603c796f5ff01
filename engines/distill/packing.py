"""A draft in the form it is shipped in: small files that hold only what its target does not.

Embeddings, tied head and tokenizer are the target's, so they are left out and put back when the
draft is built; their hash says whether it is the right target. Matrices are kept as 8-bit integers
with one scale a row.

`python -m engines.distill.packing DRAFT TARGET TARGET_NAME OUTPUT`, run as a child process that may
be killed; `engines.unpacking` is its reverse.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engines.child import exit_code_of
from engines.distill.output_folder import check_output
from engines.errors import EngineBuildError, EngineError, translate_errors
from engines.packed import CARD, EMBEDDINGS, KEPT_FILES, PACKED_FILE, PACKED_VERSION, SCALE
from engines.unpacking import embeddings_of, file_sha256

MAX_FILE_BYTES = 15_000_000
CARD_NOTE = """
## This folder

It holds only what the target does not: embeddings, the head tied to them and the tokenizer are left
out, and matrices are 8-bit integers with one scale a row. The first build puts all of it together
into a normal checkpoint, and refuses a target whose embeddings have another SHA-256 than
`packed.json` says. `part-N.safetensors` hold the weights, `distill.json` how they were trained.
"""
UNREADABLE: dict[type[Exception], type[EngineError]] = dict.fromkeys(
    (OSError, ValueError, KeyError, SafetensorError), EngineBuildError
)


def pack(draft: Path, target: Path, target_name: str, output: Path) -> None:
    """Write a draft's folder in the form it is shipped in.

    Args:
        draft: A folder that `distill` has filled.
        target: Its target's folder.
        target_name: How `packed.json` is to name the target: as a user does.
        output: A new or empty folder.

    Raises:
        EngineBuildError: The draft's embeddings are not the target's, or a folder is unusable.
    """
    with translate_errors(f"'{draft}' cannot be packed", UNREADABLE):
        weights = load_file(draft / "model.safetensors")
        embeddings = weights.pop(EMBEDDINGS)
        if "lm_head.weight" in weights:
            raise EngineBuildError(f"'{draft}' cannot be packed: its head is not its embeddings")
        if not torch.equal(embeddings, _embeddings(target)):
            raise EngineBuildError(
                f"'{draft}' cannot be packed: its embeddings are not those of '{target_name}'"
            )
        check_output(output, resume=False)
        output.mkdir(parents=True, exist_ok=True)
        files = {}
        for number, part in enumerate(_parts(_narrowed(weights)), start=1):
            path = output / f"part-{number}.safetensors"
            save_file(part, path)
            path.chmod(0o644)  # to be read by others, unlike what safetensors makes
            files[path.name] = file_sha256(path)
        for name in KEPT_FILES:
            if (draft / name).is_file():
                shutil.copyfile(draft / name, output / name)
        if (output / CARD).is_file():
            with (output / CARD).open("a", encoding="utf-8") as file:
                file.write(CARD_NOTE)
        values = {
            "version": PACKED_VERSION,
            "target": target_name,
            "embeddings_sha256": _tensor_sha256(embeddings),
            "files": files,
        }
        (output / PACKED_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _narrowed(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return matrices as int8 beside their scales, and everything else as it is."""
    narrow = {}
    for name, weight in weights.items():
        if weight.ndim != 2:
            narrow[name] = weight
            continue
        scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        narrow[name] = (weight.float() / scale).round().to(torch.int8)
        narrow[name + SCALE] = scale
    return narrow


def _parts(weights: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return the weights in parts that are small enough for a file each."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    num_bytes = 0
    for name, weight in weights.items():
        num_bytes += weight.nbytes + 1024  # its place in the header, generously
        if num_bytes > MAX_FILE_BYTES:
            parts.append({})
            num_bytes = weight.nbytes + 1024
        parts[-1][name] = weight
    return parts


def _embeddings(target: Path) -> torch.Tensor:
    """Return a target's embeddings [vocab_size, hidden_size] in bfloat16."""
    bits = embeddings_of(target).view(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16)


def _tensor_sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main(args: list[str]) -> int:
    """Pack, and return the exit code."""
    draft, target, target_name, output = args
    return exit_code_of(lambda: pack(Path(draft), Path(target), target_name, Path(output)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
