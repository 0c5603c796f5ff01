"""Command line -> engines -> page -> serve."""

from __future__ import annotations

import argparse
import logging
import sys

from engines import AUTO, BACKEND_CHOICES, BUNDLED, DRAFT_KINDS, EngineSlot, resolve_draft
from specdec_ui.layout import TITLE, PageDefaults, build_app, launch_options

MAX_WAITING = 64  # runs in the queue; one more is refused with a message


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with their defaults."""
    parser = argparse.ArgumentParser(description="Open the SpecDec Playground in a browser.")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860")
    parser.add_argument("--target", default=BUNDLED, help="model to start with (default: bundled)")
    parser.add_argument("--draft", default="", help="draft model to start with (bundled: its own)")
    parser.add_argument(
        "--draft-kind",
        choices=DRAFT_KINDS,
        help="default: model with --draft and for the bundled target, else prompt_lookup",
    )
    parser.add_argument(
        "--backend", choices=BACKEND_CHOICES, default=AUTO, help="default: %(default)s"
    )
    parser.add_argument("--verbose", action="store_true", help="log loads and builds")
    args = parser.parse_args(argv)
    if args.port is not None and not 1 <= args.port <= 65535:
        parser.error(f"port is {args.port}: use 1 to 65535")
    return args


def main() -> None:
    """Serve the page on this machine until interrupted."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING)
    slot = EngineSlot()
    draft, draft_kind = resolve_draft(args.target, args.draft, args.draft_kind)
    app = build_app(slot, PageDefaults(args.backend, args.target, draft or "", draft_kind))
    try:
        _, url, _ = app.queue(max_size=MAX_WAITING).launch(
            server_name="127.0.0.1",
            server_port=args.port,
            prevent_thread_lock=True,
            quiet=True,
            **launch_options(),
        )
        sys.stdout.write(f"{TITLE} is at {url} (Ctrl-C ends it)\n")
        sys.stdout.flush()
        app.block_thread()
    except OSError as exc:
        sys.exit(f"error: {exc}")
    finally:
        slot.close()


if __name__ == "__main__":
    main()
