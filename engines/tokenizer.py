"""Tokenizers: loading, one encoding of a prompt for all, what a generation needs of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError
from tokenizers import pre_tokenizers

from engines.config import check_prompt
from engines.errors import ModelLoadError, translate_errors
from engines.generation import Vocabulary
from engines.small_files import MAX_TOKENIZER_BYTES, TOKENIZER_FILES, read_json, require_small

# Without PyTorch, transformers says at its import that only tokenizers are there: all we need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import AutoTokenizer, PreTrainedTokenizerFast

# What the libraries below raise over a checkpoint that is damaged, incomplete or unknown to them.
LOAD_ERRORS: Mapping[type[Exception], type[ModelLoadError]] = dict.fromkeys(
    (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        ImportError,
        RuntimeError,
        MemoryError,
        SafetensorError,
        StrictDataclassError,
    ),
    ModelLoadError,
)

MAX_TOKENS = 2**19
# What transformers calls the fields of a GGUF file's tokenizer
TOKENIZER_FIELDS = {
    "tokenizer_type": "model",
    "pre_tokenizer_type": "pre",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "add_prefix_space": "add_space_prefix",
}
# A tokenizer's name for a token, and what a GGUF file calls it
SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


@dataclass(frozen=True, slots=True)
class Text:
    """A tokenizer, and what a generation needs of it."""

    tokenizer: Any
    vocabulary: Vocabulary

    @classmethod
    def load(cls, path: Path, *, name: str) -> Self:
        """Return that of a checkpoint.

        Raises:
            ModelLoadError: It has none, or one that cannot be read.
        """
        tokenizer = load_tokenizer(path, name=name)
        return cls(tokenizer, vocabulary_of(tokenizer, path))


def load_tokenizer(path: Path, *, name: str) -> Any:
    """Return the tokenizer of a checkpoint folder.

    Raises:
        ModelLoadError: It has none, one that cannot be read, or one beyond all measure.
    """
    action = (
        f"the tokenizer of '{name}' cannot be loaded (are tokenizer.json and config.json whole?)"
    )
    for file in TOKENIZER_FILES:
        if (path / file).exists():
            require_small(path / file, MAX_TOKENIZER_BYTES)
    with translate_errors(action, LOAD_ERRORS):
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    if len(tokenizer) > MAX_TOKENS:
        raise ModelLoadError(
            f"the tokenizer of '{name}' has {len(tokenizer)} entries, more than any that is "
            f"published ({MAX_TOKENS} at most are read here)"
        )
    return tokenizer


def load_gguf_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a GGUF file, splitting text as the original does.

    transformers knows what the fields mean, but reads a file only with PyTorch, and takes GPT-2's
    splitting for a Llama's byte-level tokenizer. SmolLM's splits numbers into digits first.
    """
    from gguf import GGUFReader

    # Where transformers keeps it; its public reader would have to be PyTorch's.
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    from engines.gguf_files import value_of

    reader = GGUFReader(path)

    given = {
        name: content
        for name, key in TOKENIZER_FIELDS.items()
        if (content := value_of(reader, f"tokenizer.ggml.{key}")) is not None
    }
    backend, _ = convert_gguf_tokenizer(value_of(reader, "general.architecture"), given)
    if given.get("pre_tokenizer_type") == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    special = {
        name: given["tokens"][id_]
        for name, key in SPECIAL_TOKENS.items()
        if (id_ := value_of(reader, f"tokenizer.ggml.{key}_token_id")) is not None
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=value_of(reader, "tokenizer.chat_template"),
        **special,
    )


def encode_prompt(tokenizer: Any, prompt: str, *, chat_template: bool) -> tuple[int, ...]:
    """Return a prompt's ids. With the chat template, the prompt is the user's first message.

    Raises:
        ValueError: The prompt is empty, or the chat template is missing or refuses it.
    """
    check_prompt(prompt)
    if not chat_template:
        return tuple(tokenizer(prompt).input_ids)
    if tokenizer.chat_template is None:
        raise ValueError("the target has no chat template: switch 'chat template' off")
    message = {"role": "user", "content": prompt}
    try:
        ids = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except TemplateError as exc:
        raise ValueError(
            f"the target's chat template fails ({exc}): switch 'chat template' off"
        ) from exc
    return tuple(ids)


def vocabulary_of(tokenizer: Any, path: Path) -> Vocabulary:
    """Return how a tokenizer decodes, and which of its tokens stop or control a generation."""
    control = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return Vocabulary(
        decode=lambda ids: str(
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        ),
        stop_token_ids=frozenset(_stop_token_ids(tokenizer, path)),
        control_token_ids=frozenset(control | set(tokenizer.all_special_ids)),
    )


def generation_settings(path: Path) -> dict[str, Any]:
    """Return what the checkpoint's own generation_config.json says, {} where it has none."""
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    with translate_errors(f"{file} cannot be read", LOAD_ERRORS):
        return read_json(file)


def _stop_token_ids(tokenizer: Any, path: Path) -> set[int]:
    configured = generation_settings(path).get("eos_token_id")
    configured = configured if isinstance(configured, list) else [configured]
    return {id_ for id_ in [*configured, tokenizer.eos_token_id] if isinstance(id_, int)}
