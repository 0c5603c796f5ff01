"""A machine with the fake library, and what its models say, told without it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.base import Engine
from engines.config import EngineConfig, GenerationRequest, TensorRTOptions
from engines.drafting import ModelProposer, NoProposer, PromptLookupProposer, Proposer
from engines.events import GenerationEvent, Step
from engines.generation import generate_events
from engines.sampling import token_probs
from engines.slot import EngineSlot
from engines.speculative import StepwiseRounds, decode
from engines.tensorrt_llm_backend.gpus import VISIBLE
from engines.tensorrt_llm_backend.installation import PYTHON_VARIABLE
from engines.tokenizer import load_tokenizer, vocabulary_of
from tests.engines.tensorrt_llm.conftest import MAX_SEQ_LEN
from tests.fake_tensorrt_llm.site import FILES, FakeInstall

NUM_TOKEN_IDS, VOCAB_SIZE = 258, 320  # of the tiny models: known to the tokenizer, and with padding
STOP_ID = 1


@contextmanager
def on_machine(fake: FakeInstall) -> Iterator[None]:
    """Put an installation on this machine, as the fixture `install` does in one test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{fake.bin}{os.pathsep}{os.environ['PATH']}")
        patch.setenv(PYTHON_VARIABLE, str(fake.python))
        patch.delenv(VISIBLE, raising=False)
        yield


def config_of(target: Path, draft: Path | None, **options: Any) -> EngineConfig:
    given = TensorRTOptions(**{"max_seq_len": MAX_SEQ_LEN, **options})
    return EngineConfig(
        "tensorrt_llm",
        target=str(target),
        draft=None if draft is None else str(draft),
        tensorrt_llm=given,
    )


def built_and_loaded(slot: EngineSlot, config: EngineConfig) -> Engine:
    """Return an engine, built also where another one of its models is there already."""
    list(slot.build(config))
    return slot.load(config)


@cache
def table(*, is_draft: bool = False) -> Any:
    """Return the arithmetic that the fake decodes the tiny target, or draft, with."""
    path = FILES / "trtllm_fake" / "table.py"
    spec = importlib.util.spec_from_file_location("table_of_the_fake", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TableModel(NUM_TOKEN_IDS, VOCAB_SIZE, is_draft)


def next_id(token_ids: Sequence[int], *, is_draft: bool = False) -> int:
    """Return the likeliest next token."""
    return int(table(is_draft=is_draft).logits(token_ids).argmax())


def continuation(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Return what the target says next when it is greedy, up to a stop."""
    text = list(token_ids)
    while len(text) < len(token_ids) + num_tokens and text[len(token_ids) :][-1:] != [STOP_ID]:
        text.append(next_id(text))
    return text[len(token_ids) :]


def repeating(token_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Return a text whose end was said before, so that prompt lookup finds what follows."""
    return (*token_ids, *continuation(token_ids, num_tokens), *token_ids)


def first_pair(is_wanted: Callable[[tuple[int, int]], bool]) -> tuple[int, int]:
    """Return two tokens behind which the models say what is wanted."""
    ids = range(2, NUM_TOKEN_IDS)
    return next(pair for pair in product(ids, ids) if is_wanted(pair))


@dataclass
class CachedTable:
    """That arithmetic as a model of our own loop."""

    is_draft: bool
    token_ids: list[int] = field(default_factory=list)

    @property
    def num_cached_tokens(self) -> int:
        return len(self.token_ids)

    def forward(self, token_ids: Sequence[int], *, num_logits: int) -> np.ndarray:
        rows = []
        for token_id in token_ids:
            self.token_ids.append(token_id)
            rows.append(table(is_draft=self.is_draft).logits(self.token_ids)[:NUM_TOKEN_IDS])
        self._logits = np.stack(rows[-num_logits:])
        return self._logits

    def token_probs(self, rows: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        return token_probs(self._logits, rows, token_ids)

    def truncate(self, num_tokens: int) -> None:
        del self.token_ids[num_tokens:]

    def synchronize(self) -> None:
        """It is done when it returns."""


def own_steps(request: GenerationRequest, target: Path) -> list[Step]:
    """Return the steps that our own loop makes of a request, with the fake's arithmetic."""
    proposers: dict[str, Proposer] = {
        "model": ModelProposer(CachedTable(is_draft=True)),
        "prompt_lookup": PromptLookupProposer(),
        "none": NoProposer(),
    }
    vocabulary = vocabulary_of(load_tokenizer(target, name="tiny"), target)
    assert vocabulary.stop_token_ids == {STOP_ID}
    rounds = decode(
        StepwiseRounds(CachedTable(is_draft=False), proposers[request.draft_kind], request),
        request,
        stop_token_ids=vocabulary.stop_token_ids,
        context_length=MAX_SEQ_LEN,
    )
    return steps_of(generate_events(rounds, request, vocabulary))


def steps_of(events: Iterator[GenerationEvent]) -> list[Step]:
    return [event for event in events if isinstance(event, Step)]


def told(steps: Sequence[Step]) -> list[list[tuple[int, str, str]]]:
    """Return the id, the text and the part of each token of each step."""
    return [
        [(token.id, token.text or token.control, token.origin) for token in step.tokens_in_place]
        for step in steps
    ]


def ids_of(engine: Engine, request: GenerationRequest) -> list[int]:
    return [token.id for step in steps_of(engine.generate(request)) for token in step.tokens]
