"""Fills a module of the fake package with the names that its version has."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trtllm_fake import building, llm, models, records, runner
from trtllm_fake.api import exists, implementations, implements, modules, strict, unmodelled

PARTS = (building, llm, models, runner)  # importing them makes most of the library's classes
records.make_records()


def expose(module: str, namespace: dict[str, Any]) -> None:
    """Put into a module's namespace what the api lists for it in this version."""
    entry = modules()[module]
    for kind in ("classes", "enums", "functions"):
        for name, member in entry.get(kind, {}).items():
            if exists(member):
                path = f"{module}.{name}"
                if path not in implementations:
                    implementations[path] = _outline(path, member, kind)
                namespace[name] = implementations[path]
    for name, class_name in entry.get("instances", {}).items():
        namespace[name] = object.__new__(namespace[class_name])
    for name, class_names in entry.get("constants", {}).items():
        namespace[name] = {key: models.family(value) for key, value in class_names.items()}
    for name, member in entry.get("reexports", {}).items():
        if exists(member):
            namespace[name] = getattr(import_module(member["from"]), name)


def _outline(path: str, member: dict[str, Any], kind: str) -> Any:
    """Return something that binds and does no more, for what no part of the fake plays."""
    if kind == "functions":
        return strict(path, member["params"], unmodelled)
    return implements(path)(type(path.rpartition(".")[2], (), {}))
