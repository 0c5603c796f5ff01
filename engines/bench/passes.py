"""The passes of a run, written down and made again without the loop: what the models alone cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.drafting import CachedModel


@dataclass(slots=True)
class Passes:
    """What one run asked of its models, in order."""

    calls: list[tuple[str, str, tuple[Any, ...]]] = field(default_factory=list)

    def recording(self, name: str, model: CachedModel) -> CachedModel:
        """Return a model that writes down what it is asked."""
        return _Recorded(name, model, self)

    def again(self, models: dict[str, CachedModel]) -> None:
        """Make the same passes, with an argmax over each pass's logits and nothing else."""
        for name, call, args in self.calls:
            model = models[name]
            match call:
                case "forward":
                    token_ids, num_logits = args
                    model.forward(token_ids, num_logits=num_logits).argmax(-1).tolist()
                case "truncate":
                    model.truncate(*args)


@dataclass(slots=True)
class _Recorded:
    name: str
    model: CachedModel
    passes: Passes

    @property
    def num_cached_tokens(self) -> int:
        return self.model.num_cached_tokens

    def forward(self, token_ids: Sequence[int], *, num_logits: int) -> Any:
        self.passes.calls.append((self.name, "forward", (list(token_ids), num_logits)))
        return self.model.forward(token_ids, num_logits=num_logits)

    def token_probs(self, rows: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        return self.model.token_probs(rows, token_ids)

    def truncate(self, num_tokens: int) -> None:
        self.passes.calls.append((self.name, "truncate", (num_tokens,)))
        self.model.truncate(num_tokens)

    def synchronize(self) -> None:
        self.model.synchronize()
