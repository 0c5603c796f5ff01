"""Where built engines live: key, lock, manifest, list, remove.

An engine is a folder named by a key over everything that changes it. It is built aside under a
lock, its manifest is written last, and the folder is renamed into place: a folder without a
manifest is not an engine, and a killed build leaves nothing that looks like one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from engines.errors import EngineBuildError, translate_errors

STORE_VARIABLE = "SPECDEC_STORE"
MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
_ASIDE = ".building-"


def default_store_root() -> Path:
    """Return the folder that `SPECDEC_STORE` names, or the user's cache folder."""
    named = os.environ.get(STORE_VARIABLE)
    return Path(named) if named else user_cache_path("specdec-playground") / "engines"


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One built engine."""

    key: str
    path: Path
    name: str  # what a person calls it
    created: str  # ISO 8601, UTC
    identity: dict[str, Any]  # everything that changes the artefact: what the key is made of
    files: dict[str, int]  # name -> bytes

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """Return what `engines list` prints."""
        return {
            "key": self.key,
            "name": self.name,
            "created": self.created,
            "num_bytes": self.num_bytes,
            "identity": self.identity,
            "folder": str(self.path),
        }


def engine_key(name: str, identity: Mapping[str, Any]) -> str:
    """Return a readable key: a name that suits a file system, and a hash of the identity."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:48] or "engine"
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"{slug}-{digest[:12]}"


class EngineStore:
    """The folder of built engines. Several processes may use one at a time."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = default_store_root() if root is None else root

    def entries(self) -> list[StoreEntry]:
        """Return every engine whose manifest can be read, oldest first."""
        if not self.root.is_dir():
            return []
        folders = (path for path in self.root.iterdir() if not path.name.startswith("."))
        found = (self._read(folder) for folder in folders)
        engines = (entry for entry in found if entry is not None)
        return sorted(engines, key=lambda entry: (entry.created, entry.key))

    def find(self, key: str) -> StoreEntry | None:
        """Return an engine whose files are all there, or None where it is not built.

        Raises:
            EngineBuildError: A file is missing or has another size than when it was built.
        """
        entry = self._read(self.root / key)
        if entry is None:
            return None
        for name, num_bytes in entry.files.items():
            path = entry.path / name
            actual = path.stat().st_size if path.is_file() else None
            if actual != num_bytes:
                state = "is missing" if actual is None else f"has {actual} bytes, not {num_bytes}"
                raise EngineBuildError(
                    f"the built engine '{key}' is damaged: {name} {state}; "
                    f"remove it with 'python -m engines engines remove {key}' and build it again"
                )
        return entry

    def holds(self, key: str) -> bool:
        """Return whether an engine is built and none of its files is missing or cut short."""
        try:
            return self.find(key) is not None
        except EngineBuildError:
            return False

    def remove(self, key: str) -> int:
        """Delete an engine and return the bytes that its files had.

        Raises:
            EngineBuildError: There is no such engine, or it is being built.
        """
        entry = self._read(self.root / key) if re.fullmatch(r"[a-z0-9-]+", key) else None
        if entry is None:
            known = ", ".join(entry.key for entry in self.entries()) or "none"
            raise EngineBuildError(f"there is no built engine '{key}'; built are: {known}")
        with self.lock(key), self._writing():
            # Without its manifest it is no engine, should the rest be interrupted.
            (entry.path / MANIFEST).unlink()
            shutil.rmtree(entry.path)
        return entry.num_bytes

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the lock of one engine.

        Raises:
            EngineBuildError: Another process or tab holds it.
        """
        locks = self.root / ".locks"
        # thread_local=False: a generator may be closed by another thread than it was begun on.
        lock = FileLock(locks / f"{key}.lock", timeout=0, thread_local=False)
        with self._writing():
            locks.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except Timeout as exc:
                raise EngineBuildError(
                    f"'{key}' is being built or removed already; try again when that has ended"
                ) from exc
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def aside(self, key: str) -> Iterator[Path]:
        """Lend an empty folder to build in; it is gone afterwards unless it was committed.

        The caller holds the lock, so what an earlier, killed build left for this key goes first.
        """
        for leftover in self.root.glob(f"{_ASIDE}{key}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folder = self.root / f"{_ASIDE}{key}-{os.getpid()}"
        with self._writing():
            folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def commit(
        self, folder: Path, *, key: str, name: str, identity: Mapping[str, Any]
    ) -> StoreEntry:
        """Write the manifest of a finished folder and rename it into place.

        The folder is the one lent, or one inside it.
        """
        files = {
            str(path.relative_to(folder)): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        manifest = {
            "manifest_version": MANIFEST_VERSION,
            "name": name,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "identity": dict(identity),
            "files": files,
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        target = self.root / key
        if target.exists():  # damaged, or without a manifest: a whole one is never rebuilt
            shutil.rmtree(target)
        folder.rename(target)
        entry = self._read(target)
        if entry is None:
            raise EngineBuildError(f"the built engine '{key}' could not be read back")
        return entry

    def _read(self, folder: Path) -> StoreEntry | None:
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if manifest["manifest_version"] != MANIFEST_VERSION:
                return None
            return StoreEntry(
                key=folder.name,
                path=folder,
                name=str(manifest["name"]),
                created=str(manifest["created"]),
                identity=dict(manifest["identity"]),
                files={str(name): int(size) for name, size in manifest["files"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not ours, or damaged
            return None

    def _writing(self) -> AbstractContextManager[None]:
        remedy = f"set {STORE_VARIABLE} to a folder that can"
        return translate_errors(
            f"the engine store '{self.root}' cannot be written ({remedy})",
            {OSError: EngineBuildError},
        )
