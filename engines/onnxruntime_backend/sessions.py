"""Sessions of onnxruntime over a checkpoint's weights, all on one pool of threads."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import (
    EPFail,
    Fail,
    InvalidArgument,
    InvalidGraph,
    InvalidProtobuf,
    NotImplemented as NotImplementedByRuntime,
    RuntimeException,
)

from engines.environment import usable_cpus
from engines.errors import EngineError, GenerationError, ModelLoadError, translate_errors
from engines.onnxruntime_backend.graph import COSINES, SINES, Wanted, llama_graph
from engines.onnxruntime_backend.llama import EMBEDDINGS, LlamaShape
from engines.tensor_files import Arrays

RUNTIME_ERRORS = (
    EPFail,
    Fail,
    InvalidArgument,
    InvalidGraph,
    InvalidProtobuf,
    NotImplementedByRuntime,
    RuntimeException,
    RuntimeError,  # of a pass that fails
    MemoryError,
)
LOAD_ERRORS: Mapping[type[Exception], type[EngineError]] = dict.fromkeys(
    (*RUNTIME_ERRORS, KeyError, ValueError), ModelLoadError
)
GENERATION_ERRORS: Mapping[type[Exception], type[EngineError]] = dict.fromkeys(
    RUNTIME_ERRORS, GenerationError
)
ERRORS_ONLY = 3  # log_severity_level


@cache
def use_one_pool() -> int:
    """Let all sessions of this process share one pool, and return its number of threads.

    With a pool each, the waiting threads of one model take the processors from the other.
    """
    num_threads = usable_cpus()
    onnxruntime.set_global_thread_pool_sizes(num_threads, 1)
    return num_threads


def shared_options() -> onnxruntime.SessionOptions:
    """Return options of a session that uses the pool, which every one of this process must."""
    use_one_pool()
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = ERRORS_ONLY
    return options


def load_session(
    shape: LlamaShape, arrays: Arrays, *, name: str, is_narrow: bool
) -> onnxruntime.InferenceSession:
    """Return a session over a Llama's weights.

    Args:
        shape: Its sizes.
        arrays: A checkpoint's tensors, in any floating-point type, and where the matrices are
            narrow those of `narrow` beside them.
        name: For people.
        is_narrow: So they are.

    Raises:
        ModelLoadError: A weight is missing or has another size than the configuration says, or
            there is too little memory.
    """
    options = shared_options()
    with translate_errors(f"the model '{name}' cannot be loaded", LOAD_ERRORS):
        dtype = arrays[EMBEDDINGS].dtype
        graph = llama_graph(shape, embeddings_dtype=dtype, is_narrow=is_narrow)
        cosines, sines = shape.rotations(shape.context_length)
        given = {**arrays, COSINES: cosines, SINES: sines}
        weights = {
            weight: _fitting(given, weight, wanted) for weight, wanted in graph.weights.items()
        }
        values = [_value_over(weight) for weight in weights.values()]
        options.add_external_initializers(list(weights), values)
        return onnxruntime.InferenceSession(
            graph.serialized, options, providers=["CPUExecutionProvider"]
        )


def give_back_memory() -> None:
    """Return to the system what loading took for a while, which glibc would keep for later."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _fitting(arrays: Arrays, name: str, wanted: Wanted) -> np.ndarray[Any, Any]:
    if name not in arrays:
        raise ModelLoadError(f"the weight {name} is missing; fetch or convert the model again")
    array = arrays[name]
    if array.shape != wanted.sizes:
        raise ModelLoadError(
            f"the weight {name} is {list(array.shape)}, not {list(wanted.sizes)} as config.json "
            "says; fetch or convert the model again"
        )
    return np.ascontiguousarray(array.astype(wanted.dtype, copy=False))


def _value_over(array: np.ndarray[Any, Any]) -> onnxruntime.OrtValue:
    """Return the value that lies where the array does."""
    if array.dtype == ml_dtypes.bfloat16:  # unknown to the usual way
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            array.view(np.uint16), helper.np_dtype_to_tensor_dtype(array.dtype)
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
