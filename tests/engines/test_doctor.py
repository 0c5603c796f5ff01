"""The doctor: what is usable here and why not, without loading a model or asking the network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines import bundled
from engines.backends import BACKENDS
from engines.checkpoints import bundled_key
from engines.child import PROJECT_ROOT
from engines.doctor import doctor
from engines.store import EngineStore

pytestmark = pytest.mark.usefixtures("no_bundled_file")


def bundled_state(store: EngineStore) -> str:
    state = doctor(store)["bundled"]["state"]
    assert isinstance(state, str)
    return state


def test_the_report_can_be_printed_as_json(store: EngineStore):
    report = json.loads(json.dumps(doctor(store)))

    assert set(report["backends"]) == set(BACKENDS)
    assert report["backends"]["transformers"]["usable"]
    assert report["memory_available_bytes"] > 0
    assert report["store"]["folder"] == str(store.root)
    assert report["store"]["free_bytes"] > 0
    assert report["store"]["engines"] == []
    assert report["environment"]["num_cpus"] >= 1


def test_looking_makes_no_folder(store: EngineStore):
    doctor(store)

    assert not store.root.exists()


def test_built_engines_are_listed(store: EngineStore):
    with store.aside("tiny-0123") as folder:
        entry = store.commit(folder, key="tiny-0123", name="tiny", identity={})

    assert doctor(store)["store"]["engines"] == [entry.to_dict()]


def test_of_a_bundled_target_that_is_nowhere_the_download_is_told(store: EngineStore):
    assert bundled_state(store) == "not built; the first build fetches 98 MB"


def test_of_a_bundled_target_that_lies_here_the_place_is_told(
    store: EngineStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(b"")
    monkeypatch.setenv(bundled.LOCAL_VARIABLE, str(copy))

    assert bundled_state(store) == f"not built; its file is here already: {copy}"


def test_of_a_named_copy_that_is_missing_the_name_is_told(
    store: EngineStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(bundled.LOCAL_VARIABLE, "/none.gguf")

    assert bundled_state(store) == "SPECDEC_BUNDLED_GGUF names '/none.gguf', which is not a file"


def test_a_built_and_a_damaged_bundled_target_are_told_apart(store: EngineStore):
    with store.aside(bundled_key()) as folder:
        (folder / "model.safetensors").write_bytes(b"123")
        entry = store.commit(folder, key=bundled_key(), name="bundled", identity={})
    assert bundled_state(store) == "built"

    (entry.path / "model.safetensors").unlink()

    assert "is damaged: model.safetensors is missing; remove it with" in bundled_state(store)


def test_a_torch_that_cannot_be_imported_is_told_with_the_remedy(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: no such file')")
    script = "from engines.doctor import doctor; print(doctor()['backends']['transformers'])"
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=PROJECT_ROOT,
        env={"PYTHONPATH": str(tmp_path), "SPECDEC_STORE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "'usable': False" in result.stdout
    assert (
        "libcudart.so: no such file): run 'pip install -r requirements-torch.txt'" in result.stdout
    )
