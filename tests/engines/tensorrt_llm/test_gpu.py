"""On a machine that has TensorRT-LLM: the bundled pair says there what it says on PyTorch."""

from __future__ import annotations

import pytest

from engines.backends import create_backend
from engines.self_test import self_test
from engines.slot import EngineSlot
from engines.tensorrt_llm_backend.gpus import VISIBLE


@pytest.mark.gpu
@pytest.mark.bundled
def test_the_bundled_pair_says_what_it_says_on_pytorch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VISIBLE, raising=False)
    status = create_backend("tensorrt_llm").probe()
    if not status.usable:
        pytest.skip(status.detail)

    tests = self_test(["tensorrt_llm", "transformers"], EngineSlot(), lambda progress: None)

    assert [test for test in tests if not test.passed] == []
