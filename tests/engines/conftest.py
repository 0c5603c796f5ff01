"""Machines as they may be: without the bundled target's file, or with a full disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub.constants
import pytest

from engines import bundled


@pytest.fixture
def no_bundled_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with no copy of the bundled target's file, whatever this one has."""
    monkeypatch.delenv(bundled.LOCAL_VARIABLE, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(bundled, "WHEEL_PACKAGE", "specdec_wheel_of_a_test")


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let writes beyond a size fail, as on a full disk, in this process and its children."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
