"""check_references: models as the user names them, by their small files, wherever those are."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from engines import bundled
from engines.checkpoint_build import hub_lines
from engines.checkpoints import (
    Reference,
    built_path,
    hub_folder,
    needed_references,
    parse_reference,
)
from engines.child import PROGRESS_PREFIX
from engines.config import EngineConfig
from engines.errors import ModelLoadError, ModelNotBuiltError, translate_errors
from engines.gguf_files import header_config
from engines.pairs.compatibility import PairReport, check_pair
from engines.pairs.profile import ModelProfile, TokenizerProfile, read_config
from engines.small_files import (
    MAX_TOKENIZER_BYTES,
    SMALL_PATTERNS,
    TOKENIZER_FILES,
    require_small,
)
from engines.store import EngineStore

NUM_KEPT = 16  # profiles; one of a large vocabulary takes some 50 MB


def known_configs(
    config: EngineConfig, store: EngineStore
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None] | None:
    """Return the configurations of a pair, built or not; None where one is not on this machine.

    Raises:
        EngineError: One cannot be read.
    """
    references = [parse_reference(name) for name in (config.target, config.draft) if name]
    folders = [_config_folder(reference, store) for reference in references]
    found = [read_config(folder) for folder in folders if folder is not None]
    if len(found) < len(folders):
        return None
    return found[0], found[1] if len(found) > 1 else None


def _config_folder(reference: Reference, store: EngineStore) -> Path | None:
    match reference.source:
        case "folder" | "packed":
            return reference.path
        case "hub":
            return hub_folder(reference, SMALL_PATTERNS)
        case "bundled" | "gguf":
            try:
                return built_path(reference, store)
            except ModelNotBuiltError:
                return None


def check_references(
    target: str, draft: str, store: EngineStore, *, may_fetch: bool = True
) -> Generator[str | None, None, PairReport]:
    """Return what every rule says of a pair as the user names it, yielding lines meanwhile.

    Args:
        target: A model as the user names it.
        draft: Likewise.
        store: Where converted checkpoints lie.
        may_fetch: Small files that are not on this machine may be downloaded.

    Raises:
        EngineError: A model cannot be had or read.
    """
    profiles = []
    for reference in (parse_reference(target), parse_reference(draft)):
        profiles.append((yield from read_profile(reference, store, may_fetch=may_fetch)))
    return check_pair(*profiles)


def read_profile(
    reference: Reference, store: EngineStore, *, may_fetch: bool
) -> Generator[str | None, None, ModelProfile]:
    """Return what small files say of a model, yielding log lines while any are fetched.

    Raises:
        EngineError: It cannot be had or read.
    """
    match reference.source:
        case "folder":
            assert reference.path is not None
            return _of_folder(reference.path, reference.name)
        case "hub":
            folder = hub_folder(reference, SMALL_PATTERNS)
            if folder is None and not may_fetch:
                raise ModelNotBuiltError(
                    f"'{reference.text}' is not on this machine yet: 'Check the pair' fetches its "
                    "small files, and no weights"
                )
            if folder is None:
                yield f"fetching the small files of {reference.text}"
                for line in hub_lines(reference, "--small"):
                    yield None if line is None or line.startswith(PROGRESS_PREFIX) else line
                folder = hub_folder(reference, SMALL_PATTERNS)
            if folder is None:
                raise ModelLoadError(
                    f"'{reference.text}' was fetched and is not in the Hub's cache"
                )
            return _of_folder(folder, reference.name)
        case "packed":
            # A packed draft has its target's tokenizer.
            needed = needed_references(reference)[0]
            needed_profile = yield from read_profile(needed, store, may_fetch=may_fetch)
            assert reference.path is not None
            config = read_config(reference.path)
            return ModelProfile(reference.name, config, needed_profile.tokenizer)
        case "bundled" | "gguf":
            try:
                return _of_folder(built_path(reference, store), reference.name)
            except ModelNotBuiltError:
                file = bundled.local_copy() if reference.source == "bundled" else reference.path
                if file is None:
                    raise
                with translate_errors(f"'{file}' cannot be read", {OSError: ModelLoadError}):
                    status = file.stat()
                return _of_gguf(file, reference.name, status.st_size, status.st_mtime_ns)


def _of_folder(folder: Path, name: str) -> ModelProfile:
    """Return that of a checkpoint; loaded again only where the content of a file has changed."""
    digest = hashlib.sha256()
    for file in TOKENIZER_FILES:
        if (folder / file).is_file():
            require_small(folder / file, MAX_TOKENIZER_BYTES)
            digest.update(file.encode() + b" " + (folder / file).read_bytes())
    return _loaded(folder, name, digest.hexdigest())


@lru_cache(maxsize=NUM_KEPT)
def _loaded(folder: Path, name: str, digest: str) -> ModelProfile:
    return ModelProfile.load(folder, name=name)


@lru_cache(maxsize=NUM_KEPT)
def _of_gguf(file: Path, name: str, num_bytes: int, changed_ns: int) -> ModelProfile:
    from engines.tokenizer import LOAD_ERRORS, load_gguf_tokenizer

    with translate_errors(f"'{file.name}' cannot be read", LOAD_ERRORS):
        config, tokenizer = header_config(file), load_gguf_tokenizer(file)
    return ModelProfile(name, config, TokenizerProfile.of(tokenizer))
