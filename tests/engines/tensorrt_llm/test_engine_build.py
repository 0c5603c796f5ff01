"""Builds of engines: what the library is told, what is reused, and every way to fail or stop."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines import building
from engines.base import BuildProgress
from engines.config import EngineConfig
from engines.errors import EngineBuildError, IncompatibleModelsError
from engines.store import EngineStore
from engines.tensorrt_llm_backend.backend import TensorRTBackend
from engines.tensorrt_llm_backend.engine_build import BUILD_SCRIPT, build_lines
from engines.tensorrt_llm_backend.engine_plan import QUANT_CONFIG
from engines.tensorrt_llm_backend.installation import PYTHON_VARIABLE
from engines.tensorrt_llm_backend.setup import setup_of
from tests.conftest import write_tiny_model
from tests.engines.conftest import largest_file
from tests.engines.tensorrt_llm.conftest import Install, MakeConfig, write_program
from tests.engines.test_child import ends
from tests.fake_tensorrt_llm.scenario import BuildFault, Gpu, Scenario
from tests.fake_tensorrt_llm.site import FakeInstall

AT_WORK = "[TRT-LLM] [I] Build engine ..."  # what a build says before it hangs
TIMINGS = ".timing-1.2.1-9.0.cache"


def build(backend: TensorRTBackend, config: EngineConfig) -> list[str]:
    """Build, and return what was said."""
    return [step.message for step in backend.build(config) if step.message is not None]


def complaint(backend: TensorRTBackend, config: EngineConfig) -> str:
    with pytest.raises(EngineBuildError) as caught:
        build(backend, config)
    return str(caught.value)


def until_at_work(steps: Generator[BuildProgress, None, None]) -> None:
    """Go on with a build until its library is at work."""
    assert any(step.message == AT_WORK for step in steps)


def contents(store: EngineStore) -> dict[str, bytes]:
    """Return every file of a store, and every folder; locks are empty and may stay."""
    return {
        str(path.relative_to(store.root)): path.read_bytes() if path.is_file() else b""
        for path in store.root.rglob("*")
        if ".locks" not in path.parts
    }


def kept(store: EngineStore) -> set[str]:
    """Return the names in a store's folder but for locks."""
    return {path.name for path in store.root.iterdir()} - {".locks"}


@pytest.fixture
def before(store: EngineStore) -> dict[str, bytes]:
    """A store with an engine of somebody else in it, and all that it holds."""
    with store.aside("other-0123") as folder:
        (folder / "rank0.engine").write_bytes(b"an engine")
        store.commit(folder, key="other-0123", name="other", identity={"kind": "other"})
    return contents(store)


def calls_of(fake: FakeInstall, *names: str) -> list[dict[str, Any]]:
    return [call["args"] for call in fake.read_calls(*names)]


# A build that succeeds


def test_both_engines_are_built_in_stages_and_their_logs_are_told(
    install: Install, backend: TensorRTBackend, store: EngineStore, make_config: MakeConfig
):
    install()

    steps = list(backend.build(make_config()))

    assert list(dict.fromkeys((step.stage, step.num_stages, step.name) for step in steps)) == [
        (1, 3, "check the pair"),
        (2, 3, "build the target engine"),
        (3, 3, "build the draft engine"),
    ]
    elapsed = [step.elapsed_s for step in steps]
    assert elapsed == sorted(elapsed)
    entries = {entry.identity["role"]: entry for entry in store.entries()}
    target, draft = entries["target"], entries["draft"]
    assert [step.message for step in steps if step.stage == 2 and step.message] == [
        "[TensorRT-LLM] TensorRT-LLM version: 1.2.1",
        "rank 1 of 1: loading the weights",
        "rank 1 of 1: building the engine",
        "[TRT-LLM] [I] Total time of constructing network from module object 0.42 seconds",
        "[TRT-LLM] [I] Build phase peak memory: 1234.5 MB",
        "rank 1 of 1: saving the engine",
        f"stored as {target.key}, 0 MB",
    ]
    assert target.name == "tiny-target (target, TensorRT-LLM 1.2.1)"
    assert draft.name == "tiny-draft (draft, TensorRT-LLM 1.2.1)"
    assert set(target.files) == set(draft.files) == {"config.json", "rank0.engine"}
    assert kept(store) == {target.key, draft.key, TIMINGS}


