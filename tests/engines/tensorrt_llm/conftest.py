"""A machine with the fake TensorRT-LLM, a tiny pair, a store, and the back end over it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from engines.config import EngineConfig, TensorRTOptions
from engines.slot import EngineSlot
from engines.store import EngineStore
from engines.tensorrt_llm_backend.backend import TensorRTBackend
from engines.tensorrt_llm_backend.gpus import VISIBLE
from engines.tensorrt_llm_backend.installation import PYTHON_VARIABLE
from tests.fake_tensorrt_llm.scenario import Scenario
from tests.fake_tensorrt_llm.site import FakeInstall, write_site

MAX_SEQ_LEN = 200
PLAIN = Scenario()


class Install(Protocol):
    def __call__(self, scenario: Scenario = ...) -> FakeInstall: ...


class MakeConfig(Protocol):
    def __call__(
        self, *, draft: str | Path | None = ..., target: str | Path = ..., **options: Any
    ) -> EngineConfig: ...


def write_program(file: Path, lines: str) -> Path:
    """Write a program in the shell's language: a python or an nvidia-smi as a test wants it."""
    file.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
    file.chmod(0o755)
    return file


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put an installation on this machine; a later one takes the place of an earlier."""
    num_installed = 0
    path_before = os.environ["PATH"]

    def install(scenario: Scenario = PLAIN) -> FakeInstall:
        nonlocal num_installed
        num_installed += 1
        fake = write_site(tmp_path / f"install-{num_installed}", scenario)
        monkeypatch.setenv("PATH", f"{fake.bin}{os.pathsep}{path_before}")
        monkeypatch.setenv(PYTHON_VARIABLE, str(fake.python))
        monkeypatch.delenv(VISIBLE, raising=False)
        return fake

    return install


@pytest.fixture
def make_config(tiny_target: Path, tiny_draft: Path) -> MakeConfig:
    """Make the config of the tiny pair, or of another draft, with these TensorRTOptions."""

    def make_config(
        *, draft: str | Path | None = tiny_draft, target: str | Path = tiny_target, **options: Any
    ) -> EngineConfig:
        given = TensorRTOptions(**{"max_seq_len": MAX_SEQ_LEN, **options})
        return EngineConfig(
            "tensorrt_llm",
            target=str(target),
            draft=None if draft is None else str(draft),
            tensorrt_llm=given,
        )

    return make_config


@pytest.fixture
def backend(store: EngineStore) -> TensorRTBackend:
    return TensorRTBackend(store)


@pytest.fixture
def slot(backend: TensorRTBackend) -> Iterator[EngineSlot]:
    """A slot over that back end: it builds and loads. What it has loaded is closed behind."""
    slot = EngineSlot(lambda name: backend)
    yield slot
    slot.close()
