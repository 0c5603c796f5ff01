"""The output folder of a distillation: what is done so far, in files that are whole or not there.

Every file is written aside and renamed, so that a process killed at any moment leaves a folder
that the next one can go on with. The draft lies at the top; what only a resumed run needs lies in
the folder `distill`, which goes when all is done.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from engines.distill.output_folder import LOCK, STATE, WORK
from engines.errors import EngineBuildError, EngineError, translate_errors

CHECKPOINT = "checkpoint.pt"
STATE_VERSION = 1

WRITE_ERRORS: dict[type[Exception], type[EngineError]] = {
    OSError: EngineBuildError,
    RuntimeError: EngineBuildError,  # torch's
    SafetensorError: EngineBuildError,
}


READ_ERRORS: dict[type[Exception], type[EngineError]] = dict.fromkeys(
    (
        OSError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        RuntimeError,
        BadZipFile,
        UnpicklingError,
    ),
    EngineBuildError,
)


class Workspace:
    """One output folder, which `check_output` has let pass."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / WORK
        self._lock = FileLock(self.work / LOCK, timeout=0)

    def open(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state so far, a new one where nothing was begun.

        Args:
            identity: What must not change between a run and the one that resumes it.

        Raises:
            EngineBuildError: The run was begun as another one, or nothing can be written.
        """
        with self.writing():
            self.work.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire()
            except Timeout as exc:
                raise EngineBuildError(
                    f"another run is at work in '{self.folder}': wait for it, or name another "
                    "folder"
                ) from exc
            for leftover in self.folder.rglob(".*.part"):  # of a run that was killed
                leftover.unlink()
        state = self._read_state()
        if state is None:
            state = {"version": STATE_VERSION, "identity": dict(identity), "phases": {}}
            self.write_state(state)
        for key, value in identity.items():
            if (before := state["identity"].get(key)) != value:
                raise EngineBuildError(
                    f"the run in '{self.folder}' was begun with another {key} ({before!r}, not "
                    f"{value!r}): repeat it as it was, or name another folder"
                )
        return state

    def write_state(self, state: Mapping[str, Any]) -> None:
        text = json.dumps(state, indent=1)
        self.replace(f"{WORK}/{STATE}", lambda path: path.write_text(text, encoding="utf-8"))

    def write_chunk(self, number: int, token_ids: torch.Tensor, is_answer: torch.Tensor) -> None:
        """Keep one chunk of text, [num_sequences, length] each."""

        def write(path: Path) -> None:
            with path.open("wb") as file:
                np.savez(
                    file,
                    token_ids=token_ids.to(torch.int32).numpy(),
                    is_answer=is_answer.numpy(),
                )

        self.replace(f"{WORK}/{_chunk_name(number)}", write)

    def read_chunk(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one chunk of text as it was kept."""
        path = self.work / _chunk_name(number)
        with translate_errors(f"'{path}' cannot be read", READ_ERRORS), np.load(path) as values:
            return torch.from_numpy(values["token_ids"]), torch.from_numpy(values["is_answer"])

    def write_checkpoint(self, values: Mapping[str, Any]) -> None:
        self.replace(f"{WORK}/{CHECKPOINT}", lambda path: torch.save(dict(values), path))

    def read_checkpoint(self, device: torch.device) -> dict[str, Any] | None:
        """Return the training as it was last kept, None before the first time."""
        path = self.work / CHECKPOINT
        if not path.is_file():
            return None
        with translate_errors(f"'{path}' cannot be read", READ_ERRORS):
            values: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        return values

    def replace(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file aside and rename it to its place.

        Raises:
            EngineBuildError: The disk is full, or the folder may not be written.
        """
        path = self.folder / name
        aside = path.with_name(f".{path.name}.part")
        with self.writing():
            write(aside)
            os.replace(aside, path)

    def writing(self) -> AbstractContextManager[None]:
        """Turn what libraries raise over a full disk into an `EngineBuildError`."""
        return translate_errors(f"'{self.folder}' cannot be written", WRITE_ERRORS)

    def finish(self) -> None:
        """Delete what only a resumed run needs."""
        done = self.folder / ".distill-done"
        with self.writing():
            os.replace(self.work, done)  # at once: half of it could neither be used nor resumed
            self._lock.release()
            shutil.rmtree(done)

    def _read_state(self) -> dict[str, Any] | None:
        path = self.work / STATE
        if not path.is_file():
            return None
        with translate_errors(f"'{path}' cannot be read", READ_ERRORS):
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            version = state["version"]
        if version != STATE_VERSION:
            raise EngineBuildError(
                f"the run in '{self.folder}' was begun by another version: name another folder"
            )
        return state


def _chunk_name(number: int) -> str:
    return f"text-{number:05d}.npz"
