"""Which device a model runs on, what it is called, and what is free there."""

from __future__ import annotations

import platform

import psutil
import torch

from engines.errors import BackendUnavailableError


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


def free_memory_bytes(device: torch.device) -> int:
    """Return what is free of a device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
