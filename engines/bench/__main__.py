"""`make bench`: the bundled pair on this CPU."""

from __future__ import annotations

import sys

from engines.bench.cpu import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
