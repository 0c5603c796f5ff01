"""The library's enums and its classes of settings: their fields come from the api."""

from __future__ import annotations

from enum import IntFlag, StrEnum
from typing import Any

from trtllm_fake.api import (
    Given,
    class_entry,
    find,
    implementations,
    implements,
    modules,
    parameters,
    whole_api,
)
from trtllm_fake.checking import fits


class Record:
    """Settings, checked when they are made."""

    model_fields: dict[str, dict[str, Any]]

    def __init__(self, given: Given) -> None:
        vars(self).update(vars(given))
        self.check()

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.model_fields:
            raise ValueError(f"{type(self).__name__} has no field '{name}'")
        super().__setattr__(name, value)

    def check(self) -> None:
        """Raise where fields of the right type do not go together."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def differences(self) -> dict[str, Any]:
        """Return what is not as it would be by default, for the record of calls."""
        plain = {name: field.get("default") for name, field in self.model_fields.items()}
        return {name: value for name, value in vars(self).items() if value != plain.get(name)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.differences()})"


class DecodingConfig(Record):
    """Any way to draft inside the PyTorch flow."""

    max_draft_len: int | None

    def check(self) -> None:
        if not self.max_draft_len or self.max_draft_len < 1:
            raise ValueError("max_draft_len must be > 0")


def record(path: str, base: type[Record] = Record) -> type[Record]:
    """Make the library's class of that name, with the fields of this version."""
    entry = class_entry(path)
    names = {"__init__": base.__init__, "model_fields": parameters(entry.get("init", []))}
    # A class method written on the base is wrapped on the new class.
    names |= {name: vars(base)[name] for name in entry.get("methods", {}) if name in vars(base)}
    return implements(path)(type(path.rpartition(".")[2], (base,), names))


def _make_enums() -> None:
    for module, entry in whole_api()["modules"].items():
        for name, enum in entry.get("enums", {}).items():
            base: Any = {"IntFlag": IntFlag, "StrEnum": StrEnum}[enum["base"]]
            implementations[f"{module}.{name}"] = base(name, enum["members"], module=module)


class _QuantConfig(Record):
    @classmethod
    def from_dict(cls, given: Given) -> Any:
        fields = dict(given.config)
        for key in ("quant_algo", "kv_cache_quant_algo"):
            if fields.get(key) is not None:
                fields[key] = find("QuantAlgo")(fields[key])
        return find("QuantConfig")(**fields)

    def to_dict(self, given: Given | None = None) -> dict[str, Any]:
        return dict(vars(self))


class _PluginConfig(Record):
    """Checks assignments too; "auto" reads back as the model's dtype."""

    dtype: str

    def __init__(self, given: Given) -> None:
        for name, value in vars(given).items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.model_fields and not fits(value, self.model_fields[name]["type"]):
            raise ValueError(f"PluginConfig has no such value: {name}={value!r}")
        super().__setattr__(name, value)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return vars(self)["dtype"] if value == "auto" else value


class _DraftTargetDecodingConfig(DecodingConfig):
    draft_len_schedule: dict[int, int] | None

    def check(self) -> None:
        super().check()
        if draft_model(self) is None:
            raise ValueError("Draft model must be provided for draft-target decoding")
        if self.draft_len_schedule and self.draft_len_schedule.get(1) != self.max_draft_len:
            raise ValueError("draft_len_schedule must hold key 1 with the value of max_draft_len")


def draft_model(config: DecodingConfig) -> Any:
    """Return the draft's folder, whichever name this version has for it."""
    fields = vars(config)
    return fields.get("speculative_model") or fields.get("speculative_model_dir")


BASES: dict[str, type[Record]] = {
    "DraftTargetDecodingConfig": _DraftTargetDecodingConfig,
    "NGramDecodingConfig": DecodingConfig,
    "PluginConfig": _PluginConfig,
    "QuantConfig": _QuantConfig,
    "UserProvidedDecodingConfig": DecodingConfig,
}
SETTINGS = ("binding", "dataclass", "pydantic")


def make_records() -> None:
    """Make every enum, and every class that is nothing but settings and not made elsewhere."""
    _make_enums()
    for module, entry in modules().items():
        for name, class_ in entry.get("classes", {}).items():
            path = f"{module}.{name}"
            is_settings = class_["kind"] in SETTINGS and "init" in class_
            if is_settings and path not in implementations:
                record(path, BASES.get(name, Record))
