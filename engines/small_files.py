"""Small files of a model, with bounds: a configuration or a tokenizer may come from anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engines.errors import ModelLoadError, translate_errors

# What a causal language model needs; other formats of the same weights stay where they are.
SMALL_PATTERNS = ("*.json", "*.model", "*.jinja", "*.txt")  # all but the weights
PATTERNS = ("*.safetensors", *SMALL_PATTERNS)
MAX_CONFIG_BYTES = 8 * 2**20  # the longest that are published have some hundred kilobytes
MAX_TOKENIZER_BYTES = 128 * 2**20  # likewise, 35 MB
# Whatever a tokenizer is made of, and a configuration
TOKENIZER_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# A file that is too deeply nested ends in a RecursionError, which is a RuntimeError.
UNREADABLE: dict[type[Exception], type[ModelLoadError]] = dict.fromkeys(
    (OSError, ValueError, RuntimeError, MemoryError), ModelLoadError
)


def read_json(file: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the object that a file holds.

    Raises:
        ModelLoadError: It is missing, too large, no JSON, or no object.
    """
    require_small(file, max_bytes)
    with translate_errors(f"'{file}' cannot be read", UNREADABLE):
        value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ModelLoadError(f"'{file}' cannot be read: it holds no JSON object")
    return value


def require_small(file: Path, max_bytes: int) -> None:
    """Refuse a file that is larger than any of its kind, before a byte of it is read.

    Raises:
        ModelLoadError: It is, or it cannot be looked at.
    """
    with translate_errors(f"'{file}' cannot be read", UNREADABLE):
        num_bytes = file.stat().st_size
        is_regular = file.is_file()
    if not is_regular:  # a pipe or a device would never end
        raise ModelLoadError(f"'{file}' cannot be read: it is no file")
    if num_bytes > max_bytes:
        raise ModelLoadError(
            f"'{file}' is not read: it has {num_bytes / 1e6:.0f} MB, and no file of its kind has "
            f"more than {max_bytes / 1e6:.0f}"
        )
