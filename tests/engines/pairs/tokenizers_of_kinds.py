"""Tiny tokenizers of every kind, made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast

WORDS = ("<s>", "</s>", "<unk>", "h", "i", "hi", "cat", "dog", "<unused0>", "<unused1>")
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 512,
}


def bpe(words: Sequence[str] = WORDS, **settings: Any) -> PreTrainedTokenizerFast:
    model = models.BPE(ids_of(words), [("h", "i")] if "hi" in words else [], unk_token="<unk>")
    return fast(Tokenizer(model), **settings)


def unigram(words: Sequence[str] = WORDS, **settings: Any) -> PreTrainedTokenizerFast:
    model = models.Unigram([(word, -float(id_)) for id_, word in enumerate(words)], unk_id=2)
    return fast(Tokenizer(model), **settings)


def word_piece(words: Sequence[str] = WORDS, **settings: Any) -> PreTrainedTokenizerFast:
    return fast(Tokenizer(models.WordPiece(ids_of(words), unk_token="<unk>")), **settings)


def byte_level(**settings: Any) -> PreTrainedTokenizerFast:
    words = ["<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(ids_of(words), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return fast(tokenizer, **settings)


def ids_of(words: Sequence[str]) -> dict[str, int]:
    return {word: id_ for id_, word in enumerate(words)}


def fast(
    tokenizer: Tokenizer,
    *,
    adds_bos: bool = False,
    lowercase: bool = False,
    splits: bool = False,
    added: Sequence[str] = (),
    special: Mapping[str, str] | None = None,
    chat_template: Any = "{{ messages }}",
) -> PreTrainedTokenizerFast:
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = special or {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    made.add_tokens(list(added))
    made.chat_template = chat_template
    return made


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> Path:
    """Write a model's small files, and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    LlamaConfig(**SIZES | settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
