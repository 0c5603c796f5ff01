"""The student: copies of some layers, the target's own embeddings and head, a normal checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, Qwen2Config

from engines.distill.student import (
    check_architecture,
    make_student,
    save_student,
    trained_parameters,
)
from engines.errors import IncompatibleModelsError
from tests.engines.distill.conftest import float32_model

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "scaled positions": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    },
    "wide heads": {"head_dim": 16},
}
TEXT = torch.randint(0, 258, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=VARIANTS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
        **VARIANTS[request.param],
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # or norms and biases would be all alike
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * 0.3
    model.save_pretrained(tmp_path / "target")
    return float32_model(tmp_path / "target")


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(TEXT).logits
    return logits


def test_a_student_of_all_layers_is_the_target(target: Any):
    student = make_student(target, range(4))

    torch.testing.assert_close(logits_of(student), logits_of(target))


def test_a_student_of_some_layers_skips_the_others(target: Any):
    student = make_student(target, (3, 1))

    hidden = target.model.embed_tokens(TEXT)
    rotary = target.model.rotary_emb(hidden, torch.arange(TEXT.shape[1])[None])
    length = TEXT.shape[1]
    mask = torch.full((1, 1, length, length), float("-inf")).triu(1)
    with torch.no_grad():
        for layer in (3, 1):
            hidden = target.model.layers[layer](
                hidden, attention_mask=mask, position_embeddings=rotary
            )
        expected = target.lm_head(target.model.norm(hidden))

    torch.testing.assert_close(logits_of(student), expected, rtol=1e-4, atol=1e-4)


def test_what_is_trained_is_a_copy_and_what_is_frozen_is_shared(target: Any):
    student = make_student(target, (0, 2, 3))
    trained = trained_parameters(student)

    assert student.model.embed_tokens.weight is target.model.embed_tokens.weight
    assert student.lm_head.weight is target.lm_head.weight
    assert {id(parameter) for parameter in trained.values()} == {
        id(parameter) for parameter in student.parameters() if parameter.requires_grad
    }
    for index, layer in enumerate((0, 2, 3)):
        copies = dict(student.model.layers[index].named_parameters())
        for name, parameter in target.model.layers[layer].named_parameters():
            assert torch.equal(copies[name], parameter)
            assert copies[name].data_ptr() != parameter.data_ptr()
            assert trained[f"model.layers.{index}.{name}"] is copies[name]
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert target.config.num_hidden_layers == 4


def test_a_saved_student_loads_as_a_checkpoint_of_its_own(target: Any, tmp_path: Path):
    student = make_student(target, (0, 3))
    save_student(student, tmp_path / "draft")

    loaded = float32_model(tmp_path / "draft")  # refuses what lacks a weight

    assert loaded.config.num_hidden_layers == 2
    assert loaded.config.tie_word_embeddings == target.config.tie_word_embeddings
    weights, expected = loaded.state_dict(), student.state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name].bfloat16().float(), rtol=0, atol=0)
    student.load_state_dict(weights)  # what rounding to bfloat16 has left of them
    torch.testing.assert_close(logits_of(loaded), logits_of(student))


@pytest.mark.parametrize("config", [GPT2Config(), Qwen2Config()], ids=["gpt2", "qwen2"])
def test_other_architectures_are_refused_by_name(config: Any):
    told = f"^'other' cannot be distilled: it is a '{config.model_type}' model, and drafts are made"
    with pytest.raises(IncompatibleModelsError, match=told):
        check_architecture(config, "other")


def test_a_llama_is_not_refused():
    check_architecture(LlamaConfig(), "llama")
