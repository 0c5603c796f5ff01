"""Child process that downloads from the Hugging Face Hub: `python -m engines.fetch`.

A process of its own can be killed at any moment, which a download inside a thread cannot. The
Hub's client keeps what it has and goes on from there the next time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from engines.child import ERROR_PREFIX, PROGRESS_PREFIX
from engines.environment import free_disk_bytes
from engines.small_files import PATTERNS, SMALL_PATTERNS

CONNECT_TIMEOUT_S = 10
REPORT_INTERVAL_S = 0.5


def main() -> int:
    """Download one file or one model, and print where it lies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("repo")
    parser.add_argument("--revision")
    parser.add_argument("--small", action="store_true", help="all but the weights")
    parser.add_argument("--file", help="one file instead of the whole model")
    parser.add_argument("--link", help="make this a link to the file")
    args = parser.parse_args()

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import httpx2
    from huggingface_hub import constants, get_session, hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        DryRunError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        # Without a network the client retries for half a minute; one question tells at once.
        get_session().head(constants.ENDPOINT, timeout=CONNECT_TIMEOUT_S)
    except (httpx2.HTTPError, OSError) as exc:
        return _fail(f"{constants.ENDPOINT} cannot be reached ({exc})")

    def wanted(patterns: Sequence[str]) -> dict[str, Any]:
        return {
            "repo_id": args.repo,
            "revision": args.revision,
            "allow_patterns": list(patterns),
        }

    try:
        if args.file:
            path = hf_hub_download(args.repo, args.file, revision=args.revision)
        else:
            try:
                planned = snapshot_download(**wanted(PATTERNS), dry_run=True)
            except DryRunError:  # the download itself says why it cannot be
                planned = []
            num_bytes = sum(file.file_size for file in planned if file.will_download)
            if num_bytes and not args.small:
                _say(f"{args.repo}: {num_bytes / 1e6:,.0f} MB to download")
            if not args.small and (reason := _why_no_room(num_bytes, constants.HF_HUB_CACHE)):
                return _fail(f"'{args.repo}' {reason}")
            patterns = SMALL_PATTERNS if args.small else PATTERNS
            path = snapshot_download(**wanted(patterns), tqdm_class=_reporting(num_bytes))
    except GatedRepoError:
        return _fail(
            f"'{args.repo}' is gated: accept its licence there, then log in with 'hf auth login'"
        )
    except RevisionNotFoundError:
        return _fail(f"'{args.repo}' has no revision '{args.revision}' on the Hub")
    except RepositoryNotFoundError:
        return _fail(
            f"there is no '{args.repo}' on the Hub that this machine may read; check the name, or "
            "log in with 'hf auth login'"
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx2.HTTPError, OSError) as exc:
        # Where there is no earlier copy either, the client says so and keeps the reason as cause.
        reason = str(exc.__cause__ or exc).strip().partition("\n")[0] or type(exc).__name__
        return _fail(f"'{args.repo}' could not be fetched: {reason}")
    if not (args.small or args.file) and not any(Path(path).glob("*.safetensors")):
        return _fail(
            f"'{args.repo}' has no weights in the safetensors format, and others (pickle) can run "
            "code as they are read: choose a repository or a revision that has"
        )
    if args.link:
        os.symlink(os.path.realpath(path), args.link)
    _say(f"fetched {path}")
    return 0


def _reporting(total_bytes: int) -> type[Any]:
    """Return what the Hub's client takes for a progress bar: it prints bytes, now and then."""
    from huggingface_hub.utils.tqdm import tqdm

    class Reporting(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            # Of its bars one counts the bytes that are written; the others count files, or again.
            is_of_bytes = options.get("unit") == "B" and "econstruct" in str(options.get("desc"))
            self._counts = is_of_bytes and total_bytes > 0
            self._done_bytes = 0
            self._told_at = -inf
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if not self._counts:
                return
            self._done_bytes += int(n or 0)
            is_whole = self._done_bytes >= total_bytes
            if is_whole or monotonic() - self._told_at >= REPORT_INTERVAL_S:
                self._told_at = monotonic()
                _say(f"{PROGRESS_PREFIX}{min(self._done_bytes, total_bytes)} {total_bytes}")

    return Reporting


def _why_no_room(num_bytes: int, cache: str) -> str | None:
    """Return why a download does not fit on the disk; None where it does."""
    free = free_disk_bytes(Path(cache))
    if num_bytes <= free:
        return None
    return (
        f"takes {num_bytes / 1e6:,.0f} MB in {cache}, where {free / 1e6:,.0f} MB are free: make "
        "room, or set HF_HOME to a folder on another disk"
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _fail(sentence: str) -> int:
    _say(f"{ERROR_PREFIX}{sentence}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
