"""Does a value have one of the types that api.json names?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def fits(value: Any, type_: str) -> bool:
    """Tell whether a value may be given for a parameter, as strictly as pybind or pydantic may.

    A bool is no int, an int is a float, a path is no str. A "?" at the end allows None.
    """
    if type_.endswith("?"):
        return value is None or fits(value, type_[:-1])
    if type_.startswith("list[") and type_.endswith("]"):
        return isinstance(value, list) and all(fits(item, type_[5:-1]) for item in value)
    if type_.startswith("Literal["):
        return value in json.loads(type_[len("Literal") :])
    if "|" in type_:
        return any(fits(value, part) for part in _union(type_))
    return _fits_name(value, type_)


def _union(type_: str) -> list[str]:
    """Return the parts of a union; one inside brackets belongs to its list."""
    parts, depth = [""], 0
    for character in type_:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _fits_name(value: Any, name: str) -> bool:
    is_bool = isinstance(value, bool)
    is_number = isinstance(value, int | float) and not is_bool
    match name:
        case "any" | "object":
            return True
        case "bool":
            return is_bool
        case "int":
            return isinstance(value, int) and not is_bool
        case "NonNegativeInt":
            return isinstance(value, int) and not is_bool and value >= 0
        case "PositiveInt":
            return isinstance(value, int) and not is_bool and value > 0
        case "float" | "number":
            return is_number
        case "Fraction":
            return is_number and 0 <= value <= 1
        case "str" | "bytes" | "dict" | "list":
            return isinstance(value, {"str": str, "bytes": bytes, "dict": dict, "list": list}[name])
        case "dict[int,int]":
            return isinstance(value, dict) and all(
                _fits_name(number, "int") for pair in value.items() for number in pair
            )
        case "callable":
            return callable(value)
        case "Path":
            return isinstance(value, Path)
        case "IdTensor":
            return (
                _fits_name(value, "Tensor")
                and value.dim() == 1
                and str(value.dtype) == "torch.int32"
                and str(value.device) == "cpu"
            )
    return name in {class_.__name__ for class_ in type(value).__mro__}