def test_the_library_is_told_small_explicit_limits(
    install: Install, backend: TensorRTBackend, make_config: MakeConfig
):
    fake = install()

    build(backend, make_config(max_draft_len=5))

    target, draft = calls_of(fake, "BuildConfig")
    common = {"max_batch_size": 1, "max_beam_width": 1, "gather_generation_logits": False}
    plugins = {"gemm_plugin": "auto", "use_paged_context_fmha": True}
    for told, longest, drafts, mode in (
        (target, 206, 5, "DRAFT_TOKENS_EXTERNAL"),
        (draft, 233, 0, "NONE"),
    ):
        assert told.items() >= common.items()
        assert [told[f"max_{name}"] for name in ("input_len", "seq_len", "num_tokens")] == (
            [longest] * 3
        )
        assert told["max_draft_len"] == drafts
        assert told["speculative_decoding_mode"] == mode
    assert calls_of(fake, "PluginConfig") == [plugins, plugins]


def test_the_models_own_code_is_never_run(
    install: Install, backend: TensorRTBackend, make_config: MakeConfig
):
    fake = install()

    build(backend, make_config(draft=None))

    (told,) = calls_of(fake, "from_hugging_face")
    assert told["trust_remote_code"] is False
    assert told["dtype"] == "bfloat16"
    assert told["load_model_on_cpu"] is True


