"""CpuLinear: a float32 linear layer on a CPU, by the quickest of the ways that PyTorch has.

A pass over a few tokens reads every weight once, and `F.linear` takes up to three times as long as
that reading. Milliseconds a pass of the bundled target, two cores of an AMD EPYC with AVX-512:

    rows                1      2      3      4      5      9     17    100
    F.linear         39.0   61.3   73.4   58.6   55.1   69.6   72.2  174.3
    weight @ rows.T  23.8   25.0   26.3   26.6   37.1   57.1   79.6
    oneDNN           26.3   32.8   33.9   33.8   35.3   37.9   43.2   99.9

For bfloat16 on such a CPU, PyTorch takes oneDNN by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MAX_ROWS_AS_COLUMNS = 4


def has_wide_onednn() -> bool:
    """Return whether oneDNN has AVX-512 to work with; without it, it gains nothing here."""
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # what compiled models call
    )


class CpuLinear(nn.Linear):
    """The same product as its base class, rounded differently. Gradients take the usual way."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            if input.numel() <= MAX_ROWS_AS_COLUMNS * self.in_features:
                return _by_columns(input, self.weight, self.bias)
            if has_wide_onednn():
                return _by_onednn(input, self.weight, self.bias)
        return super().forward(input)


def use_cpu_linear(model: Any) -> Any:
    """Let the float32 linear layers of a model on the CPU be `CpuLinear`, and return the model.

    Parameters keep their names and stay the same objects, tied ones too.
    """
    # MKL's slow cases, so without MKL there is nothing to mend.
    if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        for module in model.modules():
            weight = module.weight if type(module) is nn.Linear else None
            if weight is not None and weight.device.type == "cpu" and weight.dtype == torch.float32:
                module.__class__ = CpuLinear
    return model


def _by_columns(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    rows = input.reshape(-1, input.shape[-1])
    num_rows = len(rows)
    if num_rows % 2:  # an even number is quicker, one more row or not
        rows = torch.cat((rows, rows[-1:]))
    output = torch.mm(weight, rows.T)[:, :num_rows].T.contiguous()
    if bias is not None:
        output += bias
    return output.reshape(*input.shape[:-1], len(weight))


def _by_onednn(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    output = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    assert isinstance(output, torch.Tensor)
    return output
