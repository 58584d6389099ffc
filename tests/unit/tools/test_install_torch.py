"""The build of torch follows the machine's accelerators; another build is installed only if the user asks for it."""

import json
from pathlib import Path

from tools.install_torch import Machine, choose, read_machine, wrong_packages

NOTHING = Machine(has_nvidia_driver=False, intel_gpus=())


def add_gpu(root: Path, node: str, address: str, vendor: str) -> None:
    device = root / "sys/devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    link = root / "sys/class/drm" / node
    link.mkdir(parents=True)
    (link / "device").symlink_to(device)


def test_a_machine_without_accelerators_takes_the_cpu_build_from_pytorchs_index() -> None:
    chosen = choose(NOTHING, "")
    assert chosen.build == "CPU"
    assert chosen.pip_options == ("--extra-index-url", "https://download.pytorch.org/whl/cpu")


def test_an_arc_card_takes_the_xpu_build(tmp_path: Path) -> None:
    add_gpu(tmp_path, "renderD128", "0000:00:02.0", "0x8086")
    add_gpu(tmp_path, "renderD129", "0000:03:00.0", "0x8086")
    chosen = choose(read_machine(tmp_path), "")
    assert chosen.build == "XPU"
    assert chosen.pip_options == ("--extra-index-url", "https://download.pytorch.org/whl/xpu")
    assert "0000:03:00.0" in chosen.reason and "0000:00:02.0" not in chosen.reason


def test_an_integrated_intel_gpu_takes_the_cpu_build_and_says_how_to_get_the_other(tmp_path: Path) -> None:
    add_gpu(tmp_path, "renderD128", "0000:00:02.0", "0x8086")
    chosen = choose(read_machine(tmp_path), "")
    assert chosen.build == "CPU"
    assert "TORCH_INDEX=https://download.pytorch.org/whl/xpu" in chosen.reason


def test_cards_of_others_are_not_intels(tmp_path: Path) -> None:
    add_gpu(tmp_path, "renderD128", "0000:03:00.0", "0x1002")
    assert read_machine(tmp_path) == NOTHING


def test_an_nvidia_driver_takes_pypis_build_also_beside_an_arc_card(tmp_path: Path) -> None:
    add_gpu(tmp_path, "renderD129", "0000:03:00.0", "0x8086")
    driver = tmp_path / "proc/driver/nvidia"
    driver.mkdir(parents=True)
    (driver / "version").write_text("NVRM version\n")
    chosen = choose(read_machine(tmp_path), "")
    assert (chosen.build, chosen.pip_options) == ("CUDA", ())


def test_nvidias_driver_of_windows_takes_the_cuda_build_in_wsl(tmp_path: Path) -> None:
    (tmp_path / "usr/lib/wsl/lib").mkdir(parents=True)
    assert choose(read_machine(tmp_path), "").build == "CPU"
    (tmp_path / "usr/lib/wsl/lib/libcuda.so.1").touch()
    assert choose(read_machine(tmp_path), "").build == "CUDA"


def test_an_index_of_the_user_is_used_alone() -> None:
    assert choose(NOTHING, "https://example.org/whl").pip_options == ("--index-url", "https://example.org/whl")
    assert choose(NOTHING, "pip").pip_options == ()


def report(*names: str) -> str:
    return json.dumps({"install": [{"metadata": {"name": name}} for name in names]})


def test_cuda_libraries_are_wrong_beside_a_cpu_or_xpu_build() -> None:
    assert wrong_packages(report("torch", "nvidia-nccl-cu13", "cuda-bindings", "triton"), "CPU") == [
        "nvidia-nccl-cu13",
        "cuda-bindings",
    ]
    assert wrong_packages(report("torch", "sympy"), "CPU") == []
    assert wrong_packages(report("torch", "triton"), "XPU") == ["triton"]
    assert wrong_packages(report("torch", "triton-xpu"), "XPU") == []
