"""The engine over tiny pairs: lossless, refusals, what it says of itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engines.base import Engine
from engines.benchmark import settings_of
from engines.config import DEFAULT_MIN_DRAFT_PROB, DraftKind, GenerationRequest, SamplingParams
from engines.errors import GenerationError, IncompatibleModelsError, ModelNotBuiltError
from engines.events import Step
from engines.onnxruntime_backend.backend import OnnxRuntimeBackend
from engines.onnxruntime_backend.cpu import has_integer_products
from engines.stats import stats_of
from engines.store import EngineStore
from tests.conftest import write_tiny_model
from tests.engines.onnxruntime.conftest import HEAD_DIM, config_of, load


def request(engine: Engine, kind: DraftKind, number: int, **settings) -> GenerationRequest:
    ids = engine.encode("one two one two one", chat_template=False)
    return GenerationRequest(ids, kind, number, 24, **settings)


def output(engine: Engine, asked: GenerationRequest) -> list[int]:
    return stats_of(engine.generate(asked)).output_token_ids


@pytest.mark.parametrize("kind", ["model", "prompt_lookup"])
@pytest.mark.parametrize("number", range(1, 9))
def test_greedy_output_is_the_targets_own(engine: Engine, kind: DraftKind, number: int):
    asked = request(engine, kind, number)
    assert output(engine, asked) == output(engine, asked.plain())


@pytest.mark.parametrize("least", [0.0, 0.2, 1.0])
def test_a_request_says_where_drafts_end(engine: Engine, least: float):
    asked = request(engine, "model", 4, min_draft_prob=least)
    steps = [event for event in engine.generate(asked) if isinstance(event, Step)]
    assert settings_of(engine, asked, chat_template=False)["min_draft_prob"] == least
    for step in steps:
        drafted = [*step.tokens[: step.num_accepted_tokens], *(step.rejected or ())]
        probs = [token.draft_prob or 0.0 for token in drafted]
        assert all(prob >= least for prob in probs[:-1])
    most = max(step.num_draft_tokens or 0 for step in steps)
    assert most == {0.0: 4, 1.0: 1}.get(least, most)


def test_where_drafts_end_is_the_engines_own_where_a_request_leaves_it_open(engine: Engine):
    asked = request(engine, "model", 4)
    assert engine.min_draft_prob(asked) == DEFAULT_MIN_DRAFT_PROB
    assert engine.min_draft_prob(asked.plain()) == 0
    named = replace(asked, min_draft_prob=DEFAULT_MIN_DRAFT_PROB)
    assert output(engine, asked) == output(engine, named)


def test_seeds_repeat(engine: Engine):
    asked = request(engine, "model", 3, sampling=SamplingParams(temperature=1, seed=5))
    assert output(engine, asked) == output(engine, asked)


def test_it_says_what_it_is_made_of(engine: Engine):
    info = engine.info
    assert (info.backend, info.dtype, info.draft_dtype) == ("onnxruntime", "float32", "int4")
    assert "threads" in info.device
    assert info.versions.keys() == {"onnxruntime"}


def test_logit_gaps_are_the_targets(engine: Engine):
    ids = engine.encode("one two", chat_template=False)
    best = output(engine, GenerationRequest(ids, max_new_tokens=1))[0]
    gaps = [engine.logit_gap(ids, best, other) for other in range(10) if other != best]
    assert all(gap is not None and gap >= 0 for gap in gaps)


def test_a_context_is_filled_to_its_end(target: Path, draft: Path, tmp_path: Path):
    with load(EngineStore(tmp_path), config_of(target, draft)) as engine:
        limit = engine.info.context_length
        ids = engine.encode("a" * (limit - 5), chat_template=False)
        asked = GenerationRequest(ids, "model", 8, 100)
        assert len(output(engine, asked)) <= limit - len(ids)
        assert output(engine, asked) == output(engine, asked.plain())


def test_a_pair_that_is_not_built_is_told(target: Path, draft: Path, tmp_path: Path):
    backend = OnnxRuntimeBackend(EngineStore(tmp_path))
    with pytest.raises(ModelNotBuiltError, match="is not narrowed yet; build it first"):
        backend.load(config_of(target, draft))
    backend.load(config_of(target)).close()


def test_a_closed_engine_says_so(target: Path, tmp_path: Path):
    engine = load(EngineStore(tmp_path), config_of(target))
    asked = request(engine, "none", 0)
    engine.close()
    assert not engine.is_open
    with pytest.raises(GenerationError, match="the engine is closed"):
        engine.generate(asked)


def test_a_draft_of_another_vocabulary_is_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = write_tiny_model(tmp_path / "other", seed=3, head_dim=HEAD_DIM)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(IncompatibleModelsError, match="their tokenizers differ"):
        load(EngineStore(tmp_path / "store"), config_of(target, other))


def test_without_quick_integers_the_draft_is_float32_and_the_reader_is_told(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in ("backend", "cpu", "engine"):
        name = f"engines.onnxruntime_backend.{module}.has_integer_products"
        monkeypatch.setattr(name, lambda: False, raising=False)
    with load(EngineStore(tmp_path), config_of(target, draft)) as engine:
        assert engine.info.draft_dtype == "float32"
        assert "this processor has no AVX2" in engine.info.notes[0]
        asked = request(engine, "model", 4)
        assert output(engine, asked) == output(engine, asked.plain())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu sse2 avx avx2 fma\n", True),
        ("flags\t\t: fpu sse2 avx\n", False),
        ("", True),
    ],
)
def test_a_processor_lists_what_it_can_do(tmp_path: Path, text: str, expected: bool):
    (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
    assert has_integer_products(tmp_path / "cpuinfo") is expected
    assert has_integer_products(tmp_path / "none")
