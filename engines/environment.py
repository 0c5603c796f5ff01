"""The machine: what a figure was measured on, and how much room there is."""

from __future__ import annotations

import os
import platform
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from engines.packages import version_of

PACKAGES = ("onnxruntime", "torch", "transformers", "gradio", "numpy")


def environment() -> dict[str, Any]:
    """Return what a reader needs to judge a figure. No names of users, hosts or folders."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "num_cpus": usable_cpus(),
        "memory_bytes": psutil.virtual_memory().total,
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
    }


def free_disk_bytes(folder: Path) -> int:
    """Return what is free where a folder is, or would be made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def gigabytes(num_bytes: int) -> str:
    """Return a size for people."""
    return f"{num_bytes / 1e9:.1f} GB"


def usable_cpus() -> int:
    """Return the processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
