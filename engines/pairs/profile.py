"""ModelProfile: what the small files of a model say of it, read without its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from engines.errors import translate_errors
from engines.pairs.sizes import num_params
from engines.small_files import read_json

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
PROBE = "hi"  # encoded to see whether a beginning is added
# What makers call the entries that they keep for later: <unused7>, <|extra_3|>, [unused1] …
UNUSED = re.compile(
    r"[<\[]\|?_*(unused|reserved|extra|dummy|placeholder|control|pad)\D*\d*\|?[>\]]", re.I
)
# Architectures that keep a state, which cannot forget what it has read
RECURRENT = frozenset(
    {
        "mamba",
        "mamba2",
        "falcon_mamba",
        "rwkv",
        "recurrent_gemma",
        "xlstm",
        "jamba",
        "zamba",
        "zamba2",
    }
    | {"bamba", "granitemoehybrid", "lfm2", "qwen3_next", "nemotron_h", "falcon_h1", "minimax"}
)
ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


@dataclass(frozen=True, slots=True)
class TokenizerProfile:
    """A tokenizer, as far as two can differ."""

    texts: Mapping[int, str]  # of every id, as the vocabulary spells it
    free_ids: frozenset[int] = frozenset()  # special, or kept for later: no text is made of them
    special: Mapping[str, tuple[int, str] | None] = field(default_factory=dict)
    kind: str = ""  # of model: BPE, Unigram, WordPiece …
    normalizer: str = ""  # and how text is prepared, as the tokenizers library writes it
    pre_tokenizer: str = ""
    framed_ids: tuple[int, ...] = ()  # of a short text, where something is put around it; else ()
    chat_template: str | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Return that of a loaded tokenizer."""
        texts = {id_: text for text, id_ in tokenizer.get_vocab().items()}
        added = tokenizer.added_tokens_decoder
        special = {id_ for id_, token in added.items() if token.special}
        special.update(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        bare = tokenizer(PROBE, add_special_tokens=False).input_ids
        framed = tokenizer(PROBE).input_ids
        template = tokenizer.chat_template
        if isinstance(template, dict):  # several, by name
            template = json.dumps(template, sort_keys=True)
        unused = {id_ for id_, text in texts.items() if UNUSED.fullmatch(text)}
        return cls(
            texts=texts,
            free_ids=frozenset(special | unused),
            special={name: _special(tokenizer, name) for name in SPECIAL_TOKENS},
            kind=type(tokenizer if backend is None else backend.model).__name__,
            normalizer=_written(getattr(backend, "normalizer", None)),
            pre_tokenizer=_written(getattr(backend, "pre_tokenizer", None)),
            framed_ids=tuple(framed) if framed != bare else (),
            chat_template=template,
        )


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model, as far as its small files tell."""

    name: str
    config: Mapping[str, Any]  # of the language model
    tokenizer: TokenizerProfile
    is_decoder: bool = True

    @classmethod
    def of(cls, folder: Path, tokenizer: Any, *, name: str) -> Self:
        """Return that of a checkpoint whose tokenizer is loaded.

        Raises:
            ModelLoadError: Its configuration cannot be read.
        """
        from engines.tokenizer import LOAD_ERRORS

        config = read_config(folder)
        with translate_errors(f"the tokenizer of '{name}' cannot be used", LOAD_ERRORS):
            tokenizer_profile = TokenizerProfile.of(tokenizer)
        return cls(
            name,
            config,
            tokenizer_profile,
            is_decoder=not config.get("is_encoder_decoder", False),
        )

    @classmethod
    def load(cls, folder: Path, *, name: str) -> Self:
        """Return that of a checkpoint.

        Raises:
            ModelLoadError: A file is missing, damaged, or larger than any of its kind.
        """
        from engines.tokenizer import load_tokenizer  # transformers: not before it is needed

        return cls.of(folder, load_tokenizer(folder, name=name), name=name)

    @property
    def num_rows(self) -> int | None:
        """Return the rows of its embeddings and logits, padding included."""
        return _whole(self.config.get("vocab_size"))

    @property
    def context_length(self) -> int | None:
        """Return how many tokens it reads, prompt and output together."""
        return _whole(self.config.get("max_position_embeddings"))

    @property
    def num_params(self) -> int | None:
        """Return its number of weights; None where the architecture is not known."""
        return num_params(self.config)

    @property
    def kept_state(self) -> str | None:
        """Return what in it cannot be rolled back; None where its cache can forget tokens."""
        kinds = self.config.get("layer_types") or self.config.get("layers_block_type") or ()
        other = sorted({str(kind) for kind in kinds} - ATTENTION)
        if other:
            return f"layers of the kind {', '.join(other)}"
        if self.config.get("model_type") in RECURRENT:
            return f"the state of a '{self.config['model_type']}'"
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a checkpoint's language model, with what encloses it.

    Raises:
        ModelLoadError: It cannot be read.
    """
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    return {**config, **text_config} if isinstance(text_config, dict) else config


def _special(tokenizer: Any, name: str) -> tuple[int, str] | None:
    text, id_ = getattr(tokenizer, name, None), getattr(tokenizer, f"{name}_id", None)
    return None if text is None or id_ is None else (int(id_), str(text))


def _written(part: Any) -> str:
    """Return a normalizer or pre-tokenizer as its library writes it, "" where there is none."""
    return "" if part is None else part.__getstate__().decode()


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
