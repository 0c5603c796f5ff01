"""Turns the contract, facts read in TensorRT-LLM's sources, into the api.json beside this file.

python -m tests.fake_tensorrt_llm.contract PATH_OF_THE_CONTRACT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

API_FILE = Path(__file__).with_name("api.json")
VERSIONS = ("1.0.0", "1.1.0", "1.2.1", "1.3.0rc15", "1.3.0rc22", "1.4.0rc1")
OPEN_ENDS = (("first", VERSIONS[0]), ("last", VERSIONS[-1]))
MAX_LINE_LENGTH = 100

# The contract's words for types, where they say more than a check can use.
PLAIN_TYPES = {
    "Literal?": "str?",
    "SamplingParams?|list": "SamplingParams|list?",
    "Tensor? [len(tokens), vocab_padded]": "Tensor?",
    "decoding config?": "DecodingConfig?",
    "float 0..1?": "Fraction?",
    "int>0?": "PositiveInt?",
    "int>=0?": "NonNegativeInt?",
    "list[Tensor [len,vocab_padded]]?": "list[Tensor]?",
    "list[torch.Tensor 1-D]": "list[IdTensor]",
    "str|Path|tokenizer?": "any?",
}
# Parameters newer than their function.
FIRST_VERSION = {"fail_fast_on_attention_window_too_large": "1.2.1"}

# Modules that the contract's text names and its table leaves out.
EXTRA_MODULES: dict[str, dict[str, Any]] = {
    "tensorrt_llm.bindings": {"profiles": ["1.2.1", "1.3.0rc15"]},
    "tensorrt_llm.runtime.model_runner_cpp": {
        "profiles": ["1.2.1", "1.3.0rc15"],
        "reexports": {"ModelRunnerCpp": {"from": "tensorrt_llm.runtime"}},
    },
}


def api_from_contract(contract: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the fake needs to know: names, parameters, and the versions that have them.

    An entry exists from its "first" version to its "last", each left out where it is the end.
    """
    modules = {**contract["modules"], **EXTRA_MODULES}
    converted = {name: _module(entry) for name, entry in modules.items()}
    return {"versions": list(VERSIONS), "modules": converted}


def lifetime(profiles: Iterable[str]) -> dict[str, str]:
    """Return the first and last version of an entry, from the three that the contract tells.

    1.0 and 1.1 are like 1.2.1; 1.3.0rc22 has what both its neighbours have.
    """
    known = [version for version in VERSIONS if version in profiles]
    return _lifetime("1.0.0" if known[0] == "1.2.1" else known[0], known[-1])


def _lifetime(first: str, last: str) -> dict[str, str]:
    ends = {"first": first, "last": last}
    return {key: end for key, end in ends.items() if (key, end) not in OPEN_ENDS}


def _module(entry: Mapping[str, Any]) -> dict[str, Any]:
    module: dict[str, Any] = lifetime(entry["profiles"])
    kinds = {"classes": _class, "enums": _enum, "functions": _function, "reexports": _reexport}
    for key, convert in kinds.items():
        members = {
            name: convert(value) | (lifetime(value["profiles"]) if "profiles" in value else {})
            for name, value in entry.get(key, {}).items()
        }
        if members:
            module[key] = members
    if "constants" in entry:
        module["constants"] = {
            name: value["keys_relevant"] for name, value in entry["constants"].items()
        }
    if "instances" in entry:
        module["instances"] = entry["instances"]
    return module


def _class(entry: Mapping[str, Any]) -> dict[str, Any]:
    converted: dict[str, Any] = {"kind": entry["kind"]}
    if "constructor" in entry:
        converted["init"] = _parameters(entry["constructor"]["params"])
    elif "constructor_by_profile" in entry:
        converted["init"] = _draft_target_parameters(entry["constructor_by_profile"])
    if "methods" in entry:
        converted["methods"] = {
            method: {"kind": value["kind"], "params": _parameters(value["params"])}
            for method, value in entry["methods"].items()
        }
    if entry["kind"] == "result":
        converted["attributes"] = {
            name: lifetime(value.get("profiles", VERSIONS))
            for name, value in entry["attributes"].items()
        }
    if "inherits" in entry:
        converted["inherits"] = entry["inherits"]
    return converted


def _enum(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"base": entry["base"], "members": entry["members"]}


def _function(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"params": _parameters(entry["params"])}


def _reexport(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"from": entry["from"]}


def _parameters(params: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [_parameter(param) for param in params]


def _parameter(param: Mapping[str, Any]) -> dict[str, Any]:
    converted = {"name": param["name"], "type": PLAIN_TYPES.get(param["type"], param["type"])}
    if param["kind"] == "kw_only":
        converted["kw_only"] = True
    for key in ("default", "default_expr"):
        if key in param:
            converted[key] = param[key]
    if first := FIRST_VERSION.get(param["name"]):
        converted["first"] = first
    return converted


def _draft_target_parameters(by_profile: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Merge a constructor that every version tells anew.

    1.0 and 1.1 know the model only by the name that 1.2.1 and 1.3 still take beside the new one.
    """
    profiles = dict.fromkeys(VERSIONS[:3], "1.2.1")
    profiles |= {"1.3.0rc15": "1.3.0rc15", "1.3.0rc22": "1.3.0rc15", "1.4.0rc1": "1.4.0rc1"}
    found: dict[str, list[str]] = {}
    for version, profile in profiles.items():
        aliases = {name: alias for alias, name in by_profile["1.2.1"]["aliases"].items()}
        for parameter in _parameters(by_profile[profile]["params"]):
            alias = aliases.get(parameter["name"])
            if alias and version in ("1.0.0", "1.1.0"):
                parameter["name"] = alias
            elif alias and profile != "1.4.0rc1":
                parameter["alias"] = alias
            found.setdefault(json.dumps(parameter), []).append(version)
    return [
        json.loads(parameter) | _lifetime(versions[0], versions[-1])
        for parameter, versions in found.items()
    ]


def to_text(value: object, indent: str = "", label: str = "") -> str:
    """Return sorted JSON with everything that fits on one line."""
    line = indent + label + json.dumps(value, sort_keys=True)
    if len(line) < MAX_LINE_LENGTH or not isinstance(value, dict | list):
        return line
    deeper = indent + "  "
    if isinstance(value, dict):
        rows = [to_text(value[key], deeper, f"{json.dumps(key)}: ") for key in sorted(value)]
        opening, closing = "{", "}"
    else:
        rows = [to_text(item, deeper) for item in value]
        opening, closing = "[", "]"
    return f"{indent}{label}{opening}\n" + ",\n".join(rows) + f"\n{indent}{closing}"


def main() -> None:
    contract = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    API_FILE.write_text(to_text(api_from_contract(contract)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
