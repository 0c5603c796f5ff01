"""The form that a draft is shipped in, without its target's embeddings: names and description."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import EngineBuildError, ModelLoadError, translate_errors

PACKED_FILE = "packed.json"
PACKED_VERSION = 1
EMBEDDINGS = "model.embed_tokens.weight"
SCALE = ".scale"  # behind a matrix's name: [rows, 1], float32
CARD = "README.md"
RECORD = "distill.json"
KEPT_FILES = ("config.json", "generation_config.json", CARD, RECORD)


@dataclass(frozen=True, slots=True)
class Packed:
    """A shipped draft, its weights unread."""

    target: str  # as a user names it
    embeddings_sha256: str  # of the target's embeddings in bfloat16
    files: Mapping[str, str]  # of the weights: name to SHA-256


def is_packed(folder: Path) -> bool:
    """Return whether a folder holds a draft in the form it is shipped in."""
    return (folder / PACKED_FILE).is_file()


def read_packed(folder: Path) -> Packed:
    """Return what a folder's `packed.json` says.

    Raises:
        EngineBuildError: It cannot be read.
    """
    path = folder / PACKED_FILE
    unreadable = dict.fromkeys(
        (OSError, ValueError, KeyError, TypeError, AttributeError), EngineBuildError
    )
    with translate_errors(f"'{path}' cannot be read", unreadable):
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["version"] != PACKED_VERSION:
            raise EngineBuildError(f"'{path}' is of version {values['version']}, unknown here")
        return Packed(
            target=str(values["target"]),
            embeddings_sha256=str(values["embeddings_sha256"]),
            files={str(name): str(sha256) for name, sha256 in values["files"].items()},
        )


def packed_identity(folder: Path) -> Mapping[str, Any]:
    """Return everything that changes the checkpoint that a shipped draft is unpacked to.

    Raises:
        ModelLoadError: Its `packed.json`, which holds the hashes of all the rest, cannot be read.
    """
    with translate_errors(f"'{folder}' cannot be read", {OSError: ModelLoadError}):
        sha256 = hashlib.sha256((folder / PACKED_FILE).read_bytes()).hexdigest()
    return {"kind": "checkpoint", "packed_sha256": sha256, "unpacked_version": PACKED_VERSION}
