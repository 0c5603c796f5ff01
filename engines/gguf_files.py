"""What a GGUF file says of itself: how large it is, and who can convert it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader

from engines.errors import EngineBuildError, translate_errors

ARCHITECTURE = "llama"
# What a Llama's file may hold beside the usual, and what changes the model where it is there
UNUSUAL = ("rope.scaling.type", "expert_count", "attention.key_length", "attention.value_length")
TOKENS = "tokenizer.ggml.tokens"
# A configuration's name for a size, and the end of a header's
HEADER_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
UNREADABLE = dict.fromkeys((ValueError, IndexError, KeyError, OSError), EngineBuildError)


def num_weights(file: Path) -> int:
    """Return how many numbers the tensors of a GGUF file hold.

    Raises:
        EngineBuildError: It is not a GGUF file, or cut short.
    """
    with translate_errors(f"'{file.name}' cannot be read", UNREADABLE):
        return sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)


def is_plain_llama(file: Path) -> bool:
    """Return whether a file is a Llama's with nothing unusual, which is converted without PyTorch.

    Raises:
        EngineBuildError: It is not a GGUF file, or cut short.
    """
    with translate_errors(f"'{file.name}' cannot be read", UNREADABLE):
        reader = GGUFReader(file)
        names = {tensor.name for tensor in reader.tensors}
        return (
            value_of(reader, "general.architecture") == ARCHITECTURE
            and value_of(reader, "tokenizer.ggml.model") == "gpt2"
            and value_of(reader, f"{ARCHITECTURE}.rope.dimension_count") is not None
            and not any(f"{ARCHITECTURE}.{key}" in reader.fields for key in UNUSUAL)
            and "rope_freqs.weight" not in names
            and not any(name.endswith(".bias") for name in names)
        )


def header_config(file: Path) -> dict[str, Any]:
    """Return what a file's header says of its model, as a configuration would name it.

    Raises:
        EngineBuildError: It is not a GGUF file, or cut short.
    """
    with translate_errors(f"'{file.name}' cannot be read", UNREADABLE):
        reader = GGUFReader(file)
        kind = value_of(reader, "general.architecture")
        values = {name: value_of(reader, f"{kind}.{key}") for name, key in HEADER_KEYS.items()}
        values["vocab_size"] = values["vocab_size"] or len(value_of(reader, TOKENS))
        values["tie_word_embeddings"] = all(
            tensor.name != "output.weight" for tensor in reader.tensors
        )
    return {"model_type": kind, **{name: value for name, value in values.items() if value}}


def value_of(reader: GGUFReader, key: str) -> Any:
    """Return a value of a file's header; None where it has none of that name."""
    field = reader.get_field(key)
    return None if field is None else field.contents()
