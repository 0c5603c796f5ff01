"""Writes an interpreter that has the fake TensorRT-LLM: its packages, python, and nvidia-smi."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fake_tensorrt_llm.contract import API_FILE
from tests.fake_tensorrt_llm.scenario import TENSORRT_VERSIONS, Gpu, Scenario

FILES = Path(__file__).with_name("site-files")

MODULE = '''\
"""{name} as of version {version}."""

from trtllm_fake.expose import expose

expose(__name__, globals())
'''
PACKAGE = '''\
"""tensorrt_llm as of version {version}."""

from trtllm_fake.starting import start

start()

from trtllm_fake.expose import expose

expose(__name__, globals())
__version__ = "{version}"
'''
PYTHON = """\
#!/bin/sh
export PYTHONPATH={site} SPECDEC_FAKE_TRTLLM={scenario}
exec {python} "$@"
"""
NVIDIA_SMI = """\
#!/bin/sh
fields= format=
for argument; do
  case $argument in
    --query-gpu=*) fields=${{argument#*=}} ;;
    --format=*) format=${{argument#*=}} ;;
    *) echo "Invalid combination of input arguments."; exit 2 ;;
  esac
done
[ "$format" = csv,noheader,nounits ] || exit 2
[ {num_gpus} -gt 0 ] || {{ echo "No devices were found"; exit 6; }}
IFS=', '
gpu=0
while [ $gpu -lt {num_gpus} ]; do
  line=
  for field in $fields; do
    case $gpu.$field in
{values}
      *) echo "Field \\"$field\\" is not a valid field to query."; exit 2 ;;
    esac
    line="$line${{line:+, }}$value"
  done
  echo "$line"
  gpu=$((gpu + 1))
done
"""


@dataclass(frozen=True, slots=True)
class FakeInstall:
    """Where an installation lies."""

    python: Path  # an interpreter that has the packages
    bin: Path  # to put in front of PATH: python and nvidia-smi
    site: Path  # the packages
    calls: Path  # one JSON line a call of the library: call, pid, args; absent before the first

    def read_calls(self, *names: str) -> list[dict[str, Any]]:
        """Return the recorded calls, of these names only if any: the ends of dotted names."""
        if not self.calls.exists():
            return []
        calls = [json.loads(line) for line in self.calls.read_text(encoding="utf-8").splitlines()]
        return [call for call in calls if not names or call["call"].endswith(names)]


def write_site(folder: Path, scenario: Scenario) -> FakeInstall:
    """Write an installation into a folder, which must be new or empty."""
    site, bin_ = folder / "site", folder / "bin"
    site.mkdir(parents=True)
    bin_.mkdir()
    scenario_file = folder / "scenario.json"
    scenario_file.write_text(scenario.to_json(), encoding="utf-8")

    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(FILES, site, dirs_exist_ok=True, ignore=no_caches)
    shutil.copy(API_FILE, site / "trtllm_fake")
    _write_modules(site, scenario.version)
    _write_metadata(site, "tensorrt_llm", scenario.version)
    if tensorrt_version := TENSORRT_VERSIONS.get(scenario.version):
        (site / "tensorrt").mkdir()
        text = f'"""TensorRT."""\n\n__version__ = "{tensorrt_version}"\n'
        (site / "tensorrt" / "__init__.py").write_text(text, encoding="utf-8")
        _write_metadata(site, "tensorrt", tensorrt_version)

    places = {"site": site, "scenario": scenario_file, "python": sys.executable}
    quoted = {name: shlex.quote(str(place)) for name, place in places.items()}
    _write_program(bin_ / "python", PYTHON.format(**quoted))
    if scenario.nvidia_smi:
        values = "\n".join(
            f"      {index}.{field}) value={shlex.quote(value)} ;;"
            for index, gpu in enumerate(scenario.gpus)
            for field, value in _smi_fields(index, gpu).items()
        )
        program = NVIDIA_SMI.format(num_gpus=len(scenario.gpus), values=values)
        _write_program(bin_ / "nvidia-smi", program)
    return FakeInstall(bin_ / "python", bin_, site, folder / "calls.jsonl")


def _write_modules(site: Path, version: str) -> None:
    """Write one stub a module that the version has."""
    api = json.loads(API_FILE.read_text(encoding="utf-8"))
    position = api["versions"].index

    def exists(entry: dict[str, str]) -> bool:
        first, last = entry.get("first", "1.0.0"), entry.get("last", api["versions"][-1])
        return bool(position(first) <= position(version) <= position(last))

    names = [name for name, entry in api["modules"].items() if exists(entry)]
    for name in names:
        path = site.joinpath(*name.split("."))
        is_package = any(other.startswith(f"{name}.") for other in names)
        file = path / "__init__.py" if is_package else path.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        template = PACKAGE if name == "tensorrt_llm" else MODULE
        file.write_text(template.format(name=name, version=version), encoding="utf-8")


def _write_metadata(site: Path, name: str, version: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.10\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")


def _write_program(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)


def _smi_fields(index: int, gpu: Gpu) -> dict[str, str]:
    def mib(number: int | None) -> str:
        return "[N/A]" if number is None else str(number)

    return {
        "index": str(index),
        "uuid": f"GPU-00000000-0000-0000-0000-{index:012d}",
        "name": gpu.name,
        "compute_cap": gpu.compute_cap,
        "memory.total": mib(gpu.memory_total),
        "memory.free": mib(gpu.memory_free),
        "driver_version": gpu.driver_version,
        "compute_mode": gpu.compute_mode,
    }
