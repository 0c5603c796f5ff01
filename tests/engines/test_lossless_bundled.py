"""Lossless on a real model: speculative output equals plain output, id for id, in float32.

Ten prompts of different kinds, 64 new tokens, four draft lengths, prompt lookup, the bundled draft,
and a draft model that is nearly always wrong. It takes several minutes on two cores: it is the
project's first promise.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines import Engine, EngineConfig, GenerationRequest, SamplingParams, Step, stats_of
from engines.checkpoints import built_path, parse_reference
from engines.store import EngineStore
from tests.conftest import load_engine

pytestmark = pytest.mark.bundled

NEW_TOKENS = 64
PROMPTS = {
    "code": "Write a Python function that checks if a number is prime.",
    "facts": "List the planets of the solar system, one a line, each with one fact about it.",
    "story": "Tell the beginning of a story about a clock that runs backwards.",
    "repeat": "Repeat this three times: the ship sails at dawn, and the tide waits for none.",
    "arithmetic": "A train runs 60 miles an hour for two and a half hours. How far does it go?",
    "translation": "Translate into French: Good morning, where is the station?",
    "markup": "Write an HTML page with a heading, a list of three fruits and a link.",
    "letters": "Schreibe drei Sätze über den Frühling in München. 🙂",
    "summary": "Summarise in one sentence: bees visit flowers for nectar, carry pollen from one to "
    "the next, and so make sure that fruit can grow.",
    "email": "Write a short email that asks a landlord to repair a leaking tap.",
}


@pytest.fixture(scope="module")
def engine(bundled_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The bundled target with a tiny random draft of its vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder: Path = tmp_path_factory.mktemp("models") / "random-draft"
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=8192,
        )
    ).save_pretrained(folder)
    target = built_path(parse_reference("bundled"), EngineStore())
    for file in target.glob("tokenizer*"):
        shutil.copy(file, folder)
    with load_engine(EngineConfig(draft=str(folder))) as engine:
        yield engine


@pytest.mark.parametrize("kind", PROMPTS)
def test_the_bundled_draft_leaves_the_output_as_it_is(bundled_engine, kind):
    """Its passes are of another dtype where that pays; the target's are not."""
    prompt = bundled_engine.encode(PROMPTS[kind], chat_template=True)
    plain = GenerationRequest(prompt, max_new_tokens=NEW_TOKENS)
    expected = stats_of(bundled_engine.generate(plain)).output_token_ids
    for num_draft_tokens in (1, 2, 4, 8):
        request = GenerationRequest(prompt, "model", num_draft_tokens, NEW_TOKENS)
        stats = stats_of(bundled_engine.generate(request))
        assert stats.output_token_ids == expected, f"num_draft_tokens {num_draft_tokens}"
        assert stats.acceptance_rate


@pytest.mark.parametrize("kind", PROMPTS)
def test_speculative_output_equals_plain_output(engine, kind):
    prompt = engine.encode(PROMPTS[kind], chat_template=True)
    plain = GenerationRequest(prompt, max_new_tokens=NEW_TOKENS)
    expected = stats_of(engine.generate(plain)).output_token_ids
    assert len(expected) > 1
    for draft_kind in ("prompt_lookup", "model"):
        for num_draft_tokens in (1, 2, 4, 8):
            request = GenerationRequest(prompt, draft_kind, num_draft_tokens, NEW_TOKENS)
            actual = stats_of(engine.generate(request)).output_token_ids
            assert actual == expected, f"{draft_kind}, num_draft_tokens {num_draft_tokens}"


def test_the_same_seed_draws_the_same_trace(engine):
    def trace(seed):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        prompt = engine.encode(PROMPTS["story"], chat_template=True)
        request = GenerationRequest(prompt, "model", 2, 12, sampling)
        return [
            [(token.id, token.origin, token.uniform) for token in step.tokens_in_place]
            for step in engine.generate(request)
            if isinstance(step, Step)
        ]

    first = trace(0)
    assert trace(0) == first
    assert trace(1) != first
