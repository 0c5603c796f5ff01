"""The library of a scenario inside the test's own process, and a pair of engines in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_tensorrt_llm.calls import Install, open_runner, save_engine
from tests.fake_tensorrt_llm.scenario import Scenario
from tests.fake_tensorrt_llm.site import FakeInstall, write_site


def forget_the_library() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tensorrt_llm", "trtllm_fake"):
            del sys.modules[name]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Make this process one that has the library of a scenario, until the test ends."""

    def make(scenario: Scenario) -> FakeInstall:
        folder = tmp_path / f"install-{len(list(tmp_path.iterdir()))}"
        fake = write_site(folder, scenario)
        forget_the_library()
        monkeypatch.syspath_prepend(fake.site)
        monkeypatch.setenv("SPECDEC_FAKE_TRTLLM", str(folder / "scenario.json"))
        monkeypatch.chdir(tmp_path)
        return fake

    yield make
    forget_the_library()


@pytest.fixture
def open_pair(tiny_target: Path, tiny_draft: Path, tmp_path: Path) -> Callable[..., Any]:
    """Build and open a draft and a target, both with the same changes to their settings."""

    def open_(**changes: Any) -> tuple[Any, Any]:
        draft = save_engine(tiny_draft, tmp_path / "draft", "NONE", **changes)
        target = save_engine(tiny_target, tmp_path / "target", "DRAFT_TOKENS_EXTERNAL", **changes)
        return open_runner(draft), open_runner(target)

    return open_