def test_what_is_measured_once_serves_the_next_build_and_litters_nowhere(
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    fake = install()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    build(backend, make_config())

    first, second = calls_of(fake, "BuildConfig")
    assert "input_timing_cache" not in first or first["input_timing_cache"] is None
    assert second["input_timing_cache"] == str(store.root / TIMINGS)
    assert (store.root / TIMINGS).read_bytes() == b"timings"
    # Written aside: another build may be reading the shared one.
    assert Path(second["output_timing_cache"]).parent.name.startswith(".building-")
    assert list((tmp_path / "here").iterdir()) == []


def test_what_is_built_is_not_built_again(
    install: Install, backend: TensorRTBackend, make_config: MakeConfig
):
    fake = install()
    build(backend, make_config())
    num_calls = len(fake.read_calls())

    assert build(backend, make_config())[-2:] == ["built already", "built already"]
    assert len(fake.read_calls()) == num_calls


def test_a_built_draft_serves_a_second_target_and_other_lengths_of_drafts(
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    make_config: MakeConfig,
    tmp_path: Path,
):
    install()
    second_target = write_tiny_model(tmp_path / "second", seed=7)
    build(backend, make_config())

    said = build(backend, make_config(target=second_target, max_draft_len=3))

    assert said[-1] == "built already"
    roles = sorted(entry.identity["role"] for entry in store.entries())
    assert roles == ["draft", "target", "target"]


def test_a_damaged_engine_is_built_again(
    install: Install, backend: TensorRTBackend, store: EngineStore, make_config: MakeConfig
):
    install()
    config = make_config(draft=None)
    build(backend, config)
    (entry,) = store.entries()
    whole = (entry.path / "rank0.engine").read_bytes()
    (entry.path / "rank0.engine").write_bytes(b"")

    assert build(backend, config)[-1].startswith(f"stored as {entry.key}")
    assert (entry.path / "rank0.engine").read_bytes() == whole


# Words in a path


@pytest.mark.parametrize("name", ["davila", "EXAONE-tiny", "llava"])
def test_a_folder_of_any_name_reaches_the_library_by_a_plain_path(
    name: str,
    install: Install,
    backend: TensorRTBackend,
    make_config: MakeConfig,
    tiny_target: Path,
    tmp_path: Path,
):
    fake = install()
    folder = shutil.copytree(tiny_target, tmp_path / name)

    build(backend, make_config(target=folder, draft=None))

    (told,) = calls_of(fake, "from_hugging_face")
    assert Path(told["hf_model_or_dir"]).name == "checkpoint"
    assert name.lower() not in told["hf_model_or_dir"].lower()


def test_a_store_whose_path_would_be_misread_is_refused(
    install: Install, make_config: MakeConfig, tmp_path: Path
):
    fake = install()
    store = EngineStore(tmp_path / "Davila" / "store")

    text = complaint(TensorRTBackend(store), make_config(draft=None))

    assert text.startswith(f"the path '{store.root}/.building-tiny-target-target-")
    assert text.endswith(
        "holds 'vila', which TensorRT-LLM takes for a model of that name: set SPECDEC_STORE to "
        "another folder"
    )
    assert kept(store) == set()
    assert fake.read_calls() == []


# Quantization and tensor parallel


def test_integer_weights_are_asked_for_without_the_plugin_of_plain_ones(
    install: Install, backend: TensorRTBackend, make_config: MakeConfig, store: EngineStore
):
    fake = install()

    build(backend, make_config(draft=None, quantization="int8"))

    assert calls_of(fake, "QuantConfig") == [{"quant_algo": "W8A16"}]
    assert calls_of(fake, "PluginConfig") == [{"use_paged_context_fmha": True}]
    assert calls_of(fake, "quantize") == []
    (entry,) = store.entries()
    assert entry.identity["quantization"]["quant_algo"] == "W8A16"


def test_integer_weights_on_a_gpu_without_them_have_a_remedy(
    install: Install, backend: TensorRTBackend, make_config: MakeConfig, store: EngineStore
):
    install(Scenario(gpus=(Gpu("NVIDIA B200", "10.0"),)))

    assert complaint(backend, make_config(draft=None, quantization="int4")) == (
        "building the target engine of tiny-target: RuntimeError: INT8/INT4 quantization is not "
        "supported on SM>=100; this GPU has no INT8 or INT4 weights: use FP8 or 16 bits"
    )
    assert kept(store) == set()


def test_a_ready_made_folder_is_read_as_it_says(
    install: Install,
    backend: TensorRTBackend,
    make_config: MakeConfig,
    tiny_target: Path,
    tmp_path: Path,
):
    fake = install()
    folder = Path(shutil.copytree(tiny_target, tmp_path / "fp8"))
    quantization = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    (folder / QUANT_CONFIG).write_text(json.dumps({"quantization": quantization}))

    build(backend, make_config(target=folder, draft=None))

    assert calls_of(fake, "QuantConfig") == [quantization]
    assert calls_of(fake, "quantize") == []


def test_fp8_of_a_plain_checkpoint_is_calibrated(
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    fake = install()
    (tmp_path / "cnn_dailymail").mkdir()  # what would be downloaded
    monkeypatch.chdir(tmp_path)

    said = build(backend, make_config(draft=None, quantization="fp8"))

    (told,) = calls_of(fake, ".quantize")
    assert told["dtype"] == "bfloat16"
    assert calls_of(fake, "QuantConfig") == [{"quant_algo": "FP8"}]
    assert calls_of(fake, "from_hugging_face") == []
    (read,) = calls_of(fake, "from_checkpoint")
    assert read["ckpt_dir"] == told["output_dir"]
    assert "calibrating on the library's own data set, which it downloads" in said
    (entry,) = store.entries()
    assert set(entry.files) == {"config.json", "rank0.engine"}
    assert kept(store) == {entry.key, TIMINGS}


def test_a_calibration_without_its_data_set_has_a_remedy(
    install: Install, backend: TensorRTBackend, make_config: MakeConfig, store: EngineStore
):
    install()

    assert complaint(backend, make_config(draft=None, quantization="fp8")) == (
        "building the target engine of tiny-target: ConnectionError: Couldn't reach "
        "'cnn_dailymail' on the Hub; calibration downloads the library's data set: let it reach "
        "the Hub, or use an FP8 folder of NVIDIA's"
    )
    assert kept(store) == set()


@pytest.mark.parametrize(("quantization", "is_offline"), [("none", "1"), ("fp8", "0")])
def test_only_a_calibration_may_reach_the_hub(
    quantization: str,
    is_offline: str,
    install: Install,
    backend: TensorRTBackend,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    fake = install()
    python = f'echo "offline: $HF_HUB_OFFLINE"; exec {fake.python} "$@"'
    monkeypatch.setenv(PYTHON_VARIABLE, str(write_program(tmp_path / "python", python)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    (tmp_path / "cnn_dailymail").mkdir()
    monkeypatch.chdir(tmp_path)

    said = build(backend, make_config(draft=None, quantization=quantization))

    assert f"offline: {is_offline}" in said


def test_each_rank_of_a_shared_target_is_built_of_weights_of_its_own(
    install: Install, backend: TensorRTBackend, store: EngineStore, make_config: MakeConfig
):
    fake = install(Scenario(gpus=(Gpu(), Gpu())))

    said = build(backend, make_config(tensor_parallel_size=2))

    ranks = [
        (told["world_size"], told["rank"], told["tp_size"]) for told in calls_of(fake, "Mapping")
    ]
    assert ranks == [(2, 0, 2), (2, 1, 2), (1, 0, 1)]
    assert len(calls_of(fake, "from_hugging_face")) == 3
    assert "rank 2 of 2: building the engine" in said
    files = {entry.identity["role"]: set(entry.files) for entry in store.entries()}
    assert files["target"] == {"config.json", "rank0.engine", "rank1.engine"}
    assert files["draft"] == {"config.json", "rank0.engine"}


def test_a_build_sees_the_gpu_that_it_is_for(
    install: Install,
    backend: TensorRTBackend,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    fake = install(Scenario(gpus=(Gpu(), Gpu(), Gpu())))
    python = f'echo "sees: $CUDA_VISIBLE_DEVICES"; exec {fake.python} "$@"'
    monkeypatch.setenv(PYTHON_VARIABLE, str(write_program(tmp_path / "python", python)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")

    said = build(backend, make_config(devices=(1,), draft_devices=(0,)))

    assert [line for line in said if line.startswith("sees: ")] == ["sees: 0", "sees: 2"]


# A build that fails


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("fail", "RuntimeError: Engine building failed, please check error log."),
        (
            "oom",
            "RuntimeError: CUDA out of memory. Tried to allocate 14.96 GiB. GPU 0 has a total; the "
            "GPU has too little free memory: end what else runs there, lower max_seq_len, use FP8, "
            "or more GPUs",
        ),
        (
            "disk",
            "OSError: [Errno 28] No space left on device; the disk is full: make room, or set "
            "SPECDEC_STORE to a folder on another disk",
        ),
        (
            "no_paged_fmha",
            "RuntimeError: the library has switched paged context FMHA off for this quantization "
            "and GPU; drafts cannot be verified without: build the engine in bfloat16, or in FP8 "
            "with an FP8 cache",
        ),
    ],
)
def test_a_build_that_fails_is_one_sentence_and_leaves_no_trace(
    fault: BuildFault,
    sentence: str,
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    before: dict[str, bytes],
    make_config: MakeConfig,
):
    install(Scenario(build=fault))

    text = complaint(backend, make_config())

    assert text == f"building the target engine of tiny-target: {sentence}"
    after = contents(store)
    after.pop(TIMINGS, None)  # of a build that came as far
    assert after == before


def test_a_build_that_is_killed_leaves_no_trace(
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    before: dict[str, bytes],
    make_config: MakeConfig,
):
    install(Scenario(build="die"))

    text = complaint(backend, make_config())

    assert text.startswith("building the target engine of tiny-target: ")
    assert "rank 1 of 1: building the engine" in text  # where it was
    assert contents(store) == before


def test_after_a_failure_the_next_build_succeeds(
    install: Install, backend: TensorRTBackend, store: EngineStore, make_config: MakeConfig
):
    install(Scenario(build="disk"))
    complaint(backend, make_config(draft=None))
    install()

    assert build(backend, make_config(draft=None))[-1].startswith("stored as tiny-target-target-")
    assert len(store.entries()) == 1


def test_a_reason_that_only_the_log_has_is_in_the_sentence(
    install: Install,
    backend: TensorRTBackend,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    fake = install()
    log = "[TRT] [E] IBuilder::buildSerializedNetwork: Error Code 2: OutOfMemory"
    failing = f"""case $1 in *build_engine.py)
      echo "{log}"; echo "[TRT] [E] skipped"; echo "error: RuntimeError: Engine building failed."
      exit 1;;
    esac
    exec {fake.python} "$@"
    """
    monkeypatch.setenv(PYTHON_VARIABLE, str(write_program(tmp_path / "python", failing)))

    assert complaint(backend, make_config()) == (
        "building the target engine of tiny-target: RuntimeError: Engine building failed. "
        f"({log}); the GPU has too little free memory: end what else runs there, lower "
        "max_seq_len, use FP8, or more GPUs"
    )


def test_a_full_disk_is_told_before_anything_is_built(
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    before: dict[str, bytes],
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
):
    fake = install()
    monkeypatch.setattr(building, "SPARE_BYTES", 2**60)

    text = complaint(backend, make_config())

    assert text.startswith("building the target engine of tiny-target needs about 1,152,921,504,")
    assert text.endswith("make room, or set SPECDEC_STORE to a folder on another disk")
    assert fake.read_calls() == []
    assert contents(store) == before


def test_a_disk_that_is_full_at_the_first_word_is_told(
    install: Install,
    store: EngineStore,
    before: dict[str, bytes],
    make_config: MakeConfig,
):
    fake = install()
    setup = setup_of(make_config(), store)
    lines = build_lines(setup.plan("target"), store, setup.installation, timeout_s=60)

    with (
        largest_file(10),
        pytest.raises(EngineBuildError, match=r"^building the target engine of tiny-target in "),
    ):
        list(lines)
    assert fake.read_calls() == []
    assert contents(store) == before


def test_a_pair_that_shares_no_vocabulary_is_not_built(
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    make_config: MakeConfig,
    tiny_draft: Path,
    tmp_path: Path,
):
    fake = install()
    draft = Path(shutil.copytree(tiny_draft, tmp_path / "draft"))
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))

    with pytest.raises(IncompatibleModelsError) as caught:
        build(backend, make_config(draft=draft))
    assert str(caught.value).startswith(
        "'draft' cannot draft for 'tiny-target': their tokenizers differ at 2 of 258 ids ("
    )
    assert fake.read_calls() == []
    assert not store.root.exists()


# A build that takes long, or is stopped


def test_a_build_that_hangs_is_ended_in_time(
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    before: dict[str, bytes],
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    fake = install()
    hanging = f"""case $1 in *build_engine.py)
      echo $$ > {tmp_path}/pid; echo "{AT_WORK}"; exec sleep 600;;
    esac
    exec {fake.python} "$@"
    """
    python = write_program(tmp_path / "python", hanging)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))

    assert complaint(backend, make_config(build_timeout_s=1.0)) == (
        "building the target engine of tiny-target: it did not end within 1 s; its last line was: "
        "[TRT-LLM] [I] Build engine; allow it longer with build_timeout_s"
    )
    assert ends(int((tmp_path / "pid").read_text()))
    assert contents(store) == before


def test_stopping_a_build_kills_all_that_it_started_and_leaves_no_trace(
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    before: dict[str, bytes],
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    fake = install(Scenario(build="hang"))
    python = (
        f'case $1 in *build_engine.py) sleep 600 & echo "helper: $!";; esac; {fake.python} "$@"'
    )
    monkeypatch.setenv(PYTHON_VARIABLE, str(write_program(tmp_path / "python", python)))
    steps = backend.build(make_config())

    said = []
    for step in steps:
        said.append(step.message or "")
        if step.message == AT_WORK:
            break
    pids = {call["pid"] for call in fake.read_calls()}
    pids |= {int(line.removeprefix("helper: ")) for line in said if line.startswith("helper: ")}
    assert len(pids) == 2
    assert all(psutil.pid_exists(pid) for pid in pids)

    steps.close()

    assert all(ends(pid) for pid in pids)
    assert contents(store) == before


def test_an_engine_that_is_being_built_is_not_built_twice(
    install: Install, backend: TensorRTBackend, store: EngineStore, make_config: MakeConfig
):
    install(Scenario(build="hang"))
    with closing(backend.build(make_config())) as first:
        until_at_work(first)
        aside = kept(store)

        text = complaint(TensorRTBackend(store), make_config())

        assert text.startswith("'tiny-target-target-")
        assert text.endswith("is being built or removed already; try again when that has ended")
        assert kept(store) == aside  # what the first one needs is still there
    assert kept(store) == set()


def test_two_different_engines_may_be_built_at_once(
    install: Install, backend: TensorRTBackend, store: EngineStore, make_config: MakeConfig
):
    install(Scenario(build="hang"))
    with closing(backend.build(make_config())) as first:
        until_at_work(first)
        install()

        build(TensorRTBackend(store), make_config(max_draft_len=3, draft=None))

        (entry,) = store.entries()
        assert entry.identity["max_draft_len"] == 3
    assert kept(store) == {entry.key, TIMINGS}


def test_a_builder_ends_with_whoever_has_started_it(
    install: Install, make_config: MakeConfig, store: EngineStore, tmp_path: Path
):
    fake = install(Scenario(build="hang"))
    plan = setup_of(make_config(), store).plan("target")
    spec = plan.build_spec(plan.checkpoint, tmp_path / "engine", tmp_path / "timing.cache")
    (tmp_path / "spec.json").write_text(json.dumps(spec), encoding="utf-8")

    with subprocess.Popen(
        [fake.python, BUILD_SCRIPT, tmp_path / "spec.json", "--tied"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as builder:
        assert builder.stdin is not None
        assert builder.stdout is not None
        while builder.stdout.readline().strip() != AT_WORK:
            pass
        builder.stdin.close()

        assert builder.wait(timeout=20) == -signal.SIGKILL
