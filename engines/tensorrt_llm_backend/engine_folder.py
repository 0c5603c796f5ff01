"""What a built engine can do, read from its config.json without TensorRT-LLM."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from engines.errors import EngineBuildError, translate_errors

DRAFT_TOKENS_EXTERNAL = 2  # as the library writes its SpeculativeDecodingMode


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """A built engine."""

    path: Path
    dtype: str
    quant_algo: str | None
    vocab_size: int
    kv_bytes_per_token: int  # of its KV cache, on all its GPUs together
    num_bytes: int  # of its files
    tensor_parallel_size: int
    max_seq_len: int
    max_num_tokens: int
    max_draft_len: int  # 0 where it cannot verify drafts
    gathers_logits: bool
    has_paged_context_fmha: bool

    @property
    def dtype_name(self) -> str:
        """Return how its weights are kept, for people."""
        return f"{self.quant_algo} ({self.dtype})" if self.quant_algo else self.dtype

    def device_bytes(self, num_cached_tokens: int) -> int:
        """Return what it takes on each of its GPUs: its weights and its KV cache."""
        total = self.num_bytes + num_cached_tokens * self.kv_bytes_per_token
        return total // self.tensor_parallel_size

    @property
    def padded_vocab_size(self) -> int:
        """Return the width of its logits: the vocabulary is padded to whole shares of each GPU."""
        return padded(self.vocab_size, self.tensor_parallel_size)


def padded(vocab_size: int, num_gpus: int) -> int:
    """Return a vocabulary's size in whole shares of each GPU."""
    return -(-vocab_size // num_gpus) * num_gpus


def read_engine_folder(path: Path) -> EngineFolder:
    """Return what an engine's config.json says.

    Raises:
        EngineBuildError: It cannot be read, or a part of the engine is missing.
    """
    damaged = dict.fromkeys(
        (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError),
        EngineBuildError,
    )
    with translate_errors(f"the built engine '{path.name}' is damaged ({_anew(path)})", damaged):
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        model, build = config["pretrained_config"], config["build_config"]
        verifies = build["speculative_decoding_mode"] == DRAFT_TOKENS_EXTERNAL
        quantization = model.get("quantization") or {}
        num_heads = int(model["num_attention_heads"])
        head_size = model.get("head_size") or int(model["hidden_size"]) // num_heads
        num_kv_heads = model.get("num_key_value_heads") or num_heads
        bytes_per_value = 1 if quantization.get("kv_cache_quant_algo") else 2
        folder = EngineFolder(
            path=path,
            dtype=str(model["dtype"]),
            quant_algo=quantization.get("quant_algo"),
            vocab_size=int(model["vocab_size"]),
            kv_bytes_per_token=2
            * int(model["num_hidden_layers"])
            * num_kv_heads
            * head_size
            * bytes_per_value,
            num_bytes=sum(file.stat().st_size for file in path.glob("rank*.engine")),
            tensor_parallel_size=int(model["mapping"]["tp_size"]),
            max_seq_len=int(build["max_seq_len"]),
            max_num_tokens=int(build["max_num_tokens"]),
            max_draft_len=int(build["max_draft_len"]) if verifies else 0,
            gathers_logits=bool(build["gather_generation_logits"]),
            has_paged_context_fmha=bool(build["plugin_config"]["use_paged_context_fmha"]),
        )
        for rank in range(folder.tensor_parallel_size):
            if not (path / f"rank{rank}.engine").is_file():
                raise EngineBuildError(
                    f"the built engine '{path.name}' is damaged: rank{rank}.engine is missing; "
                    f"{_anew(path)}"
                )
    return folder


def check_target(folder: EngineFolder, *, max_draft_len: int) -> None:
    """Refuse a target engine that cannot verify drafts of a length.

    Raises:
        EngineBuildError: So it is; the text has both numbers.
    """
    if folder.max_draft_len < max_draft_len:
        raise EngineBuildError(
            f"the target engine '{folder.path.name}' takes {folder.max_draft_len} drafts in a step,"
            f" not {max_draft_len}: {_anew(folder.path)}"
        )


def check_limits(folder: EngineFolder, *, max_seq_len: int) -> None:
    """Refuse an engine whose limits are smaller than asked for, or that cannot reuse its cache.

    Raises:
        EngineBuildError: So it is; the text has both numbers.
    """
    longest = min(folder.max_seq_len, folder.max_num_tokens)
    if longest < max_seq_len:
        raise EngineBuildError(
            f"the engine '{folder.path.name}' holds {longest:,} tokens, and {max_seq_len:,} are "
            f"needed: {_anew(folder.path)}"
        )
    if not folder.has_paged_context_fmha:
        raise EngineBuildError(
            f"the engine '{folder.path.name}' is built without paged context FMHA, without which "
            f"drafts cannot be verified: {_anew(folder.path)}"
        )


def check_logits(target: EngineFolder, draft: EngineFolder) -> None:
    """Refuse a pair that cannot accept by logits.

    Raises:
        EngineBuildError: An engine does not gather them, or their widths differ.
    """
    for role, folder in (("target", target), ("draft", draft)):
        if not folder.gathers_logits:
            raise EngineBuildError(
                f"the {role} engine '{folder.path.name}' does not gather its logits: "
                f"{_anew(folder.path)}, with acceptance 'logits'"
            )
    if target.padded_vocab_size != draft.padded_vocab_size:
        raise EngineBuildError(
            f"the target's logits are {target.padded_vocab_size:,} wide and the draft's "
            f"{draft.padded_vocab_size:,}: set acceptance to 'tokens' (greedy decoding only)"
        )


def _anew(path: Path) -> str:
    """Return the remedy: a build leaves alone what the store takes for whole."""
    return f"remove it with 'python -m engines engines remove {path.name}' and build it again"
