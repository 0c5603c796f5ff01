"""The bundled pair on onnxruntime: its logits, its output, and what builds are held to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.base import Engine
from engines.bench.runs import PROMPTS
from engines.checkpoints import built_path, parse_reference
from engines.config import BUNDLED, GenerationRequest
from engines.errors import EngineBuildError
from engines.onnxruntime_backend import reference as reference_module
from engines.onnxruntime_backend.check import check
from engines.onnxruntime_backend.engine import OnnxEngine
from engines.onnxruntime_backend.reference import ReferenceLogits
from engines.stats import stats_of
from engines.store import EngineStore
from engines.transformers_backend.model import load_model
from engines.unpacking import file_sha256

pytestmark = pytest.mark.bundled

# Of the float32 file that transformers 5.24.0 writes for the bundled target: another conversion
# would be another model under the same key of the store.
CONVERTED_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"


@pytest.fixture(scope="module")
def pair(bundled_engine: Engine) -> OnnxEngine:
    assert isinstance(bundled_engine, OnnxEngine)  # the embedded default on a CPU
    return bundled_engine


def test_logits_are_those_of_transformers_in_float32(pair: OnnxEngine):
    path = built_path(parse_reference(BUNDLED), EngineStore())
    model = load_model(path, name=BUNDLED, dtype=torch.float32, device=torch.device("cpu"))
    for prompt in PROMPTS[:2]:
        ids = pair.encode(prompt, chat_template=True)
        with torch.inference_mode():
            theirs = model(torch.tensor([ids])).logits[0].numpy()
        ours = pair.open_target(len(ids)).forward(ids, num_logits=len(ids))
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_the_recorded_logits_are_those_of_the_engine(pair: OnnxEngine):
    recorded = ReferenceLogits.load()
    ids = pair.encode(reference_module.TEXT, chat_template=False)
    assert ids == recorded.token_ids
    logits = pair.open_target(len(ids)).forward(ids, num_logits=len(ids))
    assert recorded.deviation(logits) <= 1e-3
    assert recorded.made_with.startswith("transformers")


def test_another_model_does_not_pass_for_the_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    values = json.loads(reference_module.FILE.read_text(encoding="utf-8"))
    values["logits"][3][0] += 0.01
    (tmp_path / "logits.json").write_text(json.dumps(values), encoding="utf-8")
    monkeypatch.setattr(reference_module, "FILE", tmp_path / "logits.json")
    with pytest.raises(EngineBuildError, match=r"these logits and those of .* differ by 0\.01"):
        check(EngineStore().root, BUNDLED, None)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_each_number_of_draft_tokens_gives_the_targets_own_output(pair: OnnxEngine, prompt: str):
    ids = pair.encode(prompt, chat_template=True)
    plain = stats_of(pair.generate(GenerationRequest(ids, max_new_tokens=48))).output_token_ids
    for number in range(1, 9):
        for least in (0.0, None):
            request = GenerationRequest(ids, "model", number, 48, min_draft_prob=least)
            assert stats_of(pair.generate(request)).output_token_ids == plain, (number, least)


def test_the_conversion_is_the_one_that_transformers_makes():
    file = built_path(parse_reference(BUNDLED), EngineStore()) / "model.safetensors"
    assert file_sha256(file) == CONVERTED_SHA256
