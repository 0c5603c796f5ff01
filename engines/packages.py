"""Which packages are installed, and which file of requirements brings them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

BASE = "pip install -r requirements.txt"
WITH_TORCH = "pip install -r requirements-torch.txt"


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_packages(packages: Iterable[str]) -> list[str]:
    """Return those that are not installed."""
    return [name for name in packages if version_of(name) is None]
