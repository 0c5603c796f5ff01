"""Captured passes: the same logits, padded ones too, the same output, and the way back without.

On a CPU a captured pass is a plain call over the same buffers; on CUDA it is a graph.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from engines.benchmark import RunEvent, WarmUp, run
from engines.config import DraftKind, GenerationRequest, SamplingParams
from engines.events import Step
from engines.stats import stats_of
from engines.transformers_backend import captured
from engines.transformers_backend.captured import (
    CapturedModel,
    CapturedPasses,
    NotCapturedError,
    require_same,
    why_not_captured,
)
from engines.transformers_backend.engine import CAPACITY_STEP, TransformersEngine
from engines.transformers_backend.model import TransformersModel
from tests.engines.transformers.conftest import ask
from tests.engines.transformers.models import IDS, SIZES, llama, qwen2, qwen3


@pytest.mark.parametrize("make", [llama, qwen2, qwen3])
@pytest.mark.parametrize("sizes", [(), (1,), (1, 5)], ids=["none", "one", "one and five"])
def test_passes_say_what_transformers_says_whatever_is_captured(make, sizes):
    model = make()
    usual, passes = TransformersModel(model, vocab_size=60), CapturedPasses(model, capacity=64)
    for size in sizes:
        passes.capture(size)
    ours = CapturedModel(passes, vocab_size=60)
    at = 0
    for num_tokens, num_kept in ((7, 7), (1, 1), (5, 2), (3, 3), (1, 1), (4, 1)):
        part = IDS[at : at + num_tokens]
        expected = usual.forward(part, num_logits=num_tokens)
        actual = ours.forward(part, num_logits=num_tokens)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        at += num_kept
        usual.truncate(at)
        ours.truncate(at)
        assert ours.num_cached_tokens == at


def test_another_sequence_sees_nothing_of_the_one_before():
    passes = CapturedPasses(llama(), capacity=64)
    passes.capture(5)
    first = CapturedModel(passes, vocab_size=60).forward(IDS[:5], num_logits=5).clone()
    CapturedModel(passes, vocab_size=60).forward(IDS[10:15], num_logits=5)
    again = CapturedModel(passes, vocab_size=60).forward(IDS[:5], num_logits=5)
    assert torch.equal(first, again)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_captured_pass_is_compared_with_a_usual_one(num_tokens, monkeypatch):
    model = llama()
    passes = CapturedPasses(model, capacity=64)
    passes.capture(num_tokens)
    require_same(model, passes, num_tokens)
    monkeypatch.setitem(captured.MAX_DEVIATION, torch.float32, -1.0)
    with pytest.raises(NotCapturedError, match="a captured pass differs by"):
        require_same(model, passes, num_tokens)


def test_attention_is_as_before_once_a_pass_has_ended():
    model = llama()
    before = model.config._attn_implementation
    passes = CapturedPasses(model, capacity=64)
    passes.capture(1)
    passes.read(IDS[:3], 0)
    assert model.config._attn_implementation == before


# -- which models


def test_full_attention_is_captured():
    assert why_not_captured(llama()) is None
    assert why_not_captured(qwen2()) is None


def test_a_window_is_not_captured_and_says_so():
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8))
    assert "attend to a window" in str(why_not_captured(model))


def test_layers_of_another_build_are_not_captured_and_say_so():
    model = llama()
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    assert "not built like a Llama's (LlamaForCausalLM)" in str(why_not_captured(model))


# -- the engine, as it is on CUDA


def steps(engine: TransformersEngine, asked: GenerationRequest) -> list[tuple[Any, ...]]:
    """Return what each step decided and said, without its times."""
    return [
        (step.tokens, step.rejected) for step in engine.generate(asked) if isinstance(step, Step)
    ]


@pytest.mark.parametrize("kind", ["model", "prompt_lookup"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_events_are_those_without_capture(engine, kind: DraftKind, temperature: float):
    asked = ask(engine, kind, 3, sampling=SamplingParams(temperature, seed=4))
    usual = steps(engine, asked)
    list(engine.prepare(asked))
    assert isinstance(engine.open_target(40), CapturedModel)
    ours = steps(engine, asked)
    assert [[token.id for token in step[0]] for step in ours] == [
        [token.id for token in step[0]] for step in usual
    ]
    for (tokens, rejected), (expected, dropped) in zip(ours, usual, strict=True):
        for token, other in zip((*tokens, *rejected), (*expected, *dropped), strict=True):
            assert (token.id, token.origin, token.uniform) == (
                other.id,
                other.origin,
                other.uniform,
            )
            assert token.target_prob == pytest.approx(other.target_prob, abs=1e-4)


@pytest.mark.parametrize("number", range(1, 9))
def test_greedy_output_is_the_targets_own(engine, number: int):
    outputs = []
    for asked in (ask(engine, "model", number), ask(engine, "none", 0)):
        list(engine.prepare(asked))
        outputs.append(stats_of(engine.generate(asked)).output_token_ids)
    assert outputs[0] == outputs[1]


def test_passes_are_captured_once_and_told(engine):
    asked = ask(engine, "model", 3)
    first = [message for message in engine.prepare(asked) if message]
    assert [message.split(" in ")[0] for message in first] == [
        "captured passes of the target over 1 token(s)",
        "captured passes of the target over 4 token(s)",
        "captured passes of the draft over 1 token(s)",
        "captured passes of the draft over 2 token(s)",
    ]
    assert not list(engine.prepare(asked))
    plain = [message for message in engine.prepare(asked.plain()) if message]
    assert [message.split(" in ")[0] for message in plain] == [
        "captured rounds of 0 draft token(s)"
    ]
    assert not list(engine.prepare(asked.plain()))


def test_a_longer_run_gets_a_larger_cache(engine):
    list(engine.prepare(ask(engine, "none", 0)))
    assert engine._captured["target"].capacity == CAPACITY_STEP
    assert not isinstance(engine.open_target(CAPACITY_STEP + 1), CapturedModel)


def test_a_run_says_what_it_captures_before_it_begins(engine):
    items = list(run(engine, ask(engine, "model", 2), baseline=True))
    first_event = next(i for i, item in enumerate(items) if isinstance(item, RunEvent))
    told = [item.message for item in items[:first_event] if isinstance(item, WarmUp)]
    assert any(message and message.startswith("captured") for message in told)
    later = [item for item in items[first_event:] if isinstance(item, WarmUp)]
    assert not any(item.message for item in later)


@pytest.mark.parametrize(
    "error", [NotCapturedError("it moves"), torch.cuda.OutOfMemoryError("CUDA out of memory.\nx")]
)
def test_where_capturing_fails_the_run_goes_on_without_and_says_why(engine, monkeypatch, error):
    def fail(self: Any, num_tokens: int) -> None:
        raise error

    monkeypatch.setattr(CapturedPasses, "capture", fail)
    asked = ask(engine, "model", 3)
    usual = steps(engine, asked)
    assert list(engine.prepare(asked))[-1] == engine.info.notes[0]
    assert engine.info.notes[0].startswith("CUDA graphs are not used, which is slower: ")
    assert not isinstance(engine.open_target(10), CapturedModel)
    assert steps(engine, asked) == usual
    assert not list(engine.prepare(asked))
