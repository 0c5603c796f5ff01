"""Child process that turns a GGUF file into a float32 safetensors folder and checks the result.

`python -m engines.transformers_backend.convert FILE FOLDER`. A process of its own gives its memory
back and can be killed at any moment.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.utils import logging as transformers_logging

from engines.child import exit_code_of
from engines.errors import EngineBuildError, EngineError, translate_errors
from engines.tokenizer import (
    LOAD_ERRORS,
    load_gguf_tokenizer,
    load_tokenizer,
)
from engines.transformers_backend.model import TransformersModel, load_model

MAX_LOGIT_DEVIATION = 1e-2  # between one pass and token by token, in float32
CHECK_TEXT = "The three primary colours are red, yellow and blue.\n\n1. Red\n2. Yellow"

CONVERSION_ERRORS: dict[type[Exception], type[EngineError]] = dict.fromkeys(
    LOAD_ERRORS, EngineBuildError
)


def convert(source: Path, folder: Path) -> None:
    """Write the model and its tokenizer, dequantised to float32, into an empty folder."""
    with translate_errors(f"'{source.name}' cannot be converted", CONVERSION_ERRORS):
        _say("reading the vocabulary")
        tokenizer = load_gguf_tokenizer(source)
        _say("dequantising the weights")
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        _say("writing safetensors")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def self_check(folder: Path) -> None:
    """Load what was written, and compare one pass over a text with reading it token by token.

    Raises:
        EngineBuildError: The logits are not finite, or the cache changes them.
    """
    _say("checking the result")
    tokenizer = load_tokenizer(folder, name=folder.name)
    model = load_model(folder, name=folder.name, dtype=torch.float32, device=torch.device("cpu"))
    token_ids = tokenizer(CHECK_TEXT).input_ids
    whole = _logits(model, token_ids, chunk=len(token_ids))
    single = _logits(model, token_ids, chunk=1)
    deviation = float((whole - single).abs().max())
    if not deviation <= MAX_LOGIT_DEVIATION:  # also where it is not a number
        raise EngineBuildError(
            f"the self-check failed: one pass and token by token differ by {deviation} in a logit"
        )
    _say(f"largest difference between one pass and token by token: {deviation:.1e}")


def _logits(model: Any, token_ids: list[int], *, chunk: int) -> torch.Tensor:
    cached = TransformersModel(model, vocab_size=model.config.get_text_config().vocab_size)
    parts = [token_ids[start : start + chunk] for start in range(0, len(token_ids), chunk)]
    return torch.cat([cached.forward(part, num_logits=len(part)) for part in parts])


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Convert and check; print a sentence on failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()

    def work() -> None:
        convert(args.source, args.folder)
        self_check(args.folder)

    return exit_code_of(work)


if __name__ == "__main__":
    sys.exit(main())
