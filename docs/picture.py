"""Makes the README's picture: starts the page, runs the example it opens with, and photographs it.

`.venv/bin/python -m docs.picture` needs requirements-dev.txt and Chromium.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from engines import EngineSlot
from specdec_ui.layout import build_app, launch_options

FOLDER = Path(__file__).parent


def main() -> None:
    """Write docs/page.png, or one picture for each theme and width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", metavar="FOLDER", type=Path, help="every theme and width, there")
    parser.add_argument("--url", help="photograph a page that is served already")
    args = parser.parse_args()
    if args.url:
        photograph(args.url, args.all)
        return
    slot = EngineSlot()
    app = build_app(slot)
    _, url, _ = app.queue().launch(prevent_thread_lock=True, quiet=True, **launch_options())
    try:
        photograph(url, args.all)
    finally:
        app.close()
        slot.close()


def photograph(url: str, everything: Path | None) -> None:
    """Run the first example at the address given, and write the pictures."""
    views = [("light", 1280)]
    if everything is not None:
        everything.mkdir(parents=True, exist_ok=True)
        views = [(theme, width) for theme in ("light", "dark") for width in (400, 1280)]
    chromium = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        for theme, width in views:
            page = browser.new_page(viewport={"width": width, "height": 1150})
            page.goto(f"{url}?__theme={theme}")
            page.click("#sd-run")
            expect(page.locator(".sd-status")).to_contain_text("Done", timeout=300_000)
            page.wait_for_timeout(1500)  # the chart is drawn
            name = f"page-{theme}-{width}.png"
            path = FOLDER / "page.png" if everything is None else everything / name
            page.screenshot(path=path, full_page=everything is not None)
        browser.close()


if __name__ == "__main__":
    main()
