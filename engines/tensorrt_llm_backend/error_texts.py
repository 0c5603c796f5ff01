"""What the library's errors mean and what to do: fragments of its texts to remedies."""

from __future__ import annotations

REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("larger than maximum number of draft tokens", "max_draft_len has to be larger than 0"),
        "the target engine is built without drafts: build it anew",
    ),
    (
        ("exceeds maximum draft tokens length",),
        "lower num_draft_tokens, or build the target with a larger max_draft_len",
    ),
    (
        ("paged context FMHA",),
        "drafts cannot be verified without: build the engine in bfloat16, or in FP8 with an FP8 "
        "cache",
    ),
    (
        ("exceeds the engine or specified limit",),
        "shorten the prompt or the answer, or build with a larger max_seq_len",
    ),
    (
        ("is not supported in TRT-LLM yet",),
        "TensorRT-LLM builds no engine of this architecture: use another model or the PyTorch flow",
    ),
    (
        ("Pre-quantized checkpoint must have quant_algo", "Unsupported quantization_config"),
        "use the model in 16 bits, or an FP8 folder of NVIDIA's",
    ),
    (
        ("quantization is not supported on SM>=100",),
        "this GPU has no INT8 or INT4 weights: use FP8 or 16 bits",
    ),
    (
        ("Drafting is not supported for selected executor loop",),
        "the PyTorch flow drafts without pipeline parallelism only",
    ),
    (
        ("out of memory", "OutOfMemory", "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY"),
        "the GPU has too little free memory: end what else runs there, lower max_seq_len, use FP8, "
        "or more GPUs",
    ),
    (
        ("No space left on device", "Errno 28"),
        "the disk is full: make room, or set SPECDEC_STORE to a folder on another disk",
    ),
    (
        (
            "deserialize",
            "version tag does not match",
            "Serialization assertion",
            "incompatible device",
            "engine plan file",
        ),
        "the engine is damaged, or of another TensorRT-LLM or GPU: remove it with 'python -m "
        "engines engines remove' and build it again",
    ),
    (
        ("libmpi", "MPI_Init", "mpi4py", "ORTE", "PMIX"),
        "Open MPI is missing or broken: on Debian, 'sudo apt-get install libopenmpi-dev'",
    ),
    (("libpython",), "its Python needs the shared library: on Debian, install libpython3-dev"),
    (
        ("import did not end within",),
        "MPI, which it starts, may wait for a network: run python -c 'import tensorrt_llm' in a "
        "terminal, and Ctrl-C shows where it waits",
    ),
    (("it did not end within",), "allow it longer with build_timeout_s"),
    (
        ("Couldn't reach", "ConnectionError"),
        "calibration downloads the library's data set: let it reach the Hub, or use an FP8 folder "
        "of NVIDIA's",
    ),
)


def remedy_for(text: str) -> str | None:
    """Return what to do about an error, None where that is not known."""
    return next(
        (remedy for fragments, remedy in REMEDIES if any(part in text for part in fragments)), None
    )


def with_remedy(text: str) -> str:
    """Return an error's text, and behind it what to do where that is known."""
    remedy = remedy_for(text)
    return text if remedy is None else f"{text.rstrip('. ')}; {remedy}"
