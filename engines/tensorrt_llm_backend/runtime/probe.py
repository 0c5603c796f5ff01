"""Runs in TensorRT-LLM's interpreter: prints what is installed there, then whether it imports.

Standard library only. Each answer is a line of JSON behind a mark, because the library prints, too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from importlib.util import find_spec
from typing import Any

MARK = "specdec-probe: "


def main() -> None:
    """Print the facts that need no import; then, if asked to, those that do."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--import", dest="is_imported", action="store_true")
    args = parser.parse_args()
    say(installed())
    if args.is_imported and find_spec("tensorrt_llm"):
        say({"import_error": import_error()})


def say(facts: dict[str, Any]) -> None:
    """Print an answer."""
    sys.stdout.write(f"\n{MARK}{json.dumps(facts)}\n")
    sys.stdout.flush()


def installed() -> dict[str, Any]:
    """Return what is there. The flows are told by files: looking for a submodule imports it."""
    package = find_spec("tensorrt_llm")
    folders = list(package.submodule_search_locations or []) if package else []

    def has(*path: str) -> bool:
        return any(os.path.isfile(os.path.join(folder, *path)) for folder in folders)

    has_tensorrt = find_spec("tensorrt") is not None
    return {
        "python": platform.python_version(),
        "tensorrt_llm": version("tensorrt_llm"),
        "torch": version("torch"),
        "runs_engines": has_tensorrt and has("runtime", "model_runner_cpp.py"),
        "builds_engines": has_tensorrt and has("builder.py"),
        "runs_pytorch": has("llmapi", "__init__.py") or has("llmapi.py"),
    }


def import_error() -> str | None:
    """Import the library, and return why that fails, None where it does not."""
    try:
        import tensorrt_llm  # noqa: F401
    except Exception as exc:  # whatever it is, it is the answer
        return f"{type(exc).__name__}: {exc}".partition("\n")[0]
    return None


def version(package: str) -> str | None:
    """Return a package's version, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
