"""The installations that the fake TensorRT-LLM writes: an interpreter, and nvidia-smi."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fake_tensorrt_llm.scenario import Gpu, Scenario
from tests.fake_tensorrt_llm.site import FakeInstall, write_site


def run(fake: FakeInstall, code: str, *args: object, **kwargs: Any) -> Any:
    command = [str(fake.python), "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("", ""),
        ("fail", "ImportError: libmpi.so.40"),
        ("libpython", "OSError: libpython3.12.so.1.0: cannot open shared object file"),
    ],
)
def test_an_import_prints_and_may_fail(fault: Any, message: str, tmp_path: Path):
    fake = write_site(tmp_path / "fake", Scenario(import_=fault))
    result = run(fake, "import tensorrt_llm")

    assert result.stdout == "[TensorRT-LLM] TensorRT-LLM version: 1.2.1\n"
    assert message in result.stderr
    assert (result.returncode == 0) == (fault == "")


def test_an_import_may_read_standard_input(tmp_path: Path):
    fake = write_site(tmp_path / "fake", Scenario(import_="stdin"))
    result = run(fake, "import tensorrt_llm; print(repr(input()))", input="hello\n")

    assert "EOFError" in result.stderr
    assert fake.read_calls("stdin")[0]["args"] == {"num_bytes": 6}


def test_an_import_may_hang(tmp_path: Path):
    fake = write_site(tmp_path / "fake", Scenario(import_="hang"))
    command = [str(fake.python), "-c", "import tensorrt_llm; print('imported')"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.kill()


BUILD_AND_DECODE = """
import sys, torch
from tensorrt_llm.builder import BuildConfig, build
from tensorrt_llm.models import SpeculativeDecodingMode
from tensorrt_llm.models.automodel import AutoModelForCausalLM
from tensorrt_llm.runtime import ModelRunnerCpp

config = BuildConfig(
    max_batch_size=1,
    max_draft_len=2,
    max_seq_len=64,
    speculative_decoding_mode=SpeculativeDecodingMode.DRAFT_TOKENS_EXTERNAL,
)
build(AutoModelForCausalLM.from_hugging_face(sys.argv[1]), config).save("engine")
runner = ModelRunnerCpp.from_dir("engine", kv_cache_enable_block_reuse=True)
for _ in range(2):
    output_ids = runner.generate([torch.tensor([5], dtype=torch.int32)], end_id=-1)
    print(output_ids[0, 0, :3].tolist(), flush=True)
"""


def test_an_interpreter_builds_and_decodes_until_it_dies(tiny_target: Path, tmp_path: Path):
    outputs = []
    for name, scenario in {
        "sound": Scenario(),
        "mortal": Scenario(generate="die", generate_after=1),
    }.items():
        fake = write_site(tmp_path / name, scenario)
        result = run(fake, BUILD_AND_DECODE, tiny_target, cwd=tmp_path)
        outputs.append((result.returncode, result.stdout.splitlines()[2:]))
        assert len(fake.read_calls("ModelRunnerCpp.generate")) == 2

    (status, lines), mortal = outputs
    assert status == 0
    assert lines[0] == lines[1]
    assert mortal == (-signal.SIGKILL, lines[:1])


ALL_FIELDS = "index,uuid,name,compute_cap,memory.total,memory.free,driver_version,compute_mode"


def smi(fake: FakeInstall, fields: str) -> Any:
    program = str(fake.bin / "nvidia-smi")
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True)


def test_nvidia_smi_answers_in_the_order_of_the_fields(tmp_path: Path):
    shared = replace(Gpu(), name="NVIDIA GB10", memory_total=None, memory_free=None)
    fake = write_site(tmp_path / "fake", Scenario(gpus=(Gpu(), shared)))

    assert smi(fake, ALL_FIELDS).stdout.splitlines()[0] == (
        "0, GPU-00000000-0000-0000-0000-000000000000, NVIDIA H200, 9.0, 143771, 143157, "
        "580.95.05, Default"
    )
    assert smi(fake, "memory.total,name").stdout == "143771, NVIDIA H200\n[N/A], NVIDIA GB10\n"


def test_nvidia_smi_knows_nothing_else(tmp_path: Path):
    fake = write_site(tmp_path / "fake", Scenario())
    assert smi(fake, "name,ecc.mode").returncode == 2
    assert subprocess.run([str(fake.bin / "nvidia-smi")], capture_output=True).returncode == 2

    bare = write_site(tmp_path / "bare", Scenario(gpus=()))
    answer = smi(bare, "name")
    assert (answer.returncode, answer.stdout) == (6, "No devices were found\n")
    without = write_site(tmp_path / "without", Scenario(nvidia_smi=False))
    assert [file.name for file in without.bin.iterdir()] == ["python"]
