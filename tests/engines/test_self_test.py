"""The self-test: what passes, what fails, and what each back end is told."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import pytest

from engines.base import Backend, BackendStatus, BuildProgress, Engine, EngineInfo
from engines.config import DraftKind, EngineConfig, GenerationRequest
from engines.errors import EngineBuildError
from engines.events import Finish, GenerationEvent, Prefill, Step, Token
from engines.self_test import NEAR_TIE, self_test
from engines.slot import EngineSlot

RIGHT = (5, 6, 7)


class SayingEngine(Engine):
    """Says the same ids whatever it is asked."""

    def __init__(self, token_ids: tuple[int, ...], gap: float) -> None:
        self.token_ids = token_ids
        self.gap = gap

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("saying", "target", "draft", "float32", "none", 100)

    @property
    def draft_kinds(self) -> tuple[DraftKind, ...]:
        return ("model", "none")

    def encode(self, prompt: str, *, chat_template: bool) -> tuple[int, ...]:
        return (1, 2)

    def generate(self, request: GenerationRequest) -> Generator[GenerationEvent, None, None]:
        yield Prefill(2, 1, 0.0)
        for id_ in self.token_ids:
            yield Step((Token(id_, str(id_), "target"),), (), 0, 0.0, 0.1, 0.1)
        yield Finish("stop", 0.1)

    def logit_gap(self, token_ids, first: int, second: int) -> float | None:
        assert (first, second) == (RIGHT[len(token_ids) - 2], self.wrong(len(token_ids) - 2))
        return self.gap

    def wrong(self, position: int) -> int:
        return 9

    def close(self) -> None:
        pass


@dataclass
class SayingBackend(Backend):
    token_ids: tuple[int, ...]
    gap: float = 0.0
    error: str = ""

    def probe(self, config: EngineConfig | None = None) -> BackendStatus:
        raise NotImplementedError

    def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
        raise NotImplementedError

    def load(self, config: EngineConfig) -> Engine:
        if self.error:
            raise EngineBuildError(self.error)
        return SayingEngine(self.token_ids, self.gap)


def results_of(other: SayingBackend, gap: float = 0.0) -> dict[str, tuple[bool, str]]:
    backends = {"transformers": SayingBackend(RIGHT, gap), "other": other}
    slot = EngineSlot(lambda name: backends[name])
    tests = self_test(list(backends), slot, lambda progress: None)
    return {test.backend: (test.passed, test.detail) for test in tests}


def test_the_same_ids_pass():
    results = results_of(SayingBackend(RIGHT))

    assert {name: passed for name, (passed, _) in results.items()} == {
        "transformers": True,
        "other": True,
    }
    assert "plain: the reference's 3 tokens" in results["other"][1]


@pytest.mark.parametrize(("gap", "passes"), [(NEAR_TIE / 2, True), (NEAR_TIE * 2, False)])
def test_another_id_passes_where_the_reference_nearly_chose_it(gap: float, passes: bool):
    passed, detail = results_of(SayingBackend((5, 9, 7)), gap)["other"]

    assert passed == passes
    assert f"parts from the reference at token 2, where its logits are {gap:.3f} apart" in detail


def test_an_output_that_ends_early_fails():
    passed, detail = results_of(SayingBackend((5, 6)))["other"]

    assert not passed
    assert "parts from the reference at token 3" in detail


def test_a_back_end_that_cannot_load_fails_with_its_sentence():
    results = results_of(SayingBackend((), error="there is no engine"))

    assert results["other"] == (False, "there is no engine")
    assert results["transformers"][0]


@pytest.mark.bundled
def test_the_reference_passes_on_the_bundled_pair():
    (test,) = self_test(["transformers"], EngineSlot(), lambda progress: None)

    assert test.passed
    assert test.detail.startswith("with drafts: the reference's")
