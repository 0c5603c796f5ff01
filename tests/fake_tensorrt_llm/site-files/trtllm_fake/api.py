"""The names and parameters of the version that is played, and the strict binding of calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from trtllm_fake.checking import fits
from trtllm_fake.state import log_call, scenario

Given = SimpleNamespace  # the arguments of one call, defaults filled in
AnyType = TypeVar("AnyType", bound=type)

_is_inside = ContextVar("_is_inside", default=False)  # a call that the library makes of itself
implementations: dict[str, Any] = {}  # by the full name that the library gives it


@cache
def whole_api() -> dict[str, Any]:
    api: dict[str, Any] = json.loads(Path(__file__).with_name("api.json").read_text("utf-8"))
    return api


def exists(entry: Mapping[str, Any]) -> bool:
    """Tell whether this version has an entry of the api."""
    versions = whole_api()["versions"]
    first, last = entry.get("first", versions[0]), entry.get("last", versions[-1])
    position = versions.index(scenario()["version"])
    return bool(versions.index(first) <= position <= versions.index(last))


def modules() -> dict[str, Any]:
    """Return the modules that this version has."""
    return {name: entry for name, entry in whole_api()["modules"].items() if exists(entry)}


def class_entry(path: str) -> dict[str, Any]:
    """Return what the api says of a class, in whichever versions it exists."""
    module, _, name = path.rpartition(".")
    entry: dict[str, Any] = whole_api()["modules"][module]["classes"][name]
    return entry


def parameters(params: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {param["name"]: param for param in params if exists(param)}


def bind(
    call: str,
    params: list[dict[str, Any]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Given, dict[str, Any]]:
    """Return the arguments of a call with defaults, and those that were given.

    Args:
        call: What is called, for the message.
        params: The entries of the api.

    Raises:
        TypeError: The library, or the care it asks for, does not allow the call.
    """
    known = parameters(params)
    positional = [name for name, param in known.items() if not param.get("kw_only")]
    if len(args) > len(positional):
        raise TypeError(f"{call}() takes {len(positional)} positional arguments, not {len(args)}")
    given = dict(zip(positional, args, strict=False))
    aliases = {param["alias"]: name for name, param in known.items() if "alias" in param}
    for name, value in kwargs.items():
        real_name = aliases.get(name, name)
        if real_name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument '{name}'")
        if real_name in given:
            raise TypeError(f"{call}() got multiple values for argument '{real_name}'")
        given[real_name] = value
    for name, value in given.items():
        if not fits(value, known[name]["type"]):
            wanted = known[name]["type"]
            kind = type(value).__name__
            raise TypeError(f"{call}() argument '{name}' must be {wanted}, not {kind}: {value!r}")
    filled = dict(given)
    for name, param in known.items():
        if name in filled:
            continue
        if "default_expr" in param:
            filled[name] = resolve(param["default_expr"])
        elif "default" in param:
            filled[name] = param["default"]
        else:
            raise TypeError(f"{call}() missing required argument '{name}'")
    return Given(**filled), given


def strict(
    path: str, params: list[dict[str, Any]], function: Callable[..., Any], num_owners: int = 0
) -> Any:
    """Return a function that binds its call strictly, records it, and passes one `Given` on.

    What the library calls of itself while it runs is not recorded.

    Args:
        path: The full name that the library gives it.
        params: The entries of the api.
        function: Takes its owner, if it has one, and the `Given`.
        num_owners: 1 for a method, whose object or class comes first.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_outermost = not _is_inside.get()
        inside = _is_inside.set(True)
        try:
            given, explicit = bind(path, params, args[num_owners:], kwargs)
            if is_outermost:
                log_call(path, explicit)
            return function(*args[:num_owners], given)
        finally:
            _is_inside.reset(inside)

    return call


def implements(path: str) -> Callable[[AnyType], AnyType]:
    """Make a class the library's: what the api lists of it binds strictly, the rest is ours."""

    def decorate(class_: AnyType) -> AnyType:
        entry = class_entry(path)
        if "init" in entry:
            init = class_.__dict__.get("__init__", unmodelled)
            class_.__init__ = strict(path, entry["init"], init, 1)  # type: ignore[misc]
        for name, method in entry.get("methods", {}).items():
            function = class_.__dict__.get(name, unmodelled)
            function = getattr(function, "__func__", function)  # out of its classmethod
            num_owners = 0 if method["kind"] == "staticmethod" else 1
            wrapped = strict(f"{path}.{name}", method["params"], function, num_owners)
            kinds = {"staticmethod": staticmethod, "classmethod": classmethod}
            setattr(class_, name, kinds.get(method["kind"], lambda same: same)(wrapped))
        class_.__module__, _, class_.__qualname__ = path.rpartition(".")
        implementations[path] = class_
        return class_

    return decorate


def implements_function(path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the library's, strictly bound."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        module, _, name = path.rpartition(".")
        params = whole_api()["modules"][module]["functions"][name]["params"]
        implementations[path] = strict(path, params, function)
        return function

    return decorate


def unmodelled(*args: Any) -> Any:
    raise NotImplementedError("the fake knows how this is called, and no more")


def find(name: str) -> Any:
    """Return the class or enum of that bare name."""
    return next(item for path, item in implementations.items() if path.endswith(f".{name}"))


def resolve(expression: str) -> Any:
    """Return the value of a default such as "KvCacheConfig()" or "Mode.NONE"."""
    if expression == "UNSPECIFIED":  # nobody read it
        return None
    if expression == "{}":
        return {}
    if expression.endswith("()"):
        return find(expression[:-2])()
    enum, _, member = expression.partition(".")
    return find(enum)[member]
