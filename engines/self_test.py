"""The self-test: every usable back end runs the bundled pair, and must say what the reference says.

The reference is PyTorch in float32, or without it onnxruntime. A back end in 16 bits may choose
otherwise where the reference nearly does, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engines.base import BuildProgress, Engine
from engines.config import (
    BUNDLED,
    BUNDLED_DRAFT,
    EngineConfig,
    GenerationRequest,
    TensorRTOptions,
)
from engines.errors import EngineError
from engines.slot import EngineSlot
from engines.stats import first_difference, stats_of

REFERENCES = ("transformers", "onnxruntime")  # the first of them that is usable
PROMPT = "Count from one to twenty in words."
MAX_NEW_TOKENS = 48
NUM_DRAFT_TOKENS = 3
NEAR_TIE = 0.5  # a logit gap that rounding to 16 bits can turn over


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What came out for one back end."""

    backend: str
    passed: bool
    detail: str


def self_test(
    backends: Sequence[str],
    slot: EngineSlot,
    on_progress: Callable[[BuildProgress], None],
    python: str | None = None,
) -> list[SelfTest]:
    """Build and run the bundled pair greedily on each back end, with its draft and without.

    Args:
        backends: The usable ones, a reference among them.
        slot: Loads one after the other, the reference last.
        on_progress: Is told of builds and loads.
        python: The interpreter that has TensorRT-LLM; None: the usual one.
    """
    outputs: dict[str, list[list[int]] | EngineError] = {}
    reference_name = next(name for name in REFERENCES if name in backends)
    try:
        for name in backends:
            if name != reference_name:
                options = TensorRTOptions(python=python)
                config = EngineConfig(name, BUNDLED, BUNDLED_DRAFT, tensorrt_llm=options)
                try:
                    outputs[name] = _outputs(slot.load(config, on_progress))
                except EngineError as exc:
                    outputs[name] = exc
        config = EngineConfig(reference_name, BUNDLED, BUNDLED_DRAFT, dtype="float32")
        reference = slot.load(config, on_progress)
        outputs[reference_name] = own = _outputs(reference)
        return [_judged(name, output, reference, own[1]) for name, output in outputs.items()]
    finally:
        slot.close()


def _outputs(engine: Engine) -> list[list[int]]:
    """Return the ids with drafts, and without."""
    request = _request(engine)
    return [stats_of(engine.generate(side)).output_token_ids for side in (request, request.plain())]


def _request(engine: Engine) -> GenerationRequest:
    token_ids = engine.encode(PROMPT, chat_template=True)
    return GenerationRequest(token_ids, "model", NUM_DRAFT_TOKENS, MAX_NEW_TOKENS)


def _judged(
    name: str, output: list[list[int]] | EngineError, reference: Engine, expected: list[int]
) -> SelfTest:
    if isinstance(output, EngineError):
        return SelfTest(name, False, str(output))
    details, passed = [], True
    for side, token_ids in zip(("with drafts", "plain"), output, strict=True):
        difference = first_difference(token_ids, expected)
        if difference is None:
            details.append(f"{side}: the reference's {len(expected)} tokens")
            continue
        theirs, right = difference.speculative_token_id, difference.baseline_token_id
        gap = None
        if theirs is not None and right is not None:
            before = (*_request(reference).prompt_token_ids, *expected[: difference.position])
            gap = reference.logit_gap(before, right, theirs)
        passed &= gap is not None and gap < NEAR_TIE
        where = f"{side}: parts from the reference at token {difference.position + 1}"
        details.append(where if gap is None else f"{where}, where its logits are {gap:.3f} apart")
    return SelfTest(name, passed, "; ".join(details))
