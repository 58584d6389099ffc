"""Accelerators are counted by the kernel's device files."""

from pathlib import Path

import pytest

from baton_serve.services.local.accelerators import device_indexes


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two NVIDIA GPUs, one integrated and one discrete Intel GPU."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    for number, (vendor, size) in enumerate([("0x8086", 2**28), ("0x8086", 2**34), ("0x1002", 2**34)]):
        device = tmp_path / f"sys/class/drm/renderD{128 + number}/device"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "resource").write_text(f"{0:#018x} {0:#018x} {0:#018x}\n{4096:#018x} {4095 + size:#018x} {0:#018x}\n")
    return tmp_path


def test_a_discrete_intel_gpu_comes_first_and_an_integrated_one_never(machine: Path) -> None:
    assert device_indexes("auto", {}, machine) == [0]
    assert device_indexes("xpu", {}, machine) == [0]


def test_control_nodes_are_no_gpus(machine: Path) -> None:
    assert device_indexes("cuda", {}, machine) == [0, 1]


def test_a_restriction_in_the_environment_is_kept(machine: Path) -> None:
    assert device_indexes("cuda", {"CUDA_VISIBLE_DEVICES": "1"}, machine) == [1]
    assert device_indexes("cuda", {"CUDA_VISIBLE_DEVICES": "-1"}, machine) == []


def test_a_machine_without_any_runs_on_its_cpu(tmp_path: Path) -> None:
    assert device_indexes("auto", {}, tmp_path) == []
    assert device_indexes("cpu", {}, tmp_path) == []
