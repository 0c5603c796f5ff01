"""The output folder: which are refused, what survives, what ends with the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.distill.output_folder import check_output
from engines.distill.workspace import Workspace
from engines.errors import EngineBuildError
from tests.engines.conftest import largest_file

IDENTITY = {"target": "bundled", "layers": [0, 1], "seed": 0}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "draft")


def new(_: Workspace) -> None:
    """Leave it as it is: nothing is there."""


def empty(workspace: Workspace) -> None:
    (workspace.folder / "also" / "empty").mkdir(parents=True)


def a_file(workspace: Workspace) -> None:
    workspace.folder.write_text("")


def foreign(workspace: Workspace) -> None:
    workspace.folder.mkdir()
    (workspace.folder / "thesis.txt").write_text("all of it")


def foreign_inside(workspace: Workspace) -> None:
    (workspace.folder / "distill").mkdir(parents=True)
    (workspace.folder / "distill" / ".hidden").write_text("")


def interrupted(workspace: Workspace) -> None:
    workspace.open(IDENTITY)


NOTHING_TO_RESUME = "'{}' holds no interrupted run to resume: begin one, or name another folder"


@pytest.mark.parametrize(
    ("make", "resume", "told"),
    [
        (new, False, None),
        (empty, False, None),
        (interrupted, True, None),
        (a_file, False, "'{}' is a file: name a folder for the draft"),
        (a_file, True, "'{}' is a file: name a folder for the draft"),
        (foreign, False, "the folder '{}' is not empty: name a new or an empty one"),
        (foreign_inside, False, "the folder '{}' is not empty: name a new or an empty one"),
        (interrupted, False, "'{}' holds an interrupted run: resume it, or name another folder"),
        (new, True, NOTHING_TO_RESUME),
        (empty, True, NOTHING_TO_RESUME),
        (foreign, True, NOTHING_TO_RESUME),
    ],
)  # fmt: skip
def test_a_folder_is_taken_or_refused_in_a_sentence(
    workspace: Workspace, make: Callable[[Workspace], None], resume: bool, told: str | None
):
    make(workspace)
    before = sorted(workspace.folder.rglob("*"))
    if told is None:
        check_output(workspace.folder, resume=resume)
    else:
        with pytest.raises(EngineBuildError) as caught:
            check_output(workspace.folder, resume=resume)
        assert str(caught.value) == told.format(workspace.folder)

    assert sorted(workspace.folder.rglob("*")) == before


def test_a_state_is_read_back_by_the_run_that_resumes(workspace: Workspace):
    state = workspace.open(IDENTITY)
    assert state["phases"] == {}

    state["phases"]["generate"] = {"num_chunks": 3}
    workspace.write_state(state)

    assert workspace.open(IDENTITY) == state


@pytest.mark.parametrize(
    ("key", "value"), [("seed", 1), ("layers", [0, 2]), ("target", "org/other")]
)
def test_a_run_that_was_begun_as_another_is_told_what_differs(
    workspace: Workspace, key: str, value: object
):
    workspace.open(IDENTITY)

    with pytest.raises(EngineBuildError) as caught:
        workspace.open({**IDENTITY, key: value})

    assert str(caught.value) == (
        f"the run in '{workspace.folder}' was begun with another {key} ({IDENTITY[key]!r}, not "
        f"{value!r}): repeat it as it was, or name another folder"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "state.json' cannot be read: Expecting property name"),
        (json.dumps({"version": 0}), "was begun by another version: name another folder"),
    ],
)
def test_a_state_that_cannot_be_gone_on_with_is_refused(workspace: Workspace, text: str, told: str):
    workspace.open(IDENTITY)
    (workspace.work / "state.json").write_text(text)

    with pytest.raises(EngineBuildError, match=told):
        workspace.open(IDENTITY)


def test_a_folder_is_of_one_run_at_a_time(tmp_path: Path):
    first, second = (Workspace(tmp_path / "draft") for _ in range(2))
    state = first.open(IDENTITY)

    with pytest.raises(EngineBuildError) as caught:
        second.open(IDENTITY)
    assert str(caught.value) == (
        f"another run is at work in '{second.folder}': wait for it, or name another folder"
    )

    del first  # as when its process has ended
    assert second.open(IDENTITY) == state


def test_a_run_that_began_nothing_leaves_the_folder_free(workspace: Workspace):
    workspace.open(IDENTITY)
    (workspace.work / "state.json").unlink()  # as before it was first written
    assert [path.name for path in workspace.work.iterdir()] in ([], ["lock"])

    check_output(workspace.folder, resume=False)


def test_what_a_killed_run_left_half_written_is_removed(workspace: Workspace):
    workspace.open(IDENTITY)
    workspace.replace("README.md", lambda path: path.write_text("card"))
    leftovers = [workspace.folder / ".model.safetensors.part", workspace.work / ".state.json.part"]
    for path in leftovers:
        path.write_text("ha")

    workspace.open(IDENTITY)

    assert not any(path.exists() for path in leftovers)
    assert (workspace.folder / "README.md").read_text() == "card"


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:40],
        lambda whole: whole[:-30],
        lambda whole: b"hello",
        lambda whole: bytes(len(whole)),
    ],
    ids=["empty", "begun", "cut", "other", "zeros"],
)
def test_a_damaged_file_is_told_in_a_sentence(
    workspace: Workspace, damage: Callable[[bytes], bytes]
):
    workspace.open(IDENTITY)
    workspace.write_chunk(0, torch.zeros(2, 3), torch.zeros(2, 3) > 0)
    workspace.write_checkpoint({"student": torch.ones(3)})
    reads: dict[str, Callable[[], object]] = {
        "text-00000.npz": lambda: workspace.read_chunk(0),
        "checkpoint.pt": lambda: workspace.read_checkpoint(torch.device("cpu")),
    }
    for name, read in reads.items():
        path = workspace.work / name
        path.write_bytes(damage(path.read_bytes()))

        with pytest.raises(EngineBuildError) as caught:
            read()

        assert str(caught.value).startswith(f"'{path}' cannot be read: ")


def test_a_chunk_that_lacks_a_part_or_is_not_there_is_told(workspace: Workspace):
    workspace.open(IDENTITY)
    np.savez(workspace.work / "text-00000.npz", token_ids=np.zeros(3))

    for number in (0, 1):
        with pytest.raises(EngineBuildError, match=rf"'.*text-0000{number}.npz' cannot be read: "):
            workspace.read_chunk(number)


def test_a_killed_write_leaves_the_file_of_before(workspace: Workspace):
    workspace.open(IDENTITY)
    workspace.replace("file", lambda path: path.write_text("whole"))

    def killed(path: Path) -> None:
        path.write_text("ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workspace.replace("file", killed)
    assert (workspace.folder / "file").read_text() == "whole"

    workspace.replace("file", lambda path: path.write_text("new"))
    assert (workspace.folder / "file").read_text() == "new"
    assert [path.name for path in workspace.folder.iterdir() if path.is_file()] == ["file"]


def test_a_full_disk_is_told_and_leaves_the_files_of_before(workspace: Workspace):
    workspace.open(IDENTITY)
    small, large = torch.zeros(2, 3), torch.zeros(200, 300)
    workspace.write_chunk(0, small, small > 0)
    workspace.write_checkpoint({"student": small})

    told = f"^'{workspace.folder}' cannot be written: "
    with largest_file(8000):
        with pytest.raises(EngineBuildError, match=told):
            workspace.write_chunk(0, large, large > 0)
        with pytest.raises(EngineBuildError, match=told):
            workspace.write_checkpoint({"student": large})

    assert workspace.read_chunk(0)[0].shape == (2, 3)
    checkpoint = workspace.read_checkpoint(torch.device("cpu"))
    assert checkpoint is not None
    assert torch.equal(checkpoint["student"], small)


def test_a_folder_that_may_not_be_made_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("")

    with pytest.raises(EngineBuildError, match=r"'.*/file/draft' cannot be written: "):
        Workspace(tmp_path / "file" / "draft").open(IDENTITY)


def test_chunks_and_checkpoints_come_back_as_they_were(workspace: Workspace):
    workspace.open(IDENTITY)
    token_ids = torch.tensor([[0, 49151], [3, 4]])
    is_answer = torch.tensor([[False, True], [True, True]])
    assert workspace.read_checkpoint(torch.device("cpu")) is None

    workspace.write_chunk(7, token_ids, is_answer)
    parameter = torch.nn.Parameter(torch.ones(3))
    workspace.write_checkpoint({"student": {"a": parameter}, "phase": {"curve": [{"loss": None}]}})

    read_ids, read_is_answer = workspace.read_chunk(7)
    assert torch.equal(read_ids.long(), token_ids)
    assert torch.equal(read_is_answer, is_answer)
    checkpoint = workspace.read_checkpoint(torch.device("cpu"))
    assert checkpoint is not None
    assert torch.equal(checkpoint["student"]["a"], parameter)
    assert checkpoint["phase"] == {"curve": [{"loss": None}]}


def test_what_only_a_resumed_run_needs_goes_at_the_end(workspace: Workspace):
    workspace.open(IDENTITY)
    workspace.replace("README.md", lambda path: path.write_text("card"))

    workspace.finish()

    assert [path.name for path in workspace.folder.iterdir()] == ["README.md"]
    assert not workspace.work.exists()
    with pytest.raises(EngineBuildError, match="is not empty"):  # whole, so nothing to go on with
        check_output(workspace.folder, resume=False)
