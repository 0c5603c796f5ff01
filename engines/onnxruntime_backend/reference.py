"""What the bundled target's logits are over a short text, by transformers in float32.

The file ships with the project, so that a build can be checked where there is no PyTorch.
`python -m engines.onnxruntime_backend.reference` writes it anew.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from engines.checkpoints import built_path, parse_reference
from engines.config import BUNDLED
from engines.store import EngineStore

FILE = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct" / "logits.json"
TEXT = "The three primary colours are red, yellow and blue.\n\n1. Red\n2. Yellow"
NUM_TOP = 8  # of each position
NUM_SPREAD = 8  # ids over the whole vocabulary, the same of each position


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """Logits of some ids behind each token of a text."""

    token_ids: tuple[int, ...]
    ids: tuple[tuple[int, ...], ...]  # a row for each token
    logits: tuple[tuple[float, ...], ...]
    made_with: str

    @classmethod
    def load(cls) -> Self:
        values = json.loads(FILE.read_text(encoding="utf-8"))
        rows = {name: tuple(map(tuple, values[name])) for name in ("ids", "logits")}
        return cls(tuple(values["token_ids"]), **rows, made_with=values["made_with"])

    def deviation(self, logits: np.ndarray[Any, Any]) -> float:
        """Return the largest difference from logits [num_tokens, vocab_size]; NaN is passed on."""
        theirs = np.take_along_axis(logits, np.array(self.ids), axis=-1)
        return float(np.abs(theirs - np.array(self.logits)).max())


def main() -> None:
    """Write the file."""
    import torch
    import transformers

    from engines.tokenizer import load_tokenizer
    from engines.transformers_backend.model import load_model

    path = built_path(parse_reference(BUNDLED), EngineStore())
    token_ids = load_tokenizer(path, name=BUNDLED)(TEXT).input_ids
    model = load_model(path, name=BUNDLED, dtype=torch.float32, device=torch.device("cpu"))
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0].numpy()
    spread = np.linspace(0, logits.shape[-1] - 1, NUM_SPREAD).astype(int)
    top = np.argsort(-logits, axis=-1)[:, :NUM_TOP]
    ids = np.concatenate([top, np.broadcast_to(spread, (len(top), NUM_SPREAD))], axis=1)
    rows = np.take_along_axis(logits, ids, axis=-1)
    reference = ReferenceLogits(
        tuple(token_ids),
        tuple(map(tuple, ids.tolist())),
        tuple(tuple(round(value, 5) for value in row) for row in rows.tolist()),
        f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
    )
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(asdict(reference)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
