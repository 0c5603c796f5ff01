"""The library's errors get their remedies, and other texts none."""

from __future__ import annotations

import pytest

from engines.tensorrt_llm_backend.error_texts import remedy_for, with_remedy


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (
            "draft tokens (4) is larger than maximum number of draft tokens (0)",
            "the target engine is built without drafts: build it anew",
        ),
        (
            "Draft length (8) exceeds maximum draft tokens length (5)",
            "lower num_draft_tokens, or build the target with a larger max_draft_len",
        ),
        (
            "model has to be built with paged context FMHA support",
            "drafts cannot be verified without",
        ),
        (
            "Maximum input length (300) exceeds the engine or specified limit (200)",
            "shorten the prompt or the answer, or build with a larger max_seq_len",
        ),
        (
            "SmolLM3ForCausalLM is not supported in TRT-LLM yet",
            "TensorRT-LLM builds no engine of this architecture",
        ),
        ("Unsupported quantization_config: {}", "use the model in 16 bits"),
        ("INT8/INT4 quantization is not supported on SM>=100", "use FP8 or 16 bits"),
        ("CUDA out of memory. Tried to allocate 14.96 GiB.", "too little free memory"),
        ("[TRT] [E] OutOfMemory (no further information)", "too little free memory"),
        ("OSError: [Errno 28] No space left on device", "the disk is full: make room"),
        ("Failed to deserialize cuda engine.", "remove it with 'python -m engines engines remove'"),
        ("The engine plan file is not compatible with this version", "and build it again"),
        ("libmpi.so.40: cannot open shared object file", "install libopenmpi-dev"),
        ("libpython3.12.so.1.0: cannot open shared object file", "install libpython3-dev"),
        ("its import did not end within 180 s", "MPI, which it starts, may wait for a network"),
        ("building: it did not end within 4 s", "allow it longer with build_timeout_s"),
        ("Couldn't reach 'cnn_dailymail' on the Hub", "let it reach the Hub"),
    ],
)
def test_an_error_that_is_known_has_its_remedy(text: str, remedy: str):
    assert remedy in (remedy_for(text) or "")


@pytest.mark.parametrize("text", ["", "RuntimeError: something new", "Memory usage: 3 GiB"])
def test_an_error_that_is_not_known_is_left_alone(text: str):
    assert remedy_for(text) is None
    assert with_remedy(text) == text


def test_a_remedy_stands_behind_its_error_as_one_sentence():
    assert with_remedy("building: No space left on device.") == (
        "building: No space left on device; the disk is full: make room, or set SPECDEC_STORE to a "
        "folder on another disk"
    )
