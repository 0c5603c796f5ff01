"""What the processor can do: without AVX2, products of 4-bit integers are slower than float32."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def has_integer_products(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether onnxruntime has quick products of 4-bit integers here.

    Args:
        cpuinfo: Where Linux lists what an x86-64 processor can do; taken for able elsewhere.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.is_file():
        return True
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("flags"):
            return "avx2" in line.split()
    return True
