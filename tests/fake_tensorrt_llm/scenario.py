"""What a test wants of the fake: the version it plays, the machine's GPUs, and what goes wrong."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

Version = Literal["1.0.0", "1.1.0", "1.2.1", "1.3.0rc15", "1.3.0rc22", "1.4.0rc1"]
ImportFault = Literal["", "fail", "hang", "libpython", "stdin"]
BuildFault = Literal["", "die", "disk", "fail", "hang", "no_paged_fmha", "oom", "slow"]
LoadFault = Literal["", "die", "hang", "oom", "version"]
GenerateFault = Literal["", "die", "error", "hang", "nan_logits", "short"]

# The TensorRT that each version of TensorRT-LLM needs; later ones have no engines.
TENSORRT_VERSIONS = {
    "1.0.0": "10.11.0.33",
    "1.1.0": "10.13.3.9",
    "1.2.1": "10.14.1.48",
    "1.3.0rc15": "10.15.1.29",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as nvidia-smi tells it."""

    name: str = "NVIDIA H200"
    compute_cap: str = "9.0"
    memory_total: int | None = 143771  # MiB; None is what shared memory says: [N/A]
    memory_free: int | None = 143157  # MiB
    driver_version: str = "580.95.05"
    compute_mode: str = "Default"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One installation on one machine, and what goes wrong in it.

    `import_`: "fail" and "libpython" raise, "hang" never returns, "stdin" reads standard input.
    `build`: "disk" fills the disk half way through a save; "slow" prints `slow_lines` lines.
    `load`: "version" is an engine of another TensorRT.
    `generate` begins after `generate_after` calls that succeed: "short" ends a plain request
    after one token, "nan_logits" spoils the logits that are returned.
    """

    version: Version = "1.2.1"
    gpus: tuple[Gpu, ...] = (Gpu(),)
    nvidia_smi: bool = True  # False: there is no such program
    import_: ImportFault = ""
    build: BuildFault = ""
    slow_lines: int = 10
    load: LoadFault = ""
    generate: GenerateFault = ""
    generate_after: int = 0
    merge: int = 1  # PyTorch flow: that many chunks reach a slow reader as one
    no_stats: bool = False  # PyTorch flow: get_stats gives nothing

    @property
    def has_engines(self) -> bool:
        return self.version in TENSORRT_VERSIONS

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"
