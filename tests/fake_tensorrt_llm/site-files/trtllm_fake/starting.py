"""What importing tensorrt_llm does to a process: it prints, and it may fail, hang or read."""

from __future__ import annotations

import os

from trtllm_fake.api import Given, implements_function
from trtllm_fake.state import hang, log_call, print_line, scenario


def start() -> None:
    """Play the import of the package."""
    fault = scenario()["import_"]
    print_line(f"[TensorRT-LLM] TensorRT-LLM version: {scenario()['version']}")
    if fault == "hang":
        hang()
    if fault == "fail":
        raise ImportError("libmpi.so.40: cannot open shared object file: No such file or directory")
    if fault == "libpython":
        raise OSError(
            "libpython3.12.so.1.0: cannot open shared object file: No such file or directory"
        )
    if fault == "stdin":
        log_call("stdin", {"num_bytes": len(os.read(0, 65536))})


@implements_function("tensorrt_llm.mpi_rank")
def mpi_rank(given: Given) -> int:
    return 0


@implements_function("tensorrt_llm.mpi_world_size")
def mpi_world_size(given: Given) -> int:
    return 1
