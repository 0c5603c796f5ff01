"""What a model reference means: a bundled model, a folder, a GGUF file, or a Hub id."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from engines import bundled
from engines.config import BUNDLED, BUNDLED_DRAFT
from engines.errors import ModelLoadError, ModelNotBuiltError, translate_errors
from engines.packed import is_packed, packed_identity, read_packed
from engines.small_files import PATTERNS
from engines.store import EngineStore, engine_key
from engines.tensor_files import weight_files

MAX_NAME_SHOWN = 200  # characters of a name that names nothing
CONVERSION_VERSION = 1  # part of the key of every converted checkpoint: raised when it changes
# The Hub's own rule: no part begins or ends with a sign, none holds two signs that look like one.
HUB_ID = re.compile(
    r"(?!.*(--|\.\.))(?P<repo>\b[\w.-]+\b/\b[\w.-]{1,96}\b(?<!\.git))(@(?P<revision>[\w./-]+))?",
    re.ASCII,
)

Source = Literal["bundled", "folder", "packed", "gguf", "hub"]


@dataclass(frozen=True, slots=True)
class Reference:
    """A model as the user named it, and where it comes from."""

    text: str
    source: Source
    name: str  # for people
    path: Path | None = None  # of a folder, packed or not, or a GGUF file
    repo: str | None = None  # of the Hub
    revision: str | None = None  # of the Hub; None is its main branch

    @property
    def described(self) -> str:
        """Return its name for a record: with the revision where one was asked for."""
        return self.name if self.revision is None else self.text


def parse_reference(text: str) -> Reference:
    """Return what a reference names, without reading the model.

    Raises:
        ModelLoadError: It names nothing that could be a model.
    """
    if text == BUNDLED:
        return Reference(text, "bundled", bundled.NAME)
    if text == BUNDLED_DRAFT:
        return Reference(text, "packed", bundled.DRAFT_NAME, path=bundled.DRAFT_FOLDER)
    try:
        path = Path(text).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as exc:  # a name that is too long, a folder that may not be entered
        raise _no_model(text, f" ({exc.strerror})") from exc
    except RuntimeError as exc:  # the home folder of a user who does not exist
        raise _no_model(text) from exc
    if is_folder:
        if is_packed(path):
            return Reference(text, "packed", path.resolve().name, path=path)
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"the folder '{text}' holds no model: it has no config.json; name the folder that "
                "'save_pretrained' or a download from the Hub has filled"
            )
        return Reference(text, "folder", path.resolve().name, path=path)
    if is_file:
        if path.suffix != ".gguf":
            raise ModelLoadError(
                f"'{text}' is a file but not a .gguf file; name a .gguf file or a model's folder"
            )
        return Reference(text, "gguf", path.stem, path=path)
    hub = HUB_ID.fullmatch(text)
    if hub is None or path.suffix == ".gguf":
        raise _no_model(text)
    return Reference(text, "hub", hub["repo"], repo=hub["repo"], revision=hub["revision"])


def _no_model(text: str, reason: str = "") -> ModelLoadError:
    return ModelLoadError(
        f"there is no model '{text[:MAX_NAME_SHOWN]}'{reason}: name a folder, a .gguf file, a Hub "
        f"id such as 'org/name', or '{BUNDLED}'"
    )


def needed_references(reference: Reference) -> list[Reference]:
    """Return what must be built for a model: its target first where it is packed, then itself."""
    if reference.source != "packed":
        return [reference]
    assert reference.path is not None
    return [parse_reference(read_packed(reference.path).target), reference]


def gguf_identity(sha256: str) -> Mapping[str, Any]:
    """Return everything that changes a checkpoint converted from a GGUF file."""
    return {"kind": "checkpoint", "gguf_sha256": sha256, "conversion_version": CONVERSION_VERSION}


def bundled_key() -> str:
    """Return the store's key of the bundled target."""
    return engine_key(bundled.NAME, gguf_identity(bundled.GGUF_SHA256))


