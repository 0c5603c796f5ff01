"""Child process that turns a Llama's GGUF file into a float32 safetensors folder, without PyTorch.

`python -m engines.gguf_conversion FILE FOLDER`. A process of its own gives its memory back and can
be killed at any moment. Files of other architectures are converted through transformers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from gguf.quants import dequantize
from transformers import GenerationConfig, LlamaConfig
from transformers.utils import logging as transformers_logging

from engines.child import exit_code_of
from engines.errors import EngineBuildError, EngineError, translate_errors
from engines.gguf_files import ARCHITECTURE, value_of
from engines.tensor_files import Arrays, write_arrays
from engines.tokenizer import LOAD_ERRORS, load_gguf_tokenizer

CONVERSION_ERRORS: dict[type[Exception], type[EngineError]] = dict.fromkeys(
    LOAD_ERRORS, EngineBuildError
)


def convert(source: Path, folder: Path) -> None:
    """Write the model and its tokenizer, dequantised to float32, into an empty folder.

    Raises:
        EngineBuildError: The file is damaged, or the folder cannot be written.
    """
    with translate_errors(f"'{source.name}' cannot be converted", CONVERSION_ERRORS):
        reader = GGUFReader(source)
        _say("reading the vocabulary")
        tokenizer = load_gguf_tokenizer(source)
        _say("dequantising the weights")
        config = _config(reader)
        weights = _weights(reader, config)
        config.tie_word_embeddings = "lm_head.weight" not in weights
        _say("writing safetensors")
        write_arrays(weights, folder / "model.safetensors")
        config.save_pretrained(folder)
        GenerationConfig.from_model_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _config(reader: GGUFReader) -> Any:
    def key(name: str) -> Any:
        return value_of(reader, f"{ARCHITECTURE}.{name}")

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=key("vocab_size") or len(value_of(reader, "tokenizer.ggml.tokens")),
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=key("block_count"),
        num_attention_heads=key("attention.head_count"),
        num_key_value_heads=key("attention.head_count_kv") or key("attention.head_count"),
        head_dim=key("rope.dimension_count")
        or key("embedding_length") // key("attention.head_count"),
        max_position_embeddings=key("context_length"),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": key("rope.freq_base") or 10000.0},
        bos_token_id=value_of(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=value_of(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=value_of(reader, "tokenizer.ggml.padding_token_id"),
    )


def _weights(reader: GGUFReader, config: Any) -> Arrays:
    """Return the tensors under a checkpoint's names, [rows, columns], float32."""
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    checkpoint_names = {"token_embd": "model.embed_tokens", "output": "lm_head"}
    for name in _checkpoint_modules(config.num_hidden_layers):
        gguf_name = names.get_name(name)
        assert gguf_name is not None, name
        checkpoint_names[gguf_name] = name
    weights: Arrays = {}
    for tensor in reader.tensors:
        module = checkpoint_names[tensor.name.removesuffix(".weight")]
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if module.endswith("q_proj"):
            weight = _unpermuted(weight, config.num_attention_heads)
        elif module.endswith("k_proj"):
            weight = _unpermuted(weight, config.num_key_value_heads)
        if not np.isfinite(weight).all():
            raise EngineBuildError(f"the tensor {tensor.name} holds what is no number")
        weights[f"{module}.weight"] = weight
    return weights


def _checkpoint_modules(num_layers: int) -> list[str]:
    parts = [f"self_attn.{part}_proj" for part in "qkvo"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    parts += ["input_layernorm", "post_attention_layernorm"]
    return [
        *(f"model.layers.{layer}.{part}" for layer in range(num_layers) for part in parts),
        "model.norm",
    ]


def _unpermuted(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Return query or key rows as a checkpoint orders them.

    llama.cpp turns pairs of neighbouring rows of a head by one angle, checkpoints a row of the
    head's first half with its counterpart in the second.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Convert; print a sentence on failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    return exit_code_of(lambda: convert(args.source, args.folder))


if __name__ == "__main__":
    sys.exit(main())
