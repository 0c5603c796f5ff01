"""The GPUs that are visible, as CUDA would number them, and those that will not do."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.errors import BackendUnavailableError
from engines.tensorrt_llm_backend import gpus
from engines.tensorrt_llm_backend.gpus import VISIBLE, check_gpus, chosen, only, visible_gpus
from tests.engines.tensorrt_llm.conftest import Install, write_program
from tests.fake_tensorrt_llm.scenario import Gpu, Scenario

A100 = Gpu("NVIDIA A100-SXM4-80GB", "8.0", 81920, 80000)
H200 = Gpu()
UUID = "GPU-00000000-0000-0000-0000-00000000000"  # and the number of the GPU


def complaint() -> str:
    with pytest.raises(BackendUnavailableError) as caught:
        visible_gpus()
    return str(caught.value)


def complaint_about(gpu: Gpu, install: Install, version: str = "1.2.1") -> str:
    install(Scenario(gpus=(gpu,)))
    with pytest.raises(BackendUnavailableError) as caught:
        check_gpus(visible_gpus(), version)
    return str(caught.value)


def test_the_driver_tells_what_each_gpu_is(install: Install):
    install(Scenario(gpus=(A100,)))

    (gpu,) = visible_gpus()

    assert gpu == gpus.Gpu(
        index=0,
        name="NVIDIA A100-SXM4-80GB",
        compute_capability="8.0",
        total_bytes=81920 * 2**20,
        free_bytes=80000 * 2**20,
        driver="580.95.05",
        is_exclusive=False,
    )


def test_memory_that_the_driver_does_not_tell_is_not_known(install: Install):
    install(Scenario(gpus=(Gpu("NVIDIA GB10", "12.1", None, None),)))

    (gpu,) = visible_gpus()

    assert gpu.total_bytes is gpu.free_bytes is None


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,1", [H200.name, A100.name]),
        (" 1 , 0 ", [A100.name, H200.name]),
        ("1", [A100.name]),
        (f"{UUID}1", [A100.name]),
        ("0,7,1", [H200.name]),  # CUDA ends at the first that is not there
    ],
)
def test_cuda_visible_devices_chooses_and_orders(
    visible: str, names: list[str], install: Install, monkeypatch: pytest.MonkeyPatch
):
    install(Scenario(gpus=(H200, A100)))
    monkeypatch.setenv(VISIBLE, visible)

    found = visible_gpus()

    assert [gpu.name for gpu in found] == names
    assert [gpu.index for gpu in found] == list(range(len(names)))


@pytest.mark.parametrize("visible", ["", "-1", "7", "NoDevFiles"])
def test_a_variable_that_hides_every_gpu_is_named(
    visible: str, install: Install, monkeypatch: pytest.MonkeyPatch
):
    install()
    monkeypatch.setenv(VISIBLE, visible)

    assert complaint() == (
        "no NVIDIA GPU is visible: look at 'nvidia-smi' and CUDA_VISIBLE_DEVICES"
    )


def test_a_machine_without_a_driver_is_sent_to_the_other_back_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))

    assert complaint() == (
        "there is no NVIDIA driver here (no nvidia-smi): TensorRT-LLM needs an NVIDIA GPU; the "
        "transformers back end runs without"
    )


def test_a_driver_without_a_gpu_is_told_in_its_own_words(install: Install):
    install(Scenario(gpus=()))

    assert complaint() == (
        "the NVIDIA driver shows no GPU (No devices were found): look at 'nvidia-smi', "
        "and update a driver before 525"
    )


def test_a_driver_too_old_to_know_the_question_is_to_be_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said = 'Field "compute_cap" is not a valid field to query.'
    write_program(tmp_path / "nvidia-smi", f"echo '{said}'; exit 2")
    monkeypatch.setenv("PATH", str(tmp_path))

    assert said in complaint()
    assert complaint().endswith("update a driver before 525")


def test_a_driver_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = write_program(tmp_path / "nvidia-smi", "exec /bin/sleep 600")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "TIMEOUT_S", 0.2)

    assert complaint() == (f"the NVIDIA driver did not answer within 0 s: look at '{program}'")


def test_a_gpu_that_is_too_old_is_refused(install: Install):
    assert complaint_about(Gpu("Tesla T4", "7.5"), install) == (
        "the Tesla T4 has compute capability 7.5, and TensorRT-LLM needs 8.0 (Ampere) or newer: "
        "name another GPU in devices, or use the transformers back end"
    )


def test_a_capability_of_two_digits_is_newer(install: Install):
    install(Scenario(gpus=(Gpu("NVIDIA B200", "10.0"),)))

    check_gpus(visible_gpus(), "1.2.1")


@pytest.mark.parametrize("mode", ["Exclusive_Process", "Prohibited"])
def test_a_gpu_in_exclusive_mode_is_refused(mode: str, install: Install):
    assert complaint_about(Gpu(compute_mode=mode), install) == (
        "the NVIDIA H200 is in a compute mode that lets no two processes share it, in which "
        "loading hangs: set it free with 'sudo nvidia-smi -c DEFAULT'"
    )


@pytest.mark.parametrize("mode", ["Default", "[N/A]", "[Not Supported]"])
def test_other_modes_are_no_obstacle(mode: str, install: Install):
    install(Scenario(gpus=(Gpu(compute_mode=mode),)))

    check_gpus(visible_gpus(), "1.2.1")


@pytest.mark.parametrize(
    ("driver", "version", "needed"),
    [
        ("570.86.15", "1.2.1", 580),
        ("570.86.15", "1.4.0rc1", 580),
        ("515.43.04", "1.1.0", 525),
    ],
)
def test_a_driver_that_is_too_old_is_told_with_the_one_that_is_needed(
    driver: str, version: str, needed: int, install: Install
):
    assert complaint_about(Gpu(driver_version=driver), install, version) == (
        f"the NVIDIA driver is {driver}, and TensorRT-LLM {version} needs {needed} or newer: "
        "update the driver, or use the transformers back end"
    )


def test_an_image_of_nvidias_runs_on_an_older_driver(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(Scenario(gpus=(Gpu(driver_version="535.104.05"),)))
    monkeypatch.setattr(gpus, "COMPATIBILITY", tmp_path)

    check_gpus(visible_gpus(), "1.2.1")


def test_an_older_library_takes_an_older_driver(install: Install):
    install(Scenario(gpus=(Gpu(driver_version="570.86.15"),)))

    check_gpus(visible_gpus(), "1.1.0")


def test_the_gpus_of_some_numbers_come_in_their_order(install: Install):
    install(Scenario(gpus=(H200, A100)))

    assert [gpu.name for gpu in chosen(visible_gpus(), (1, 0))] == [A100.name, H200.name]


def test_a_number_without_a_gpu_is_refused(install: Install):
    install(Scenario(gpus=(H200, A100)))

    with pytest.raises(ValueError, match="devices need GPU 2, and visible are 0, 1: name those"):
        chosen(visible_gpus(), (0, 2))


@pytest.mark.parametrize(
    ("visible", "names"), [(None, "1,0"), ("", "1,0"), ("4,5", "5,4"), (f"{UUID}4,5", f"5,{UUID}4")]
)
def test_a_process_is_shown_some_gpus_by_the_names_this_one_knows(
    visible: str | None, names: str, monkeypatch: pytest.MonkeyPatch
):
    if visible is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, visible)

    assert only((1, 0)) == {VISIBLE: names, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
