"""Families whose caches differ: plain as transformers says, speculative as plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines import EngineConfig, GenerationRequest, stats_of
from tests.conftest import load_engine

NUM_IDS = 258  # the tiny tokenizer's
SIZES: dict[str, Any] = {
    "vocab_size": NUM_IDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def make_model(family: str) -> Any:
    import transformers as tf

    match family:
        case "sliding window":
            return tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=8))
        case "sliding window in some layers":
            layers = ["sliding_attention", "full_attention"]
            config = tf.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8, layer_types=layers)
            return tf.Gemma3ForCausalLM(config)
        case "biased attention":
            return tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES))
        case "learned positions":
            return tf.GPT2LMHeadModel(
                tf.GPT2Config(
                    vocab_size=NUM_IDS,
                    n_embd=32,
                    n_layer=2,
                    n_head=4,
                    initializer_range=0.4,
                    bos_token_id=0,
                    eos_token_id=1,
                )
            )
    raise AssertionError(family)


@pytest.mark.parametrize(
    "family",
    ["sliding window", "sliding window in some layers", "biased attention", "learned positions"],
)
@pytest.mark.parametrize("prompt", ["hello", "a prompt of two chunks " * 14], ids=["short", "long"])
def test_every_family_says_the_same_with_and_without_a_draft(
    family: str, prompt: str, tiny_target: Path, tmp_path: Path
):
    import torch
    from transformers import AutoTokenizer

    torch.manual_seed(3)
    target, draft = tmp_path / "target", tmp_path / "draft"
    model = make_model(family).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    ids = tokenizer(prompt).input_ids
    reference = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=48,
    )[0, len(ids) :].tolist()
    with torch.no_grad():  # a draft that agrees now and then
        for weights in model.parameters():
            weights.add_(torch.randn_like(weights) * weights.std() * 0.03)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)

    with load_engine(EngineConfig(target=str(target), draft=str(draft))) as engine:
        plain = stats_of(engine.generate(GenerationRequest(tuple(ids), max_new_tokens=48)))
        assert plain.output_token_ids == reference
        for num_draft_tokens in (1, 3, 8):
            request = GenerationRequest(tuple(ids), "model", num_draft_tokens, 48)
            drafted = stats_of(engine.generate(request))
            assert drafted.output_token_ids == reference
            assert drafted.acceptance_rate is not None
            assert 0 < drafted.acceptance_rate <= 1
