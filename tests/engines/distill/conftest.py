"""Small targets that a distillation is over with in seconds: one plain, one that chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.distill.script import Script, script_of
from engines.tokenizer import load_tokenizer, vocabulary_of
from engines.transformers_backend.model import load_model
from tests.conftest import write_tiny_model

NUM_LAYERS = 4
NUM_IDS = 260  # of the tokenizer that chats: a byte each, <s>, </s>, and what marks turns
CHATML = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nHelp.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


@pytest.fixture(autouse=True)
def few_threads_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a child run its tiny models on one thread too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def write_chat_model(folder: Path, *, seed: int, vocab_size: int = NUM_IDS) -> Path:
    """Write a tiny target that ends its turns with a token of its own."""
    write_tiny_model(folder, seed=seed, num_layers=NUM_LAYERS, vocab_size=vocab_size)
    tokenizer = load_tokenizer(folder, name="chat")
    tokenizer.add_special_tokens(
        {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    path = folder / "generation_config.json"
    settings = {**json.loads(path.read_text()), "eos_token_id": tokenizer.eos_token_id}
    path.write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def plain_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "plain-target"
    return write_tiny_model(folder, seed=2, num_layers=NUM_LAYERS, vocab_size=258)


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "chat-target", seed=3)


def script_in(folder: Path) -> tuple[Any, Script]:
    """Return a checkpoint's tokenizer and how it talks to itself."""
    tokenizer = load_tokenizer(folder, name=folder.name)
    return tokenizer, script_of(tokenizer, vocabulary_of(tokenizer, folder).stop_token_ids)


def float32_model(folder: Path) -> Any:
    import torch

    return load_model(
        folder, name=folder.name, dtype=torch.float32, device=torch.device("cpu")
    ).requires_grad_(False)
