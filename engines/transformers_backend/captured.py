"""CapturedPasses: passes of fixed numbers of tokens over a static cache, captured and replayed.

On CUDA a pass is a CUDA graph over layers that torch.compile has fused, so it costs what the device
needs and nothing of Python's. All layers of a model share one compilation for each size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from engines.transformers_backend.folded_attention import folded_attention_in
from engines.transformers_backend.model import TransformersModel, cache_argument
from engines.transformers_backend.static_cache import LayerKv, StaticKv

FULL_ATTENTION = "full_attention"
WARM_UP_CALLS = 3  # what CUDA and cuBLAS set up at first must not be captured
CHECK_TOKENS = 16  # read before the pass that is compared
# Of the logits' norm, by what a model computes in: rounding of two ways through all layers
MAX_DEVIATION = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Of torch.compile: a model that cannot be traced, no compiler for what it generates
FUSING_ERRORS = (
    torch._dynamo.exc.TorchDynamoException,
    torch._dynamo.exc.FailOnRecompileLimitHit,
)
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
        self.capacity = capacity
        self.unfused_reason: str | None = None  # why its layers are not compiled
        self._model = model
        self._kv = StaticKv(
            model.config.get_text_config(),
            capacity=capacity,
            dtype=model.dtype,
            device=model.device,
        )
        self._is_fused = True
        self._cache_argument = cache_argument(model)
        self._passes: dict[int, _Pass] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of tokens that are captured, ascending."""
        return tuple(sorted(self._passes))

    @torch.inference_mode()
    def capture(self, num_tokens: int) -> None:
        """Capture passes over so many tokens; nothing where that is done."""
        if num_tokens in self._passes:
            return
        device = self._model.device
        if device.type != "cuda":  # the same arithmetic, for tests without a GPU
            self._passes[num_tokens] = _Pass(self._step, num_tokens, device)
            return
        if self._is_fused:
            try:
                with fused_layers(self._model, self._kv):
                    self._passes[num_tokens] = _CudaPass(self._step, num_tokens, device)
            except FUSING_ERRORS as exc:
                self._is_fused = False
                self.unfused_reason = first_line(exc)
        if num_tokens not in self._passes:
            self._passes[num_tokens] = _CudaPass(self._step, num_tokens, device)

    @torch.inference_mode()
    def read(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """Read tokens at a position: by a captured pass where one is large enough.

        Returns:
            [num_tokens, vocab_size], as the model gives it. The next pass may write over it.
        """
        num_tokens = len(token_ids)
        size = next((size for size in self.sizes if size >= num_tokens), None)
        if size is None:
            device = self._model.device
            ids = torch.tensor([list(token_ids)], device=device)
            return self._step(ids, torch.arange(start, start + num_tokens, device=device))
        return self._passes[size](token_ids, start)[:num_tokens]

    def _step(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Read `ids` [1, num_tokens] at `positions` [num_tokens]."""
        self._kv.positions = positions
        with folded_attention_in(self._model):
            output = self._model(
                ids,
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
        self._step = step
        self._num_tokens = num_tokens
        self._ids = torch.zeros((1, num_tokens), dtype=torch.int64, device=device)
        self._positions = torch.arange(num_tokens, device=device)
        self._offsets = torch.arange(num_tokens, device=device)

    def __call__(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """Read up to the pass's number of tokens; rows of padding behind them mean nothing."""
        padding = [token_ids[-1]] * (self._num_tokens - len(token_ids))
        self._ids.copy_(torch.tensor([[*token_ids, *padding]]), non_blocking=True)
        torch.add(self._offsets, start, out=self._positions)
        return self._run()

    def _run(self) -> torch.Tensor:
        return self._step(self._ids, self._positions)


class _CudaPass(_Pass):
    """The same as a CUDA graph."""

    def __init__(self, step: Step, num_tokens: int, device: torch.device) -> None:
        super().__init__(step, num_tokens, device)
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_CALLS):
                super()._run()
        torch.cuda.current_stream(device).wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = super()._run()

    def _run(self) -> torch.Tensor:
        self._graph.replay()
        return self._logits


@contextmanager
def fused_layers(model: Any, kv: StaticKv, *, backend: str = "inductor") -> Iterator[None]:
    """Let a model's layers run compiled meanwhile.

    One compilation serves all layers: it is of a layer without weights, which are handed to it like
    its part of the cache.

    Args:
        model: See `why_not_captured`.
        kv: Its cache, whose positions are those of the pass.
        backend: Of torch.compile.
    """
    argument = cache_argument(model)
    layers = model.base_model.layers
    configs = {id(part.config): part.config for part in layers[0].modules() if _has_config(part)}
    template = deepcopy(layers[0], configs).to("meta")

    def run(
        weights: dict[str, torch.Tensor], part: LayerKv, args: Any, options: dict[str, Any]
    ) -> Any:
        cached = {**options, argument: part}
        return torch.func.functional_call(template, weights, args, cached)

    fused = torch.compile(run, backend=backend, dynamic=False, fullgraph=True)

    def through(layer: Any, part: LayerKv) -> Callable[..., Any]:
        weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}

        def forward(*args: Any, **options: Any) -> Any:
            options.pop(argument, None)
            part.positions = kv.positions
            return fused(weights, part, args, options)

        return forward

    try:
        for number, layer in enumerate(layers):
            layer.forward = through(layer, kv.part(number))
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
        # The graph has what it needs; what is kept would count against PyTorch's limit of versions.
        torch.compiler.reset()


def _has_config(part: Any) -> bool:
    return hasattr(part, "config")


class CapturedModel:
    """A `CachedModel` for one sequence over captured passes, which sequences share in turn."""

    def __init__(self, passes: CapturedPasses, *, vocab_size: int) -> None:
        self._passes = passes
        self._vocab_size = vocab_size  # of the tokenizer: rows of padding behind it are cut off
        self._num_cached_tokens = 0

    @property
    def num_cached_tokens(self) -> int:
        return self._num_cached_tokens

    def forward(self, token_ids: Sequence[int], *, num_logits: int) -> torch.Tensor:
        logits = self._passes.read(token_ids, self._num_cached_tokens)
        self._num_cached_tokens += len(token_ids)
        return logits[-num_logits:, : self._vocab_size].float()

    def truncate(self, num_tokens: int) -> None:
        self._num_cached_tokens = num_tokens

    def synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