def hash_file(path: Path) -> Iterator[str | None]:
    """Yield None now and then while a file is read, and its SHA-256 at the end.

    Raises:
        ModelLoadError: It cannot be read.
    """
    digest = hashlib.sha256()
    with (
        translate_errors(f"'{path}' cannot be read", {OSError: ModelLoadError}),
        path.open("rb") as file,
    ):
        while block := file.read(64 * 1024 * 1024):
            digest.update(block)
            yield None
    yield digest.hexdigest()


def built_path(reference: Reference, store: EngineStore) -> Path:
    """Return the folder that a back end loads the model from.

    Raises:
        ModelNotBuiltError: It must be fetched or converted first.
        EngineError: It is damaged.
    """
    remedy = "build it first (the Build button, or 'python -m engines build')"
    if reference.source == "folder":
        assert reference.path is not None
        return reference.path
    if reference.source == "hub":
        return _hub_snapshot(reference, remedy)
    entry = store.find(stored_key(reference))
    if entry is None:
        raise ModelNotBuiltError(f"'{reference.name}' is not converted yet; {remedy}")
    return entry.path


def stored_key(reference: Reference) -> str:
    """Return the store's key of what is converted: the file of a GGUF is read whole once for it."""
    if reference.source == "bundled":
        return bundled_key()
    assert reference.path is not None
    if reference.source == "packed":
        return engine_key(reference.name, packed_identity(reference.path))
    with translate_errors(f"'{reference.path}' cannot be read", {OSError: ModelLoadError}):
        status = reference.path.stat()
    sha256 = _sha256(reference.path, status.st_size, status.st_mtime_ns)
    return engine_key(reference.name, gguf_identity(sha256))


def commits_of(models: Mapping[str, tuple[Reference, Path]]) -> dict[str, str]:
    """Return which commit of its repository each model from the Hub is, by its role.

    Args:
        models: By role: the reference, and the folder that it is loaded from.
    """
    # The Hub's cache names the folder of a snapshot by its commit.
    return {role: path.name for role, (model, path) in models.items() if model.source == "hub"}


def checkpoint_identity(reference: Reference, checkpoint: Path) -> str:
    """Return what tells two states of a checkpoint apart, without reading its weights."""
    if reference.source == "hub":
        return f"{reference.repo}@{checkpoint.name}"  # the folder of a snapshot is its commit
    if reference.source != "folder":
        return stored_key(reference)
    digest = hashlib.sha256()
    with translate_errors(f"'{checkpoint}' cannot be read", {OSError: ModelLoadError}):
        for file in sorted(checkpoint.iterdir()):
            if not file.is_file():
                continue
            if file.suffix == ".json":
                digest.update(file.read_bytes())
            else:
                status = file.stat()
                digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return f"folder {digest.hexdigest()[:16]}"


@lru_cache
def _sha256(path: Path, num_bytes: int, changed_ns: int) -> str:
    """Return a file's hash, read again only where its size or its time has changed."""
    *_, sha256 = hash_file(path)
    assert sha256 is not None
    return sha256


def _hub_snapshot(reference: Reference, remedy: str) -> Path:
    folder = hub_folder(reference, PATTERNS)
    if folder is None or not _has_weights(folder, reference.name):
        raise ModelNotBuiltError(f"'{reference.text}' is not downloaded yet; {remedy}")
    return folder


def hub_folder(reference: Reference, patterns: Sequence[str]) -> Path | None:
    """Return where the Hub's cache has a model's files of these names, all of them; else None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                str(reference.repo),
                revision=reference.revision,
                allow_patterns=list(patterns),
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError:
        return None


def _has_weights(folder: Path, name: str) -> bool:
    """Return whether all weights are there: a download may have ended early, or left them out."""
    try:
        return all(file.is_file() for file in weight_files(folder, name))
    except ModelLoadError:
        return False
