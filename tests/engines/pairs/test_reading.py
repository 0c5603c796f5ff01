"""Pairs as a user names them: read from wherever they are, again where a file has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engines import bundled
from engines.errors import ModelLoadError, ModelNotBuiltError
from engines.generators import finished
from engines.pairs.compatibility import PairReport
from engines.pairs.profile import ModelProfile, TokenizerProfile
from engines.pairs.reading import check_references
from engines.store import EngineStore
from tests.engines.pairs.tokenizers_of_kinds import WORDS, bpe, write_model


def check(target: Path | str, draft: Path | str, store: EngineStore) -> PairReport:
    return finished(check_references(str(target), str(draft), store))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two models without weights."""
    target = write_model(tmp_path / "target", bpe())
    return target, write_model(tmp_path / "draft", bpe(), num_hidden_layers=1)


def test_folders_are_read_without_weights(pair: tuple[Path, Path], store: EngineStore):
    found = check(*pair, store)
    assert found.outcome == "ok"
    assert (found.target, found.draft) == ("target", "draft")


def test_fr07_a_file_that_changed_is_read_again(
    pair: tuple[Path, Path], store: EngineStore, monkeypatch: pytest.MonkeyPatch
):
    assert check(*pair, store).outcome == "ok"
    monkeypatch.setattr(ModelProfile, "load", pytest.fail)
    assert check(*pair, store).outcome == "ok"
    monkeypatch.undo()

    file = pair[1] / "tokenizer.json"
    before = file.stat()
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["cat"], vocabulary["dog"] = vocabulary["dog"], vocabulary["cat"]
    file.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if it had not

    assert check(*pair, store).outcome == "refused"


def test_a_tokenizer_that_cannot_be_used_is_a_sentence(
    pair: tuple[Path, Path], store: EngineStore, monkeypatch: pytest.MonkeyPatch
):
    def fail(tokenizer: object) -> None:
        raise ValueError("it says nothing")

    monkeypatch.setattr(TokenizerProfile, "of", fail)
    with pytest.raises(ModelLoadError, match="the tokenizer of 'target' cannot be used: it says"):
        check(*pair, store)


def test_a_model_that_is_not_there_is_told(pair: tuple[Path, Path], store: EngineStore):
    with pytest.raises(ModelLoadError, match="there is no model '/nowhere'"):
        check(pair[0], "/nowhere", store)


@pytest.mark.parametrize("name", ["org/../x", "../x", "org/x/../../y", "org/.."])
def test_a_name_that_climbs_out_is_no_model(name: str, pair: tuple[Path, Path], store: EngineStore):
    with pytest.raises(ModelLoadError, match="there is no model"):
        check(pair[0], name, store)


def test_a_bundled_target_that_is_nowhere_yet_is_told(
    store: EngineStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bundled, "local_copy", lambda: None)
    with pytest.raises(ModelNotBuiltError, match="build it first"):
        check("bundled", "bundled-draft", store)


@pytest.mark.bundled
def test_the_bundled_pair_is_compatible():
    found = check("bundled", "bundled-draft", EngineStore())
    assert found.outcome == "ok"
    assert found.results[-1].text == "the draft has 49.6 million weights, 0.37 of the target's"


def test_words_of_the_fixtures_are_ids():
    assert bpe().get_vocab() == {word: id_ for id_, word in enumerate(WORDS)}
