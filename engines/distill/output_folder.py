"""Whether a folder may be used for a draft: told before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from engines.errors import EngineBuildError, translate_errors

WORK = "distill"  # inside it: what only a resumed run needs
STATE = "state.json"
LOCK = "lock"


def check_output(folder: Path, *, resume: bool) -> None:
    """Refuse a folder that a run may not use.

    Args:
        folder: Where the draft is to go.
        resume: Whether it is to hold an interrupted run.

    Raises:
        EngineBuildError: It holds something else.
    """
    with translate_errors(f"'{folder}' cannot be used", {OSError: EngineBuildError}):
        _check(folder, resume=resume)


def _check(folder: Path, *, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise EngineBuildError(f"'{folder}' is a file: name a folder for the draft")
    if (folder / WORK / STATE).is_file():
        if not resume:
            raise EngineBuildError(
                f"'{folder}' holds an interrupted run: resume it, or name another folder"
            )
    elif resume:
        raise EngineBuildError(
            f"'{folder}' holds no interrupted run to resume: begin one, or name another folder"
        )
    elif any(path.is_file() and path != folder / WORK / LOCK for path in folder.rglob("*")):
        raise EngineBuildError(f"the folder '{folder}' is not empty: name a new or an empty one")
