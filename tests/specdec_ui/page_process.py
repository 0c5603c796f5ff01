"""A process that serves the page, so that its own cost can be measured.

`scripted STEP_S` serves it over a scripted engine, `transformers` over the real back ends.
"""

from __future__ import annotations

import sys
from threading import Event

from engines import EngineSlot
from tests.specdec_ui.conftest import ScriptedBackend, ScriptedEngine, served


def main() -> None:
    """Serve until killed; the first line written is the address."""
    slot = EngineSlot()
    if sys.argv[1] == "scripted":
        engine = ScriptedEngine(step_s=float(sys.argv[2]))
        slot = EngineSlot(lambda name: ScriptedBackend(engine))
    with served(slot) as url:
        sys.stdout.write(url + "\n")
        sys.stdout.flush()
        Event().wait()


if __name__ == "__main__":
    main()
