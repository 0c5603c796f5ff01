"""A config on this machine: the flow, the GPUs, the worker's view of them; refusals in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engines.config import EngineConfig
from engines.doctor import doctor
from engines.errors import EngineError, ModelLoadError
from engines.store import EngineStore
from engines.tensorrt_llm_backend import installation
from engines.tensorrt_llm_backend.backend import TensorRTBackend
from engines.tensorrt_llm_backend.installation import PYTHON_VARIABLE
from engines.tensorrt_llm_backend.setup import setup_of
from tests.engines.tensorrt_llm.conftest import Install, MakeConfig
from tests.fake_tensorrt_llm.scenario import Gpu, Scenario, Version

FOUR = Scenario(gpus=(Gpu(), Gpu(), Gpu(), Gpu()))
OLD = Gpu("Tesla T4", "7.5")


def refusal(config: EngineConfig, store: EngineStore) -> str:
    with pytest.raises(EngineError) as caught:
        setup_of(config, store)
    return str(caught.value)


@pytest.mark.parametrize(
    ("version", "asked", "flow"),
    [
        ("1.0.0", "auto", "engine"),
        ("1.2.1", "auto", "engine"),
        ("1.2.1", "pytorch", "pytorch"),
        ("1.3.0rc15", "engine", "engine"),
        ("1.3.0rc22", "auto", "pytorch"),
        ("1.4.0rc1", "pytorch", "pytorch"),
    ],
)
def test_engines_are_preferred_where_the_library_has_them(
    version: Version,
    asked: str,
    flow: str,
    install: Install,
    store: EngineStore,
    make_config: MakeConfig,
):
    install(Scenario(version=version))

    assert setup_of(make_config(flow=asked), store).flow == flow


def test_engines_of_a_version_without_them_are_refused(
    install: Install, store: EngineStore, make_config: MakeConfig
):
    install(Scenario(version="1.4.0rc1"))

    assert refusal(make_config(flow="engine"), store) == (
        "TensorRT-LLM 1.4.0rc1 has no TensorRT engines (the last release with them is 1.2.1): set "
        "flow to 'pytorch', or run 'make trtllm'"
    )


def test_an_option_names_the_interpreter(
    install: Install, store: EngineStore, make_config: MakeConfig
):
    first = install(Scenario(version="1.1.0"))
    install()

    setup = setup_of(make_config(python=str(first.python)), store)

    assert setup.installation.version == "1.1.0"


@pytest.mark.parametrize(
    ("options", "devices", "of_target", "of_draft"),
    [
        ({}, (0,), None, None),
        ({"devices": (2,), "draft_devices": (2,)}, (2,), None, None),
        ({"devices": (3,), "draft_devices": (1,)}, (3, 1), [0], [1]),
        ({"tensor_parallel_size": 2}, (0, 1), [0, 1], [0]),
        (
            {"tensor_parallel_size": 2, "devices": (3, 2), "draft_devices": (2,)},
            (3, 2),
            [0, 1],
            [1],
        ),
        ({"flow": "pytorch", "devices": (3,), "draft_devices": (1,)}, (3,), None, None),
    ],
    ids=str,
)
def test_the_worker_knows_the_gpus_in_use_by_numbers_from_zero(
    options: dict[str, Any],
    devices: tuple[int, ...],
    of_target: list[int] | None,
    of_draft: list[int] | None,
    install: Install,
    store: EngineStore,
    make_config: MakeConfig,
):
    install(FOUR)

    setup = setup_of(make_config(**options), store)

    assert setup.devices == devices
    assert [gpu.index for gpu in setup.used_gpus()] == list(devices)
    assert setup.worker_devices("target") == of_target
    if setup.flow == "engine":
        assert setup.worker_devices("draft") == of_draft


def test_without_a_draft_only_the_targets_gpus_are_in_use(
    install: Install, store: EngineStore, make_config: MakeConfig
):
    install(FOUR)

    setup = setup_of(make_config(draft=None, devices=(2,)), store)

    assert list(setup.references) == ["target"]
    assert setup.devices == (2,)


def test_what_is_free_is_asked_anew(install: Install, store: EngineStore, make_config: MakeConfig):
    install(Scenario(gpus=(Gpu(memory_free=1000),)))
    setup = setup_of(make_config(), store)
    install(Scenario(gpus=(Gpu(memory_free=500),)))

    assert [gpu.free_bytes for gpu in setup.gpus] == [1000 * 2**20]
    assert [gpu.free_bytes for gpu in setup.used_gpus()] == [500 * 2**20]


def test_a_gpu_that_is_not_used_may_be_too_old(
    install: Install, store: EngineStore, make_config: MakeConfig
):
    install(Scenario(gpus=(OLD, Gpu())))

    assert setup_of(make_config(devices=(1,), draft_devices=(1,)), store).devices == (1,)
    assert refusal(make_config(), store).startswith("the Tesla T4 has compute capability 7.5")


def test_more_gpus_than_there_are_is_a_bad_argument(
    install: Install, store: EngineStore, make_config: MakeConfig
):
    install()

    with pytest.raises(ValueError, match="devices need GPU 1, and visible are 0: name those, or"):
        setup_of(make_config(tensor_parallel_size=2), store)


def test_a_model_that_is_none_is_refused_before_the_machine_is_asked(
    store: EngineStore, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", "/none")

    with pytest.raises(ModelLoadError, match="there is no model '/no/model'"):
        setup_of(make_config(target="/no/model"), store)


def test_float32_is_refused_before_the_machine_is_asked(
    store: EngineStore, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", "/none")

    assert "cannot verify drafts in float32" in refusal(
        replace(make_config(), dtype="float32"), store
    )


def test_a_machine_without_a_gpu_is_not_told_to_install_anything(
    store: EngineStore, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", "/none")
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)

    assert refusal(make_config(), store).startswith("there is no NVIDIA driver here")


def test_the_setup_of_an_engine_asks_the_store_and_writes_nothing(
    install: Install, store: EngineStore, make_config: MakeConfig
):
    fake = install()

    setup = setup_of(make_config(), store)

    assert setup.plan("target").identity["tensorrt_llm"] == "1.2.1"
    assert not store.root.exists()
    assert fake.read_calls() == []


# The probe


def test_a_machine_that_has_all_is_usable(install: Install, backend: TensorRTBackend):
    fake = install()

    status = backend.probe()

    assert status.usable
    assert status.detail.startswith(
        "TensorRT-LLM 1.2.1 builds and runs engines and runs the PyTorch flow; "
        f"{fake.python}, Python 3."
    )
    assert status.detail.endswith("driver 580.95.05")
    assert status.devices == ("NVIDIA H200 (compute capability 9.0, 150.1 GB of 150.8 GB free)",)


def test_a_device_whose_memory_is_not_told_is_named_without(
    install: Install, backend: TensorRTBackend
):
    install(Scenario(gpus=(Gpu("NVIDIA GB10", "12.1", None, None),)))

    assert backend.probe().devices == ("NVIDIA GB10 (compute capability 12.1)",)


@pytest.mark.parametrize(
    ("scenario", "fragment"),
    [
        (Scenario(nvidia_smi=False), "there is no NVIDIA driver here"),
        (Scenario(gpus=()), "No devices were found"),
        (Scenario(gpus=(OLD,)), "needs 8.0 (Ampere) or newer"),
        (Scenario(gpus=(Gpu(driver_version="535.54"),)), "needs 580 or newer: update the driver"),
        (Scenario(gpus=(Gpu(compute_mode="Exclusive_Process"),)), "sudo nvidia-smi -c DEFAULT"),
        (Scenario(import_="fail"), "'sudo apt-get install libopenmpi-dev'"),
        (Scenario(import_="libpython"), "install libpython3-dev"),
        (Scenario(import_="hang"), "its import did not end within 1 s"),
    ],
    ids=["driver", "gpus", "capability", "old driver", "mode", "mpi", "libpython", "hang"],
)
def test_what_is_missing_is_the_detail_and_the_probe_never_raises(
    scenario: Scenario,
    fragment: str,
    install: Install,
    backend: TensorRTBackend,
    store: EngineStore,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(installation, "IMPORT_TIMEOUT_S", 1.0)
    install(scenario)

    status = backend.probe()

    assert not status.usable
    assert status.devices == ()
    assert fragment in status.detail
    assert "\n" not in status.detail
    assert not store.root.exists()


def test_an_interpreter_without_the_library_is_named_in_the_detail(
    install: Install, backend: TensorRTBackend, monkeypatch: pytest.MonkeyPatch
):
    install()
    monkeypatch.delenv(PYTHON_VARIABLE)

    assert "has no TensorRT-LLM: " in backend.probe().detail


@pytest.mark.usefixtures("no_bundled_file")
def test_the_doctor_tells_of_the_back_end(install: Install, store: EngineStore):
    install()

    report = doctor(store)["backends"]["tensorrt_llm"]

    assert report["usable"]
    assert report["detail"].startswith("TensorRT-LLM 1.2.1 ")
    assert len(report["devices"]) == 1


def test_a_launcher_brings_gpus_of_other_machines(
    install: Install, store: EngineStore, make_config: MakeConfig
):
    install(FOUR)
    config = make_config(
        flow="pytorch", tensor_parallel_size=16, launcher="mpirun -n 16 trtllm-llmapi-launch"
    )

    assert setup_of(config, store).devices == (0, 1, 2, 3)


def test_a_card_for_the_screen_makes_no_machine_unusable(
    install: Install, backend: TensorRTBackend
):
    install(Scenario(gpus=(OLD, Gpu())))

    status = backend.probe()

    assert status.usable
    assert [device.partition(" (")[0] for device in status.devices] == ["NVIDIA H200"]


def test_gpus_of_two_kinds_share_no_engine(
    install: Install, store: EngineStore, make_config: MakeConfig
):
    install(Scenario(gpus=(Gpu(), Gpu("NVIDIA A100", "8.0"))))
    setup = setup_of(make_config(tensor_parallel_size=2), store)

    with pytest.raises(EngineError, match=r"GPUs of two kinds .* cannot share an engine"):
        setup.plan("target")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"launcher": "mpirun -n 2"}, "the engine flow starts its own processes"),
        ({"flow": "pytorch", "quantization": "int4"}, "the PyTorch flow quantises nothing"),
        ({"flow": "pytorch", "acceptance": "logits"}, "which engines are built for"),
        (
            {"flow": "pytorch", "launcher": "mpirun -n 1", "devices": (3,)},
            "devices name none of the 1 GPUs here",
        ),
    ],
)
def test_what_a_flow_does_not_do_is_refused(
    install: Install,
    store: EngineStore,
    make_config: MakeConfig,
    options: dict[str, Any],
    sentence: str,
):
    install()

    with pytest.raises(ValueError, match=sentence):
        setup_of(make_config(**options), store)
