"""Which device a model runs on, in which type, what it is called, what is free, and its clock."""

from __future__ import annotations

import platform
from time import perf_counter
from typing import Any

import psutil
import torch

from engines.errors import BackendUnavailableError
from engines.transformers_backend.cpu_linear import has_wide_onednn


def device_of(name: str) -> torch.device:
    """Return the device that `cpu`, `cuda` or `auto` means here.

    Raises:
        BackendUnavailableError: There is no CUDA device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailableError(
            "device is 'cuda', but PyTorch sees no CUDA device here: use 'cpu' or 'auto'"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """Return what a device is, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """Return the type that a name, or `auto`, means for a target on a device."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def draft_dtype_of(name: str, device: torch.device) -> torch.dtype:
    """Return likewise that of a draft."""
    # A draft decides nothing, so by itself it takes the quicker one. Without AVX-512 a CPU reads
    # a prompt several times as slowly in bfloat16.
    if name == "auto" and device.type == "cpu" and has_wide_onednn():
        return torch.bfloat16
    return dtype_of(name, device)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a type's name without that of PyTorch."""
    return str(dtype).removeprefix("torch.")


def free_memory_bytes(device: torch.device) -> int:
    """Return what is free of a device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def mark(device: torch.device) -> Any:
    """Return a point in time for `seconds_between`: on CUDA when the device gets there."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the time between two marks. Waits until the device has passed both."""
    if not isinstance(start, torch.cuda.Event):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
