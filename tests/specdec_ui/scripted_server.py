"""A process that serves the page over a scripted engine, so that its own cost can be measured."""

from __future__ import annotations

import sys
from threading import Event

from engines import EngineSlot
from tests.specdec_ui.conftest import ScriptedBackend, ScriptedEngine, served


def main() -> None:
    """Serve until killed; the first line written is the address."""
    engine = ScriptedEngine(step_s=float(sys.argv[1]))
    with served(EngineSlot(lambda name: ScriptedBackend(engine))) as url:
        sys.stdout.write(url + "\n")
        sys.stdout.flush()
        Event().wait()


if __name__ == "__main__":
    main()
