"""`make bench`: the bundled pair on this CPU, or what is named first, such as `shapes`."""

from __future__ import annotations

import sys
from importlib import import_module

BENCHMARKS = ("cpu", "cuda", "shapes")

if __name__ == "__main__":
    args = sys.argv[1:]
    name = args.pop(0) if args[:1] and args[0] in BENCHMARKS else BENCHMARKS[0]
    sys.exit(import_module(f"engines.bench.{name}").main(args))
