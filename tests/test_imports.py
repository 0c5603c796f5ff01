"""Imports stay light, and the public names are complete."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import engines
from engines.child import PROJECT_ROOT

HEAVY = ("torch", "transformers", "tensorrt_llm")


def modules_after(statement: str) -> set[str]:
    """Return the top-level modules of a fresh interpreter that has run a statement."""
    script = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["engines", "engines.cli", "engines.tensorrt_llm_backend.backend", "specdec_ui.layout"],
)
def test_importing_pulls_in_no_heavy_package(module: str):
    assert modules_after(f"import {module}").isdisjoint(HEAVY)


@pytest.mark.parametrize("module", ["engines", "engines.cli"])
def test_the_engines_know_nothing_of_the_page(module: str):
    assert modules_after(f"import {module}").isdisjoint({"gradio", "plotly", "specdec_ui"})


def test_the_public_names_of_engines_are_complete():
    imported = {
        name
        for name, value in vars(engines).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }

    assert set(engines.__all__) == imported - {"annotations"}


def test_the_public_names_of_engines_are_sorted():
    def kind(name: str) -> int:
        return 0 if name.isupper() else 1 if name[0].isupper() else 2

    assert engines.__all__ == sorted(engines.__all__, key=lambda name: (kind(name), name))


def test_the_page_uses_only_public_names_of_engines():
    for path in (PROJECT_ROOT / "specdec_ui").glob("*.py"):
        assert "from engines." not in path.read_text(encoding="utf-8"), path
