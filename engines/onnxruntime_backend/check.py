"""Child process that loads a built pair, and compares its passes with each other and a record.

`python -m engines.onnxruntime_backend.check STORE TARGET [DRAFT]`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engines.child import exit_code_of
from engines.config import BUNDLED, EngineConfig
from engines.errors import EngineBuildError
from engines.onnxruntime_backend.engine import OnnxEngine
from engines.onnxruntime_backend.model import OnnxModel
from engines.onnxruntime_backend.reference import TEXT, ReferenceLogits
from engines.store import EngineStore

MAX_DEVIATION = 1e-3  # of a logit, in float32
BLOCK_TOKENS = 5  # read at once where a run would verify a draft


def check(root: Path, target: str, draft: str | None) -> None:
    """Say how far apart the logits are of one pass over a text and of passes over parts of it.

    Raises:
        EngineError: The models cannot be loaded, or the logits are too far apart.
    """
    with OnnxEngine(EngineConfig("onnxruntime", target, draft), EngineStore(root)) as engine:
        info = engine.info
        token_ids = engine.encode(TEXT, chat_template=False)[: info.context_length - 1]
        whole = _logits(engine.open_target(len(token_ids)), token_ids, len(token_ids))
        for num_tokens in (1, BLOCK_TOKENS):
            parts = _logits(engine.open_target(len(token_ids)), token_ids, num_tokens)
            _require(float(np.abs(parts - whole).max()), f"passes over {num_tokens} and over all")
        if target == BUNDLED:
            reference = ReferenceLogits.load()
            if reference.token_ids != token_ids:
                raise EngineBuildError("the self-check failed: the tokenizer gives other ids")
            _require(reference.deviation(whole), f"these logits and those of {reference.made_with}")
        if draft is not None:
            drafted = _logits(engine.open_draft(len(token_ids)), token_ids, len(token_ids))
            if not np.isfinite(drafted).all():
                raise EngineBuildError(f"the self-check failed: {info.draft} returns no numbers")
            _say(f"{info.draft}, in {info.draft_dtype}: its logits are numbers")


def _logits(model: OnnxModel, token_ids: Sequence[int], num_tokens: int) -> np.ndarray:
    parts = (token_ids[at : at + num_tokens] for at in range(0, len(token_ids), num_tokens))
    return np.concatenate([model.forward(part, num_logits=len(part)).copy() for part in parts])


def _require(deviation: float, sides: str) -> None:
    if not deviation <= MAX_DEVIATION:  # also where it is not a number
        raise EngineBuildError(f"the self-check failed: {sides} differ by {deviation} in a logit")
    _say(f"{sides}: logits differ by {deviation:.1e} at most")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(args: Sequence[str]) -> int:
    """Check; print a sentence on failure."""
    root, target, *draft = args
    return exit_code_of(lambda: check(Path(root), target, next(iter(draft), None)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
