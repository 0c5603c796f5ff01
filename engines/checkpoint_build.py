"""How a checkpoint becomes a folder that can be loaded: fetched, verified, converted, stored."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from engines import bundled, gguf_files
from engines.building import Stage, build_into_store
from engines.checkpoints import (
    Reference,
    built_path,
    bundled_key,
    gguf_identity,
    hash_file,
    needed_references,
    stored_key,
)
from engines.child import child_lines, own_module
from engines.errors import EngineBuildError, ModelNotBuiltError, translate_errors
from engines.packages import WITH_TORCH, missing_packages
from engines.packed import packed_identity
from engines.store import EngineStore, engine_key

BYTES_PER_WEIGHT = 4  # float32


def checkpoint_stages(
    references: Iterable[Reference], store: EngineStore, cleanup: ExitStack
) -> list[Stage]:
    """Return what there is to do until models can be read, what they need included, once each.

    Args:
        references: The models.
        store: Where converted checkpoints go.
        cleanup: Gets the locks and folders that outlive a stage.
    """
    needed = (part for reference in references for part in needed_references(reference))
    return [
        stage
        for reference in dict.fromkeys(needed)
        for stage in _stages_of(reference, store, cleanup)
    ]


def _stages_of(reference: Reference, store: EngineStore, cleanup: ExitStack) -> list[Stage]:
    """Return what there is to do for one model: nothing for a folder."""
    match reference.source:
        case "folder":
            return []
        case "hub":
            return [Stage(f"fetch {reference.name}", partial(fetch_from_hub, reference, store))]
        case "packed":
            return PackedBuild(reference, store).stages()
        case "bundled" | "gguf":
            return GgufBuild(reference, store, cleanup).stages()


def hub_lines(reference: Reference, *options: str) -> Generator[str | None, None, None]:
    """Download a Hub model, or what options of `engines.fetch` leave of it, yielding its lines.

    Raises:
        EngineBuildError: It cannot be had.
    """
    revision = ["--revision", reference.revision] if reference.revision else []
    yield from child_lines(
        own_module("engines.fetch", str(reference.repo), *revision, *options),
        action=f"'{reference.text}' cannot be fetched",
    )


def fetch_from_hub(reference: Reference, store: EngineStore) -> Generator[str | None, None, None]:
    """Download what is missing of a Hub model, yielding log lines.

    Raises:
        EngineBuildError: It cannot be had, and there is no earlier copy either.
    """
    try:
        yield from hub_lines(reference)
    except EngineBuildError as exc:
        try:
            path = built_path(reference, store)
        except ModelNotBuiltError:
            raise exc from None
        yield f"{exc}; going on with the copy in {path}"


class GgufBuild:
    """A GGUF file, the bundled one or the user's, on its way into the store.

    The lock and the folder it builds in are handed to `cleanup`, which outlives the stages.
    """

    def __init__(self, reference: Reference, store: EngineStore, cleanup: ExitStack) -> None:
        self._reference = reference
        self._store = store
        self._cleanup = cleanup
        self._is_bundled = reference.source == "bundled"
        self._source = reference.path
        self._sha256 = bundled.GGUF_SHA256 if self._is_bundled else None

    def stages(self) -> list[Stage]:
        """Return what is left to do."""
        name = self._reference.name
        if self._is_bundled:
            if self._store.holds(bundled_key()):
                return []
            return [
                Stage(f"fetch {name}", self._fetch),
                Stage(f"verify {name}", self._verify),
                Stage(f"convert {name}", self._convert),
            ]
        return [Stage(f"hash {name}", self._hash), Stage(f"convert {name}", self._convert)]

    def _fetch(self) -> Generator[str | None, None, None]:
        # A folder of its own: the copy is gone with the build, the converted checkpoint stays.
        key = f"download-{bundled_key()}"
        self._cleanup.enter_context(self._store.lock(key))
        folder = self._cleanup.enter_context(self._store.aside(key))
        with translate_errors(f"{bundled.GGUF_FILE} cannot be stored", {OSError: EngineBuildError}):
            yield from bundled.fetch(folder)
        self._source = folder / bundled.GGUF_FILE

    def _verify(self) -> Generator[str | None, None, None]:
        assert self._source is not None
        yield None
        bundled.verify(self._source)
        yield f"SHA-256 {bundled.GGUF_SHA256}"

    def _hash(self) -> Generator[str | None, None, None]:
        assert self._source is not None
        for digest in hash_file(self._source):
            self._sha256 = digest
            yield None
        yield f"SHA-256 {self._sha256}"

    def _convert(self) -> Generator[str | None, None, None]:
        assert self._source is not None
        assert self._sha256 is not None
        source = self._source
        identity = gguf_identity(self._sha256)
        yield from build_into_store(
            self._store,
            self._reference.name,
            engine_key(self._reference.name, identity),
            identity,
            num_bytes=lambda: gguf_files.num_weights(source) * BYTES_PER_WEIGHT,
            command=lambda folder: own_module(_converter_of(source), str(source), str(folder)),
            action=f"converting {source.name}",
        )


class PackedBuild:
    """A draft that is shipped without its target's embeddings, on its way into the store."""

    def __init__(self, reference: Reference, store: EngineStore) -> None:
        self._reference = reference
        self._store = store

    def stages(self) -> list[Stage]:
        """Return what is left to do. The target is built before."""
        if self._store.holds(stored_key(self._reference)):
            return []
        return [Stage(f"unpack {self._reference.name}", self._unpack)]

    def _unpack(self) -> Generator[str | None, None, None]:
        packed = self._reference.path
        assert packed is not None
        target = built_path(needed_references(self._reference)[0], self._store)
        yield from build_into_store(
            self._store,
            self._reference.name,
            stored_key(self._reference),
            packed_identity(packed),
            num_bytes=lambda: 2 * sum(path.stat().st_size for path in target.glob("*.safetensors")),
            command=lambda folder: own_module(
                "engines.unpacking", str(packed), str(target), str(folder)
            ),
            action=f"unpacking {self._reference.name}",
        )


def _converter_of(gguf: Path) -> str:
    """Return the module that converts a file.

    Raises:
        EngineBuildError: It cannot be read, or only PyTorch could, which is not installed.
    """
    if gguf_files.is_plain_llama(gguf):
        return "engines.gguf_conversion"
    if missing := missing_packages(("torch", "accelerate")):
        raise EngineBuildError(
            f"'{gguf.name}' is not a plain Llama, and others are converted with "
            f"{' and '.join(missing)}: run '{WITH_TORCH}'"
        )
    return "engines.transformers_backend.convert"
