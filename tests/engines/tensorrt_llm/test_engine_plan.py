"""Plans of engines: limits, what changes their identity and what does not, what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.checkpoints import Reference, checkpoint_identity, parse_reference
from engines.config import EngineConfig, TensorRTOptions
from engines.errors import BackendUnavailableError, IncompatibleModelsError, ModelLoadError
from engines.tensorrt_llm_backend.engine_plan import (
    QUANT_CONFIG,
    EnginePlan,
    Role,
    check_draft_width,
    engine_dtype,
    engine_plan,
    engine_seq_len,
    model_config,
    quantization_of,
)
from engines.tensorrt_llm_backend.gpus import Gpu
from engines.tensorrt_llm_backend.installation import Installation

INSTALLATION = Installation("/opt/python", "1.2.1", "3.12.3", "2.9.1", True, True, True)
GPU = Gpu(0, "NVIDIA H200", "9.0", 150 * 10**9, 150 * 10**9, "580.95.05", False)
GPUS = tuple(replace(GPU, index=index) for index in range(8))
READY_MADE: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.37.0"},
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    },
}


def plan_of(
    folder: Path,
    role: Role = "target",
    *,
    version: str = "1.2.1",
    gpu: Gpu = GPU,
    dtype: Any = "auto",
    device: Any = "auto",
    **options: Any,
) -> EnginePlan:
    config = EngineConfig(
        "tensorrt_llm",
        str(folder),
        dtype=dtype,
        device=device,
        tensorrt_llm=TensorRTOptions(**{"max_seq_len": 200, **options}),
    )
    gpus = tuple(replace(gpu, index=index) for index in range(8))
    installation = replace(INSTALLATION, version=version)
    reference = parse_reference(str(folder))
    return engine_plan(config, role, reference, folder, installation, gpus)


def config_with(**options: Any) -> EngineConfig:
    return EngineConfig("tensorrt_llm", tensorrt_llm=TensorRTOptions(**options))


@pytest.fixture
def folder(tmp_path: Path, tiny_target: Path) -> Path:
    """A copy of the tiny target, to change."""
    return Path(shutil.copytree(tiny_target, tmp_path / "tiny"))


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def make_ready(folder: Path, **quantization: Any) -> None:
    made = {**READY_MADE, "quantization": {**READY_MADE["quantization"], **quantization}}
    (folder / QUANT_CONFIG).write_text(json.dumps(made))


# Identity


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "draft"},
        {"version": "1.1.0"},
        {"gpu": replace(GPU, name="NVIDIA H100")},
        {"gpu": replace(GPU, compute_capability="8.9")},
        {"dtype": "float16"},
        {"max_seq_len": 201},
        {"max_draft_len": 4},
        {"quantization": "int8"},
        {"acceptance": "logits"},
        {"tensor_parallel_size": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_an_engine_changes_its_key(changes: dict[str, Any], tiny_target: Path):
    assert plan_of(tiny_target, **changes).key != plan_of(tiny_target).key


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": (3,)},
        {"gpu": replace(GPU, free_bytes=1, total_bytes=2, driver="590.1")},
        {"dtype": "bfloat16"},  # what auto means
        {"device": "cuda"},
        {"launcher": "mpirun"},
        {"python": "/opt/other/python"},
        {"build_timeout_s": 60.0},
        {"quantization": "none"},
        {"draft_tensor_parallel_size": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_does_not_change_an_engine_leaves_its_key(changes: dict[str, Any], tiny_target: Path):
    assert plan_of(tiny_target, **changes).key == plan_of(tiny_target).key


def test_one_draft_engine_serves_every_length_of_drafts(tiny_draft: Path):
    keys = {plan_of(tiny_draft, "draft", max_draft_len=length).key for length in (1, 5, 32)}

    assert len(keys) == 1


def test_a_key_says_which_model_in_which_role(tiny_target: Path):
    assert plan_of(tiny_target).key.startswith("tiny-target-target-")
    assert plan_of(tiny_target, "draft").key.startswith("tiny-target-draft-")


@pytest.mark.parametrize("name", ["davila", "LLaVA-style", "exaone.tiny"])
def test_a_key_holds_no_word_that_the_library_takes_for_another_model(
    name: str, tmp_path: Path, tiny_target: Path
):
    folder = Path(shutil.copytree(tiny_target, tmp_path / name))

    assert plan_of(folder).key.startswith("model-target-")
    assert plan_of(folder).name == name


def test_the_identity_is_json_and_holds_no_path(tiny_target: Path):
    identity = plan_of(tiny_target).identity

    assert json.loads(json.dumps(identity)) == identity
    assert str(tiny_target.parent) not in json.dumps(identity)


def test_a_changed_weight_or_setting_is_another_checkpoint(folder: Path):
    reference = parse_reference(str(folder))
    before = checkpoint_identity(reference, folder)

    (folder / "model.safetensors").touch()
    touched = checkpoint_identity(reference, folder)
    change_config(folder, rope_theta=5.0)

    assert len({before, touched, checkpoint_identity(reference, folder)}) == 3


def test_a_copy_with_its_times_is_the_same_checkpoint(folder: Path, tmp_path: Path):
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere"))

    assert checkpoint_identity(parse_reference(str(copy)), copy) == checkpoint_identity(
        parse_reference(str(folder)), folder
    )


def test_of_a_hub_model_the_commit_counts_not_the_branch(tmp_path: Path):
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "c0ffee"
    branch = Reference("org/tiny", "hub", "org/tiny", repo="org/tiny")
    named = Reference("org/tiny@v1", "hub", "org/tiny", repo="org/tiny", revision="v1")

    assert checkpoint_identity(branch, snapshot) == "org/tiny@c0ffee"
    assert checkpoint_identity(named, snapshot) == "org/tiny@c0ffee"


# Limits and what the build is told


@pytest.mark.parametrize(
    ("role", "max_draft_len", "longest"), [("target", 5, 206), ("draft", 5, 233)]
)
def test_an_engine_has_room_for_a_text_and_the_drafts_of_a_step(
    role: Role, max_draft_len: int, longest: int
):
    assert engine_seq_len(200, max_draft_len, role) == longest


def test_the_build_is_told_what_the_identity_says(tiny_target: Path):
    plan = plan_of(tiny_target, max_draft_len=5, acceptance="logits")

    assert plan.build_spec(Path("/from"), Path("/to"), Path("/timings")) == {
        "checkpoint": "/from",
        "output": "/to",
        "timing_cache": "/timings",
        "dtype": "bfloat16",
        "quantization": None,
        "tensor_parallel_size": 1,
        "max_seq_len": 206,
        "max_draft_len": 5,
        "gather_generation_logits": True,
    }


def test_a_draft_verifies_nothing(tiny_draft: Path):
    assert plan_of(tiny_draft, "draft", max_draft_len=5).identity["max_draft_len"] == 0


def test_a_text_longer_than_the_model_reads_is_refused(tiny_target: Path):
    with pytest.raises(ModelLoadError) as caught:
        plan_of(tiny_target, max_seq_len=513)
    assert str(caught.value) == (
        "max_seq_len is 513, and 'tiny-target' reads 512 tokens at most: use that or less"
    )


# Tensor parallel


def test_the_gpus_of_each_model_are_those_named_or_the_first(tiny_target: Path):
    assert plan_of(tiny_target, tensor_parallel_size=2).devices == (0, 1)
    assert plan_of(tiny_target, tensor_parallel_size=2, devices=(5, 3)).devices == (5, 3)
    assert plan_of(tiny_target, "draft", draft_devices=(7,)).devices == (7,)


def test_the_draft_has_its_own_number_of_gpus(tiny_target: Path):
    plan = plan_of(tiny_target, "draft", tensor_parallel_size=4, draft_tensor_parallel_size=2)

    assert plan.identity["tensor_parallel_size"] == 2


def test_a_gpu_that_is_not_here_is_refused(tiny_target: Path):
    with pytest.raises(ValueError, match="devices need GPU 9, and visible are 0, 1"):
        plan_of(tiny_target, devices=(9,))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "complaint"),
    [
        (9, 3, 2, "has 9 attention heads, which 2 GPUs cannot share"),
        (9, 3, 3, None),
        (4, 2, 8, "has 4 attention heads, which 8 GPUs cannot share"),
        (8, 2, 4, None),  # each key/value head twice
        (12, 3, 4, "has 3 key/value heads, which 4 GPUs cannot share"),
        (12, None, 4, None),
        (9, 3, 1, None),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(
    heads: int, kv_heads: int | None, size: int, complaint: str | None, folder: Path
):
    change_config(folder, num_attention_heads=heads, num_key_value_heads=kv_heads)

    if complaint is None:
        assert plan_of(folder, tensor_parallel_size=size).identity["tensor_parallel_size"] == size
    else:
        with pytest.raises(ModelLoadError) as caught:
            plan_of(folder, tensor_parallel_size=size)
        assert str(caught.value) == (
            f"'tiny' {complaint}: use a tensor parallel size that divides them"
        )


# dtype and quantization


@pytest.mark.parametrize(("dtype", "name"), [("auto", "bfloat16"), ("float16", "float16")])
def test_the_weights_are_in_sixteen_bits(dtype: Any, name: str):
    assert engine_dtype(EngineConfig("tensorrt_llm", dtype=dtype)) == name


def test_float32_is_refused():
    with pytest.raises(BackendUnavailableError, match=": use bfloat16 or float16"):
        engine_dtype(EngineConfig("tensorrt_llm", dtype="float32"))


def test_the_cpu_is_refused():
    with pytest.raises(BackendUnavailableError, match="NVIDIA GPUs: set device to 'auto'"):
        engine_dtype(EngineConfig("tensorrt_llm", device="cpu"))


@pytest.mark.parametrize("asked", ["auto", "none"])
def test_a_plain_checkpoint_stays_plain(asked: str, folder: Path):
    assert quantization_of(config_with(quantization=asked), folder) is None


@pytest.mark.parametrize(("asked", "algorithm"), [("int8", "W8A16"), ("int4", "W4A16")])
def test_integer_weights_need_no_calibration(asked: str, algorithm: str, folder: Path):
    assert quantization_of(config_with(quantization=asked), folder) == {
        "quant_algo": algorithm,
        "needs_calibration": False,
    }
    assert not plan_of(folder, quantization=asked).needs_calibration


def test_fp8_of_a_plain_checkpoint_is_calibrated(folder: Path):
    assert quantization_of(config_with(quantization="fp8"), folder) == {
        "quant_algo": "FP8",
        "needs_calibration": True,
    }
    assert plan_of(folder, quantization="fp8").needs_calibration


@pytest.mark.parametrize("asked", ["auto", "fp8"])
def test_a_ready_made_checkpoint_is_taken_as_it_is(asked: str, folder: Path):
    make_ready(folder)

    assert quantization_of(config_with(quantization=asked), folder) == {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
        "needs_calibration": False,
    }


@pytest.mark.parametrize("asked", ["none", "int8", "int4"])
def test_a_ready_made_checkpoint_cannot_be_had_otherwise(asked: str, folder: Path):
    make_ready(folder)

    with pytest.raises(ModelLoadError) as caught:
        quantization_of(config_with(quantization=asked), folder)
    assert str(caught.value) == ("'tiny' is quantised already, to FP8: set quantization to 'auto'")


def test_a_ready_made_checkpoint_that_does_not_say_how_is_refused(folder: Path):
    make_ready(folder, quant_algo=None)

    with pytest.raises(ModelLoadError, match="names no quant_algo: choose another checkpoint"):
        quantization_of(config_with(), folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"quantization": 1}'])
def test_a_quantization_that_cannot_be_read_is_told(text: str, folder: Path):
    (folder / QUANT_CONFIG).write_text(text)

    with pytest.raises(ModelLoadError, match=f"'{folder / QUANT_CONFIG}' cannot be read: "):
        quantization_of(config_with(), folder)


def test_a_foreign_quantization_is_refused(folder: Path):
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})

    with pytest.raises(ModelLoadError) as caught:
        plan_of(folder)
    assert str(caught.value) == (
        "'tiny' is quantised in a way that TensorRT-LLM's engines do not read: use the model in "
        "16 bits, or an FP8 folder of NVIDIA's"
    )


# Models


def test_an_unknown_architecture_is_refused_with_those_that_are_known(folder: Path):
    change_config(folder, architectures=["SmolLM3ForCausalLM"])

    with pytest.raises(ModelLoadError) as caught:
        plan_of(folder)
    assert str(caught.value).startswith(
        "'tiny' is a SmolLM3ForCausalLM, which TensorRT-LLM builds no engine of: use one of "
        "LlamaForCausalLM, MistralForCausalLM"
    )
    assert str(caught.value).endswith(", or the PyTorch flow")


def test_a_checkpoint_that_names_no_architecture_is_refused(folder: Path):
    change_config(folder, architectures=None)

    with pytest.raises(ModelLoadError, match="'tiny' is a none, which TensorRT-LLM builds no"):
        plan_of(folder)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            {"pretrained_config": {}, "build_config": {}},
            "'m' is a built TensorRT-LLM engine: name the model's folder, from which engines are "
            "built into the store",
        ),
        (
            {"architecture": "LlamaForCausalLM", "dtype": "bfloat16"},
            "'m' is a TensorRT-LLM checkpoint: name the Hugging Face folder it was made of",
        ),
    ],
)
def test_what_the_library_has_written_itself_is_no_model(
    config: dict[str, Any], complaint: str, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelLoadError) as caught:
        model_config(tmp_path, "m")
    assert str(caught.value) == complaint


@pytest.mark.parametrize("text", ["", "3", "[1]", "{"])
def test_a_config_that_cannot_be_read_is_told(text: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelLoadError, match="the model 'm' cannot be read"):
        model_config(tmp_path, "m")


def test_a_draft_wider_than_its_target_is_refused(folder: Path, tiny_target: Path):
    change_config(folder, vocab_size=321)

    check_draft_width(folder, "wide", tiny_target, "narrow")
    with pytest.raises(IncompatibleModelsError) as caught:
        check_draft_width(tiny_target, "narrow", folder, "wide")
    assert str(caught.value) == (
        "'wide' has 321 rows of vocabulary and 'narrow' 320: it could propose what the target "
        "cannot read; choose another draft"
    )
