"""Models on their way to an engine: from the Hub, from a GGUF file, from a packed draft."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

import pytest

from engines.config import EngineConfig
from engines.errors import EngineBuildError, ModelNotBuiltError
from engines.store import EngineStore
from engines.tensorrt_llm_backend.backend import TensorRTBackend
from tests.engines.distill.test_packing import draft, packed, target  # noqa: F401 - fixtures
from tests.engines.tensorrt_llm.conftest import Install, MakeConfig
from tests.engines.test_backend import write_tiny_gguf
from tests.engines.test_fetch import COMMIT, Hub, hub, model_files  # noqa: F401 - fixtures


def build(backend: TensorRTBackend, config: EngineConfig) -> list[str]:
    """Build, and return the names of the stages."""
    return list(dict.fromkeys(step.name for step in backend.build(config)))


def test_a_hub_model_is_fetched_first(
    hub: Hub,  # noqa: F811
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    make_config: MakeConfig,
):
    fake = install()

    names = build(backend, make_config(target="org/tiny", draft=None))

    assert names == ["fetch org/tiny", "check the pair", "build the target engine"]
    (entry,) = store.entries()
    assert entry.identity["checkpoint"] == f"org/tiny@{COMMIT}"
    assert len(fake.read_calls("from_hugging_face")) == 1


def test_a_gated_model_without_a_token_is_told_and_nothing_is_built(
    hub: Hub,  # noqa: F811
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    make_config: MakeConfig,
):
    fake = install()
    hub.refused = HTTPStatus.FORBIDDEN, "GatedRepo"

    with pytest.raises(EngineBuildError) as caught:
        build(backend, make_config(target="org/tiny", draft=None))
    assert str(caught.value) == (
        "'org/tiny' cannot be fetched: 'org/tiny' is gated: accept its licence there, then log in "
        "with 'hf auth login'"
    )
    assert fake.read_calls() == []
    assert not store.root.exists()


def test_a_hub_model_that_is_not_here_is_told_when_it_is_loaded(
    hub: Hub,  # noqa: F811
    install: Install,
    backend: TensorRTBackend,
    make_config: MakeConfig,
):
    install()

    with pytest.raises(ModelNotBuiltError, match="'org/tiny' is not downloaded yet; build it"):
        backend.load(make_config(target="org/tiny", draft=None))


def test_a_gguf_file_is_converted_first(
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    make_config: MakeConfig,
    tmp_path: Path,
):
    install()
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    config = make_config(target=file, draft=None, max_seq_len=64)

    assert build(backend, config) == [
        "hash tiny",
        "convert tiny",
        "check the pair",
        "build the target engine",
    ]
    converted, engine = sorted(store.entries(), key=lambda entry: entry.identity["kind"])
    assert engine.identity["checkpoint"] == converted.key
    with backend.load(config) as loaded:
        assert loaded.info.target == "tiny"


def test_a_packed_draft_is_unpacked_first_and_one_engine_is_built_of_it(
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    make_config: MakeConfig,
    target: Path,  # noqa: F811
    packed: Path,  # noqa: F811
):
    install()
    config = make_config(target=target, draft=packed)

    assert build(backend, config) == [
        "unpack packed",
        "check the pair",
        "build the target engine",
        "build the draft engine",
    ]
    with backend.load(config) as loaded:
        assert loaded.info.draft == "packed"
    assert build(backend, config) == [
        "check the pair",
        "build the target engine",
        "build the draft engine",
    ]
    assert len(store.entries()) == 3
