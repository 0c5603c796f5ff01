"""CapturedPasses: passes of fixed numbers of tokens over a static cache, captured and replayed.

On CUDA a pass is a CUDA graph over layers that torch.compile has fused, so it costs what the device
needs and nothing of Python's. All layers of a model share one compilation for each size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from engines.sampling import token_probs
from engines.transformers_backend.cuda_graph import replayable
from engines.transformers_backend.folded_attention import folded_attention_in
from engines.transformers_backend.fused_layers import FUSING_ERRORS, FusedLayers
from engines.transformers_backend.model import TransformersModel, cache_argument
from engines.transformers_backend.static_cache import StaticKv

FULL_ATTENTION = "full_attention"
CHECK_TOKENS = 16  # read before the pass that is compared
# Of the logits' norm, by what a model computes in: rounding of two ways through all layers
MAX_DEVIATION = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def why_not_captured(model: Any) -> str | None:
    """Return why a model's passes cannot be captured, as far as its configuration tells."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if not kinds else None
    if kinds - {FULL_ATTENTION} or (window and getattr(config, "use_sliding_window", True)):
        return "some of its layers attend to a window or keep a state, which changes its shape"
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or not all(
        hasattr(getattr(layer, "self_attn", None), "layer_idx") for layer in layers
    ):
        return f"its layers are not built like a Llama's ({type(model).__name__})"
    return None


def first_line(exc: Exception) -> str:
    """Return what an error says first, or its kind where it says nothing."""
    return str(exc).strip().partition("\n")[0] or type(exc).__name__


class NotCapturedError(Exception):
    """A model's passes cannot be captured, for a reason that is told; it runs without."""


class CapturedPasses:
    """A model, a static cache of one sequence, and the passes over it that are captured."""

    def __init__(self, model: Any, *, capacity: int) -> None:
        """Make room.

        Args:
            model: See `why_not_captured`.
            capacity: The most tokens cached, padding of a pass included.
        """
        self.capacity = 0
        self.unfused_reason: str | None = None  # why its layers are not compiled
        self._model = model
        self._fused: FusedLayers | None = None
        self._cache_argument = cache_argument(model)
        self._passes: dict[int, _Pass] = {}
        self.make_room(capacity)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of tokens that are captured, ascending."""
        return tuple(sorted(self._passes))

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def vocab_size(self) -> int:
        """Return how many entries a row of logits has."""
        return int(self._model.config.get_text_config().vocab_size)

    def make_room(self, capacity: int) -> None:
        """See to it that so many tokens can be cached. A larger cache has no passes yet."""
        if capacity <= self.capacity:
            return
        self._passes.clear()
        self.capacity = capacity
        self._kv = StaticKv(
            self._model.config.get_text_config(),
            capacity=capacity,
            dtype=self._model.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def capture(self, num_tokens: int) -> None:
        """Capture passes over so many tokens; nothing where that is done."""
        if num_tokens in self._passes:
            return
        try:
            with self.quickest():
                self._passes[num_tokens] = _Pass(self.step, num_tokens, self.device)
        except FUSING_ERRORS as exc:
            self.unfused_reason = first_line(exc)
            self._passes[num_tokens] = _Pass(self.step, num_tokens, self.device)

    def quickest(self) -> AbstractContextManager[None]:
        """Let `step` run by compiled layers meanwhile, on CUDA and where they can be compiled.

        Raises:
            FUSING_ERRORS: When a step finds that they cannot.
        """
        if self.device.type != "cuda" or self.unfused_reason is not None:
            return nullcontext()
        if self._fused is None:
            self._fused = FusedLayers(self._model)
        return self._fused.running(self._kv)

    @torch.inference_mode()
    def read(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """Read tokens at a position: by a captured pass where one is large enough.

        Returns:
            [num_tokens, vocab_size], as the model gives it. The next pass may write over it.
        """
        num_tokens = len(token_ids)
        size = next((size for size in self.sizes if size >= num_tokens), None)
        if size is None:
            ids = torch.tensor(list(token_ids), device=self.device)
            return self.step(ids, torch.arange(start, start + num_tokens, device=self.device))
        return self._passes[size](token_ids, start)[:num_tokens]

    @torch.inference_mode()
    def again(self, num_tokens: int) -> torch.Tensor:
        """Make the captured pass over so many tokens once more as it was, for a clock."""
        return self._passes[num_tokens].run()

    def step(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Read `ids` [num_tokens] at `positions` [num_tokens], as a part of what is captured.

        Returns:
            [num_tokens, vocab_size], as the model gives it.
        """
        self._kv.positions = positions
        with folded_attention_in(self._model):
            output = self._model(
                ids[None],
                position_ids=positions[None],
                attention_mask=self._kv.mask(positions),
                use_cache=True,
                **{self._cache_argument: self._kv},
            )
        logits: torch.Tensor = output.logits[0]
        return logits


def require_same(model: Any, passes: CapturedPasses, num_tokens: int) -> None:
    """Compare a captured pass with one as transformers makes it.

    Raises:
        NotCapturedError: Their logits differ by more than rounding.
    """
    vocab_size = model.config.get_text_config().vocab_size
    ids = [(7919 * place) % vocab_size for place in range(1, CHECK_TOKENS + num_tokens + 1)]
    usual = TransformersModel(model, vocab_size=vocab_size)
    expected = usual.forward(ids, num_logits=num_tokens)
    passes.read(ids[:CHECK_TOKENS], 0)
    logits = passes.read(ids[CHECK_TOKENS:], CHECK_TOKENS).float()
    deviation = float((logits - expected).norm() / expected.norm())
    if not deviation <= MAX_DEVIATION[model.dtype]:
        raise NotCapturedError(f"a captured pass differs by {deviation:.1e} of its logits")


class _Pass:
    """A pass of a fixed size from buffers of its own."""

    def __init__(self, step: Step, num_tokens: int, device: torch.device) -> None:
        self._num_tokens = num_tokens
        self._ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.arange(num_tokens, device=device)
        self._offsets = torch.arange(num_tokens, device=device)
        self.run = replayable(lambda: step(self._ids, self._positions), device)

    def __call__(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """Read up to the pass's number of tokens; rows of padding behind them mean nothing."""
        padding = [token_ids[-1]] * (self._num_tokens - len(token_ids))
        self._ids.copy_(torch.tensor([*token_ids, *padding]), non_blocking=True)
        torch.add(self._offsets, start, out=self._positions)
        return self.run()


class CapturedModel:
    """A `CachedModel` for one sequence over captured passes, which sequences share in turn."""

    def __init__(self, passes: CapturedPasses, *, vocab_size: int) -> None:
        self._passes = passes
        self._vocab_size = vocab_size  # of the tokenizer: rows of padding behind it are cut off
        self.num_cached_tokens = 0
        self._logits: Any = None  # of the last pass

    def forward(self, token_ids: Sequence[int], *, num_logits: int) -> torch.Tensor:
        logits = self._passes.read(token_ids, self.num_cached_tokens)
        self.num_cached_tokens += len(token_ids)
        logits = logits[-num_logits:, : self._vocab_size].float()
        self._logits = logits
        return logits

    def token_probs(self, rows: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        return token_probs(self._logits, rows, token_ids)

    def truncate(self, num_tokens: int) -> None:
        self.num_cached_tokens = num_tokens

    def synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
