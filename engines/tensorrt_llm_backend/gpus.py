"""The NVIDIA GPUs of this machine, as the driver's own nvidia-smi tells them."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from engines.errors import BackendUnavailableError
from engines.tensorrt_llm_backend.installation import release_of

QUERY = (
    "index",
    "uuid",
    "name",
    "compute_cap",
    "memory.total",
    "memory.free",
    "driver_version",
    "compute_mode",
)
VISIBLE = "CUDA_VISIBLE_DEVICES"
COMPATIBILITY = Path("/usr/local/cuda/compat")  # in NVIDIA's images, for older drivers
TIMEOUT_S = 20.0
MIN_COMPUTE_CAPABILITY = (8, 0)
EXCLUSIVE_MODES = ("Exclusive_Thread", "Exclusive_Process", "Prohibited")
MIB = 1024 * 1024
# The least driver, by the first TensorRT-LLM that needs it: CUDA 12 until 1.1, 13 since.
MIN_DRIVERS = (((1, 2), 580), ((0,), 525))


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that this process may use."""

    index: int  # among those that are visible: what the library calls it
    name: str
    compute_capability: str  # such as 9.0
    total_bytes: int | None  # None: the driver does not say
    free_bytes: int | None
    driver: str
    is_exclusive: bool  # one process at a time, or none


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order.

    Raises:
        BackendUnavailableError: There is no driver, or no GPU.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise BackendUnavailableError(
            "there is no NVIDIA driver here (no nvidia-smi): TensorRT-LLM needs an NVIDIA GPU; the "
            "transformers back end runs without"
        )
    try:
        answer = subprocess.run(
            [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise BackendUnavailableError(
            f"the NVIDIA driver did not answer within {TIMEOUT_S:.0f} s: look at '{program}'"
        ) from exc
    except OSError as exc:
        raise BackendUnavailableError(f"'{program}' cannot be run: {exc.strerror}") from exc
    if answer.returncode != 0:
        said = (answer.stdout + answer.stderr).strip().partition("\n")[0] or "no reason given"
        raise BackendUnavailableError(
            f"the NVIDIA driver shows no GPU ({said}): look at 'nvidia-smi', and update "
            f"a driver before {MIN_DRIVERS[-1][1]}"
        )
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    gpus = _visible([row for row in rows if len(row) == len(QUERY)])
    if not gpus:
        raise BackendUnavailableError(
            "no NVIDIA GPU is visible: look at 'nvidia-smi' and CUDA_VISIBLE_DEVICES"
        )
    return gpus


def check_gpus(gpus: tuple[Gpu, ...], version: str) -> None:
    """Refuse what TensorRT-LLM cannot run on.

    Args:
        gpus: Those it is to use.
        version: Of TensorRT-LLM.

    Raises:
        BackendUnavailableError: A GPU or the driver is too old, or may not be shared.
    """
    for gpu in gpus:
        if release_of(gpu.compute_capability) < MIN_COMPUTE_CAPABILITY:
            raise BackendUnavailableError(
                f"the {gpu.name} has compute capability {gpu.compute_capability}, and TensorRT-LLM "
                "needs 8.0 (Ampere) or newer: name another GPU in devices, or use the transformers "
                "back end"
            )
        if gpu.is_exclusive:
            raise BackendUnavailableError(
                f"the {gpu.name} is in a compute mode that lets no two processes share it, in "
                "which loading hangs: set it free with 'sudo nvidia-smi -c DEFAULT'"
            )
        needed = next(driver for since, driver in MIN_DRIVERS if release_of(version) >= since)
        if release_of(gpu.driver) < (needed,) and not COMPATIBILITY.is_dir():
            raise BackendUnavailableError(
                f"the NVIDIA driver is {gpu.driver}, and TensorRT-LLM {version} needs {needed} or "
                "newer: update the driver, or use the transformers back end"
            )


def chosen(gpus: tuple[Gpu, ...], devices: tuple[int, ...]) -> tuple[Gpu, ...]:
    """Return the GPUs of some device numbers.

    Raises:
        ValueError: There is none of a number.
    """
    by_index = {gpu.index: gpu for gpu in gpus}
    for device in devices:
        if device not in by_index:
            raise ValueError(
                f"devices need GPU {device}, and visible are {', '.join(map(str, by_index))}: name "
                "those, or share the model among fewer"
            )
    return tuple(by_index[device] for device in devices)


def only(devices: tuple[int, ...]) -> dict[str, str]:
    """Return the variables of a process that is to see these GPUs alone, numbered from 0.

    Args:
        devices: Their numbers, as this process sees them.
    """
    visible = [name.strip() for name in os.environ.get(VISIBLE, "").split(",")]
    names = [visible[device] if visible[0] else str(device) for device in devices]
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE: ",".join(names)}


def _visible(rows: list[list[str]]) -> tuple[Gpu, ...]:
    """Return the rows that CUDA would show, renumbered as it numbers them."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        names = []
        for name in visible.split(","):
            row = next((row for row in rows if _is_named(row, name.strip())), None)
            if row is None:  # CUDA ends at the first that it does not know
                break
            names.append(row)
        rows = names
    return tuple(_gpu(index, row) for index, row in enumerate(rows))


def _is_named(row: list[str], name: str) -> bool:
    return bool(name) and (row[0] == name or row[1].startswith(name))


def _gpu(index: int, row: list[str]) -> Gpu:
    _, _, name, capability, total, free, driver, mode = row
    return Gpu(
        index=index,
        name=name,
        compute_capability=capability,
        total_bytes=_bytes(total),
        free_bytes=_bytes(free),
        driver=driver,
        is_exclusive=mode in EXCLUSIVE_MODES,
    )


def _bytes(mib: str) -> int | None:
    return int(mib) * MIB if mib.isdigit() else None
