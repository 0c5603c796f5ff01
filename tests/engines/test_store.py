"""The engine store: keys, the manifest that comes last, damage, locks, leftovers, removal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.child import PROJECT_ROOT
from engines.errors import EngineBuildError
from engines.store import MANIFEST, EngineStore, StoreEntry, default_store_root, engine_key

IDENTITY = {"kind": "checkpoint", "gguf_sha256": "00ff", "conversion_version": 1}
KEY = engine_key("Tiny Model", IDENTITY)

# Says a line once it holds the lock, then waits to be killed.
HOLD_LOCK = """
import sys
from pathlib import Path
from engines.store import EngineStore

with EngineStore(Path(sys.argv[1])).lock(sys.argv[2]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def build(store: EngineStore, name: str = "Tiny Model", *, weights: bytes = b"12345") -> StoreEntry:
    identity = {**IDENTITY, "name": name}
    key = engine_key(name, identity)
    with store.aside(key) as folder:
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.json").write_text("{}")
        return store.commit(folder, key=key, name=name, identity=identity)


@contextmanager
def lock_of_another_process(store: EngineStore, key: str) -> Iterator[subprocess.Popen[str]]:
    store.root.mkdir(parents=True, exist_ok=True)
    script = store.root / "hold_lock.py"
    script.write_text(HOLD_LOCK)
    with subprocess.Popen(
        [sys.executable, str(script), str(store.root), key],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_equal_identities_have_one_key():
    assert engine_key("Tiny Model", dict(reversed(IDENTITY.items()))) == KEY


@pytest.mark.parametrize("changed", [*IDENTITY, "added"])
def test_the_key_changes_with_everything_in_the_identity(changed: str):
    assert engine_key("Tiny Model", {**IDENTITY, changed: "another"}) != KEY


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("SmolLM2-135M", "smollm2-135m"),
        ("org/model v2.gguf", "org-model-v2-gguf"),
        ("../../etc", "etc"),
        ("模型", "engine"),
        ("", "engine"),
        ("x" * 300, "x" * 48),
    ],
)
def test_a_key_is_a_plain_folder_name(name: str, slug: str):
    readable, _, digest = engine_key(name, IDENTITY).rpartition("-")

    assert readable == slug
    assert len(digest) == 12


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECDEC_STORE", str(tmp_path))

    assert default_store_root() == tmp_path


def test_without_a_name_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SPECDEC_STORE", raising=False)

    assert default_store_root().parts[-2:] == ("specdec-playground", "engines")


def test_a_committed_engine_is_found_with_all_that_was_said_of_it(store: EngineStore):
    entry = build(store)

    assert store.find(entry.key) == entry
    assert (entry.name, entry.num_bytes) == ("Tiny Model", 7)
    assert entry.files == {"model.safetensors": 5, "tokenizer/vocab.json": 2}
    assert entry.path.parent == store.root


def test_an_entry_can_be_printed_as_json(store: EngineStore):
    entry = build(store)

    assert json.loads(json.dumps(entry.to_dict()))["num_bytes"] == 7


def test_what_is_built_aside_is_no_engine_before_it_is_committed(store: EngineStore):
    with store.aside(KEY) as folder:
        (folder / "model.safetensors").write_bytes(b"12345")

        assert store.find(KEY) is None
        assert store.entries() == []
    assert not folder.exists()


def test_a_folder_without_a_manifest_is_no_engine(store: EngineStore):
    entry = build(store)
    (entry.path / MANIFEST).unlink()

    assert store.find(entry.key) is None
    assert not store.holds(entry.key)
    assert store.entries() == []


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "{",
        "[]",
        '{"manifest_version": 2}',
        '{"manifest_version": 1}',
        '{"manifest_version": 1, "name": "x", "created": "", "identity": {}, "files": 3}',
        '{"manifest_version": 1, "name": "x", "created": "", "identity": 3, "files": {}}',
        '{"manifest_version": 1, "name": "x", "created": "", "identity": {}, "files": {"a": "b"}}',
    ],
)
def test_an_unreadable_manifest_is_no_manifest(store: EngineStore, manifest: str):
    entry = build(store)
    (entry.path / MANIFEST).write_text(manifest)

    assert store.find(entry.key) is None
    assert store.entries() == []


