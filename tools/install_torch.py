#!/usr/bin/env python3
"""Install the build of torch that fits this machine into the environment of the Python that runs this program.

PyPI has one build of torch for Linux on x86-64, the CUDA build: 2.7 GB that a machine without an NVIDIA GPU never uses.
`make` calls this program, which looks for accelerators, prints what it chose and why, and calls pip:

| machine | build | from |
|---|---|---|
| NVIDIA driver | CUDA | pip's own index |
| Intel card on a PCIe slot | XPU | PyTorch's index for XPU, besides pip's own |
| anything else | CPU | PyTorch's index for CPUs, besides pip's own |

`--index URL` (make's `TORCH_INDEX`) is used alone and overrides all of this. `--index pip` takes pip's own index alone.
Needs only the standard library.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PYTORCH_INDEX = "https://download.pytorch.org/whl"
INTEL_VENDOR = "0x8086"
INTEGRATED = "0000:00:02.0"
"""PCI address of every integrated Intel GPU. Most of them are too old for torch's XPU build, so the CPU build is the
safer choice; owners of a newer one set TORCH_INDEX."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The accelerators of a machine, as its kernel shows them."""

    has_nvidia_driver: bool
    intel_gpus: tuple[str, ...]
    """PCI addresses of Intel GPUs with a render node, the integrated one included."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A build of torch: `pip_options` say where pip finds it."""

    build: str
    reason: str
    download: str
    pip_options: tuple[str, ...] = ()


def read_machine(root: Path = Path("/")) -> Machine:
    """Return the accelerators that the kernel shows below `root`."""
    found = []
    for node in sorted(root.glob("sys/class/drm/renderD*")):
        device = (node / "device").resolve()
        vendor = device / "vendor"
        if vendor.exists() and vendor.read_text().strip() == INTEL_VENDOR:
            found.append(device.name)
    # In WSL the driver is that of Windows: the kernel shows nothing, but Windows adds its libraries.
    has_nvidia_driver = any(
        (root / path).exists() for path in ("proc/driver/nvidia/version", "usr/lib/wsl/lib/libcuda.so.1")
    )
    return Machine(has_nvidia_driver, tuple(found))


def choose(machine: Machine, index: str) -> Choice:
    """Return the build for a machine. `index` is the user's: a URL, `pip` for pip's own index, or empty."""
    if index == "pip":
        return Choice("any", "TORCH_INDEX=pip was given", "on x86-64 PyPI has the CUDA build, about 2.7 GB")
    if index:
        return Choice("any", f"TORCH_INDEX={index} was given", "depends on that index", ("--index-url", index))
    if machine.has_nvidia_driver:
        return Choice("CUDA", "this machine has an NVIDIA driver", "about 2.7 GB with its CUDA libraries")
    cards = [address for address in machine.intel_gpus if address != INTEGRATED]
    if cards:
        return _from_pytorch("XPU", f"this machine has Intel cards at {', '.join(cards)}", "roughly 2 GB")
    reason = "no NVIDIA driver and no Intel card were found"
    if machine.intel_gpus:
        reason += f"; to try the integrated Intel GPU, set TORCH_INDEX={PYTORCH_INDEX}/xpu"
    return _from_pytorch("CPU", reason, "about 200 MB")


def _from_pytorch(build: str, reason: str, download: str) -> Choice:
    # An extra index, because a machine that cannot reach PyTorch's may have the wheels elsewhere. Of equal versions pip
    # prefers the one with a local part, such as 2.13.0+cpu, so PyTorch's wheel wins over the CUDA build of PyPI.
    return Choice(build, reason, download, ("--extra-index-url", f"{PYTORCH_INDEX}/{build.lower()}"))


def wrong_packages(report: str, build: str) -> list[str]:
    """Return the packages in a report of `pip install --dry-run` that do not belong to `build`."""
    names = [package["metadata"]["name"] for package in json.loads(report)["install"]]
    unwanted = ("nvidia-", "cuda-") if build in ("CPU", "XPU") else ()
    wrong = [name for name in names if name.startswith(unwanted)] if unwanted else []
    # NVIDIA's Triton and Intel's install the same module; with the wrong one kernels give wrong results.
    return [*wrong, "triton"] if build == "XPU" and "triton" in names else wrong


def main() -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(description="Install the build of torch that fits this machine.")
    parser.add_argument("--requirement", default="torch", help="what pip installs, such as torch==2.13.0")
    parser.add_argument("--index", default="", help="package index of another build, used alone; pip: pip's own index")
    options = parser.parse_args()
    chosen = choose(read_machine(), options.index)
    _say(f"torch: the build for {chosen.build}, because {chosen.reason}. Download: {chosen.download}.")
    pip = [sys.executable, "-m", "pip", "install", "--no-compile", *chosen.pip_options, options.requirement]
    if not chosen.pip_options or options.index:
        return subprocess.run(pip, check=False).returncode
    pip += ["--retries", "0"]  # an index that cannot be reached costs seconds, not minutes
    planned = subprocess.run([*pip, "--dry-run", "--quiet", "--report", "-"], stdout=subprocess.PIPE, check=False)
    if planned.returncode:
        return planned.returncode
    wrong = wrong_packages(planned.stdout.decode(), chosen.build)
    if wrong:
        index = chosen.pip_options[1]
        _say(
            f"torch: nothing was installed. {index} has no wheel of {options.requirement} for this Python,"
            f"\nor it cannot be reached, and pip's own index offers another build (with {', '.join(wrong[:3])}, …)."
            "\nCheck the network and any proxy. TORCH_INDEX=URL names another index of such wheels;"
            "\nTORCH_INDEX=pip accepts what pip's own index has."
        )
        return 1
    return subprocess.run(pip, check=False).returncode


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
