"""The versions of TensorRT-LLM: which flows each has, by which names, and that they run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from engines.base import Engine
from engines.config import DraftKind, GenerationRequest, SamplingParams
from engines.errors import BackendUnavailableError
from engines.events import Finish
from engines.slot import EngineSlot
from engines.tensorrt_llm_backend.backend import TensorRTBackend
from engines.tensorrt_llm_backend.installation import find_installation
from tests.engines.tensorrt_llm.conftest import Install, MakeConfig
from tests.engines.tensorrt_llm.machine import continuation, ids_of, repeating
from tests.fake_tensorrt_llm.scenario import Scenario, Version
from tests.fake_tensorrt_llm.site import FakeInstall

PROMPT = repeating((40, 41, 42), 9)
OLD_NAME, NEW_NAME = "speculative_model_dir", "speculative_model"


@dataclass(frozen=True)
class Expected:
    """What a version has."""

    has_engines: bool
    is_two_model: bool  # its PyTorch flow samples with a draft model, and times it
    counts_drafts: bool
    model_name: str  # of the draft, as a field of DraftTargetDecodingConfig


VERSIONS: dict[Version, Expected] = {
    "1.0.0": Expected(True, True, False, OLD_NAME),
    "1.1.0": Expected(True, True, False, OLD_NAME),
    "1.2.1": Expected(True, True, True, NEW_NAME),
    "1.3.0rc15": Expected(True, False, True, NEW_NAME),
    "1.3.0rc22": Expected(False, False, True, NEW_NAME),
    "1.4.0rc1": Expected(False, False, True, NEW_NAME),
}


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> Version:
    chosen: Version = request.param
    return chosen


@pytest.fixture
def expected(version: Version) -> Expected:
    return VERSIONS[version]


@pytest.fixture
def fake(version: Version, install: Install) -> FakeInstall:
    return install(Scenario(version=version))


def request_of(kind: DraftKind, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        PROMPT, kind, 0 if kind == "none" else 3, 20, SamplingParams(**sampling)
    )


def assert_that_it_says_what_the_target_would(engine: Engine) -> None:
    for kind in engine.draft_kinds:
        assert ids_of(engine, request_of(kind)) == continuation(PROMPT, 20)


def test_every_version_that_the_fake_plays_is_tested():
    assert tuple(VERSIONS) == get_args(Version)


def test_a_version_is_known_by_what_is_installed(
    fake: FakeInstall, version: Version, expected: Expected, backend: TensorRTBackend
):
    installation = find_installation()
    flows = ("builds and runs engines",) if expected.has_engines else ()

    assert installation.version == version
    assert installation.flows == (*flows, "runs the PyTorch flow")
    assert installation.is_two_model == expected.is_two_model
    status = backend.probe()
    assert status.usable
    assert status.detail.startswith(f"TensorRT-LLM {version} {' and '.join(installation.flows)};")


def test_a_version_builds_and_runs_by_itself(
    fake: FakeInstall, version: Version, expected: Expected, slot: EngineSlot, make_config
):
    options = {"acceptance": "logits"} if expected.has_engines else {}
    engine = slot.load(make_config(**options))
    assert engine.info.versions["tensorrt_llm"] == version
    assert engine.draft_kinds == ("model", "prompt_lookup", "none")
    assert_that_it_says_what_the_target_would(engine)
    if expected.has_engines:
        assert ids_of(engine, request_of("model", temperature=1.0)) != continuation(PROMPT, 20)

    assert len(fake.read_calls("builder.build")) == (2 if expected.has_engines else 0)
    assert len(fake.read_calls("from_dir")) == (2 if expected.has_engines else 0)
    assert bool(fake.read_calls("llmapi.LLM")) != expected.has_engines


def test_a_version_runs_the_pytorch_flow_under_its_own_names(
    fake: FakeInstall,
    expected: Expected,
    slot: EngineSlot,
    make_config: MakeConfig,
    tiny_draft: Path,
):
    engine = slot.load(make_config(flow="pytorch"))
    assert_that_it_says_what_the_target_would(engine)

    (draft,) = fake.read_calls("DraftTargetDecodingConfig")
    assert draft["args"] == {"max_draft_len": 3, expected.model_name: str(tiny_draft)}
    (lookup,) = fake.read_calls("NGramDecodingConfig")
    assert lookup["args"]["max_draft_len"] == 3


def test_a_version_counts_drafts_or_says_that_it_does_not(
    fake: FakeInstall, expected: Expected, slot: EngineSlot, make_config: MakeConfig
):
    engine = slot.load(make_config(flow="pytorch"))
    *_, last = engine.generate(request_of("model"))

    assert isinstance(last, Finish)
    assert (last.totals.num_draft_tokens is not None) == expected.counts_drafts
    is_timed = expected.counts_drafts and expected.is_two_model
    assert (last.totals.draft_s is not None) == is_timed


def test_a_version_samples_with_a_draft_model_where_that_is_an_engine_of_its_own(
    fake: FakeInstall, expected: Expected, slot: EngineSlot, make_config: MakeConfig
):
    engine = slot.load(make_config(flow="pytorch"))
    sampled = request_of("model", temperature=0.9)

    if expected.is_two_model:
        assert ids_of(engine, sampled) != continuation(PROMPT, 20)
    else:
        with pytest.raises(ValueError, match=r"temperature is 0.9: this version's PyTorch flow"):
            engine.generate(sampled)


def test_engines_are_asked_of_versions_that_have_them(
    fake: FakeInstall, version: Version, expected: Expected, backend: TensorRTBackend, make_config
):
    config = make_config(flow="engine")
    if expected.has_engines:
        assert next(backend.build(config)).name == "check the pair"
    else:
        with pytest.raises(
            BackendUnavailableError,
            match=rf"TensorRT-LLM {version} has no TensorRT engines .*1\.2\.1",
        ):
            next(backend.build(config))
