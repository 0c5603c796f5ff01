"""Tiny models: arithmetic ones for the loop, random Llamas on disk for transformers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = (
    ""  # identical output is promised in float32, which is the CPU's
)

import numpy as np
import pytest

from engines.base import Engine
from engines.config import BUNDLED_DRAFT, EngineConfig
from engines.environment import usable_cpus
from engines.generation import Vocabulary
from engines.sampling import token_probs
from engines.slot import EngineSlot
from engines.store import EngineStore

VOCAB_SIZE = 8
STOP_ID = 7


@pytest.fixture(autouse=True)
def few_threads(request: pytest.FixtureRequest) -> None:
    """Run tiny models on one thread, where two would wait for each other; the bundled on all."""
    if torch := sys.modules.get("torch"):
        is_large = request.node.get_closest_marker("bundled") is not None
        torch.set_num_threads(usable_cpus() if is_large else 1)


class TableModel:
    """A `CachedModel` whose next-token logits are a table over the last two tokens.

    It counts its passes and holds what it has read, so that a test can look at the cache.
    """

    def __init__(self, table: np.ndarray) -> None:
        self.table = table  # [vocab_size, vocab_size, vocab_size]: last, last but one, next
        self.token_ids: list[int] = []
        self.num_passes = 0

    @classmethod
    def random(cls, seed: int, *, scale: float = 2.0, vocab_size: int = VOCAB_SIZE) -> TableModel:
        shape = (vocab_size, vocab_size, vocab_size)
        table = np.random.default_rng(seed).normal(size=shape) * scale
        return cls(table.astype(np.float32))

    @property
    def num_cached_tokens(self) -> int:
        return len(self.token_ids)

    def forward(self, token_ids: Sequence[int], *, num_logits: int) -> np.ndarray:
        assert len(token_ids) > 0
        self.num_passes += 1
        rows = []
        for token_id in token_ids:
            before = self.token_ids[-1] if self.token_ids else 0
            self.token_ids.append(token_id)
            rows.append(self.table[token_id, before])
        self._logits = np.stack(rows[-num_logits:])
        return self._logits

    def token_probs(self, rows: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        return token_probs(self._logits, rows, token_ids)

    def truncate(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.token_ids)
        del self.token_ids[num_tokens:]

    def synchronize(self) -> None:
        """Its passes are over when they return."""


@pytest.fixture
def letters() -> Vocabulary:
    """A vocabulary of the letters a to h, in which h stops and is a control token."""
    return Vocabulary(
        decode=lambda ids: "".join(chr(ord("a") + id_) for id_ in ids),
        stop_token_ids=frozenset({STOP_ID}),
        control_token_ids=frozenset({STOP_ID}),
    )


def write_tiny_model(
    folder: Path, *, seed: int, num_layers: int = 2, vocab_size: int = 320, **settings: Any
) -> Path:
    """Write a random Llama with a byte-level tokenizer as a checkpoint folder.

    Its heads have 8 dimensions, which only transformers runs, unless the settings say otherwise.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id_ for id_, token in enumerate(["<s>", "</s>", *byte_tokens])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "<s>{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    torch.manual_seed(seed)
    usual = {
        "vocab_size": vocab_size,  # padded behind the tokenizer's 258 entries, as real ones are
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config = LlamaConfig(**usual | settings)
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-target", seed=1)


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-draft", seed=2, num_layers=1)


def load_engine(config: EngineConfig) -> Engine:
    """Build and load an engine, outside any page."""
    return EngineSlot().load(config)


@pytest.fixture(scope="session")
def tiny_engine(tiny_target: Path, tiny_draft: Path) -> Iterator[Engine]:
    with load_engine(EngineConfig(target=str(tiny_target), draft=str(tiny_draft))) as engine:
        yield engine


@pytest.fixture(scope="session")
def bundled_engine() -> Iterator[Engine]:
    """The bundled pair, from the user's own store: converted once, not per test run."""
    with load_engine(EngineConfig(draft=BUNDLED_DRAFT)) as engine:
        yield engine


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    return EngineStore(tmp_path / "store")