def test_a_file_cut_short_is_told_with_both_sizes_and_the_remedy(store: EngineStore):
    entry = build(store)
    (entry.path / "model.safetensors").write_bytes(b"123")

    with pytest.raises(EngineBuildError, match=r"model\.safetensors has 3 bytes, not 5; remove it"):
        store.find(entry.key)
    assert not store.holds(entry.key)


def test_a_missing_file_is_told_with_the_remedy(store: EngineStore):
    entry = build(store)
    (entry.path / "tokenizer" / "vocab.json").unlink()

    with pytest.raises(EngineBuildError, match=rf"is missing; .*engines remove {entry.key}"):
        store.find(entry.key)


def test_a_whole_engine_is_held(store: EngineStore):
    assert store.holds(build(store).key)


def test_committing_again_replaces_a_damaged_engine(store: EngineStore):
    entry = build(store)
    (entry.path / "model.safetensors").unlink()

    build(store)

    assert store.holds(entry.key)


def test_entries_come_oldest_first(store: EngineStore):
    for name, created in (("b", "2026-01-02"), ("a", "2026-01-03"), ("c", "2026-01-01")):
        manifest = build(store, name).path / MANIFEST
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "created": created}))

    assert [entry.name for entry in store.entries()] == ["c", "b", "a"]


def test_a_store_that_does_not_exist_yet_is_empty(tmp_path: Path):
    assert EngineStore(tmp_path / "nowhere").entries() == []


def test_removing_returns_the_bytes_and_leaves_nothing(store: EngineStore):
    entry = build(store)

    assert store.remove(entry.key) == 7
    assert not entry.path.exists()
    assert store.entries() == []


def test_a_damaged_engine_can_be_removed(store: EngineStore):
    entry = build(store)
    (entry.path / "model.safetensors").unlink()

    store.remove(entry.key)

    assert not entry.path.exists()


@pytest.mark.parametrize("key", ["other", "", ".", "..", "../x", ".locks", "/", "a/../b"])
def test_removing_what_is_no_key_names_the_keys_there_are(store: EngineStore, key: str):
    outside = build(EngineStore(store.root.parent), "x")
    outside.path.rename(store.root.parent / "x")
    kept = build(store)

    with pytest.raises(EngineBuildError, match=f"built are: {kept.key}"):
        store.remove(key)
    assert store.holds(kept.key)
    assert (store.root.parent / "x" / MANIFEST).is_file()


def test_an_engine_that_another_process_builds_cannot_be_removed(store: EngineStore):
    entry = build(store)
    with (
        lock_of_another_process(store, entry.key),
        pytest.raises(EngineBuildError, match=f"'{entry.key}' is being built or removed already"),
    ):
        store.remove(entry.key)

    assert store.holds(entry.key)


def test_the_lock_of_a_killed_process_is_free(store: EngineStore):
    with lock_of_another_process(store, KEY) as process:
        process.kill()
        process.wait()

        with store.lock(KEY):
            pass


def test_two_engines_can_be_built_at_once(store: EngineStore):
    with lock_of_another_process(store, KEY), store.lock("another"):
        pass


def test_what_a_killed_build_left_goes_with_the_next_build(store: EngineStore):
    leftover = store.root / f".building-{KEY}-1"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"123")

    with store.aside(KEY) as folder:
        assert not leftover.exists()
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("root", ["file", "file/below"])
def test_a_store_that_cannot_be_a_folder_is_told(tmp_path: Path, root: str):
    (tmp_path / "file").write_text("")

    with (
        pytest.raises(EngineBuildError, match=r"cannot be written.*SPECDEC_STORE"),
        EngineStore(tmp_path / root).lock(KEY),
    ):
        pass
