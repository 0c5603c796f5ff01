"""Child process that downloads from the Hugging Face Hub: `python -m engines.fetch`.

A process of its own can be killed at any moment, which a download inside a thread cannot. The
Hub's client keeps what it has and goes on from there the next time.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from engines.child import ERROR_PREFIX
from engines.small_files import PATTERNS, SMALL_PATTERNS

CONNECT_TIMEOUT_S = 10


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
    try:
        if args.file:
            path = hf_hub_download(args.repo, args.file, revision=args.revision)
        else:
            patterns = SMALL_PATTERNS if args.small else PATTERNS
            path = snapshot_download(
                args.repo, revision=args.revision, allow_patterns=list(patterns)
            )
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
    sys.stdout.write(f"fetched {path}\n")
    return 0


def _fail(sentence: str) -> int:
    sys.stdout.write(f"{ERROR_PREFIX}{sentence}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
