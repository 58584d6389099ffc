"""Counts the accelerators of this machine by the kernel's device files, because `baton serve` must not load torch.

A restriction in the environment (`ZE_AFFINITY_MASK`, `CUDA_VISIBLE_DEVICES`) is respected: only the devices that it
names are given to instances.
"""

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

_INTEL_VENDOR_ID = "0x8086"
_MIN_DISCRETE_BAR_BYTES = 2**30
"""Smallest memory window on the bus that identifies a discrete card: an integrated GPU has no local memory to map."""


def device_indexes(device: str, environ: Mapping[str, str], root: Path = Path("/")) -> list[int]:
    """Return the numbers of this machine's accelerators, as `--device-index` takes them; an empty list means that
    instances use the CPU.

    `device` is the value of `--device`; variables in `environ` may restrict the devices; `root` is the folder with
    `sys` and `dev`.
    """
    if device in ("auto", "xpu"):
        found = _allowed(environ.get("ZE_AFFINITY_MASK"), _count_intel(root))
        if found:
            return found
    if device in ("auto", "cuda"):
        return _allowed(environ.get("CUDA_VISIBLE_DEVICES"), _count_nvidia(root))
    return []


def can_torch_use_accelerators() -> bool:
    """Return whether torch is installed and is not a CPU build, whose version ends with `+cpu`."""
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _allowed(mask: str | None, count: int) -> list[int]:
    if not mask:
        return list(range(count))
    # CUDA also accepts UUIDs and Level Zero accepts sub-devices ("0.1"); neither has a number for `--device-index`.
    named = [part.strip() for part in mask.split(",")]
    return [int(part) for part in named if part.isdigit()]


def _count_nvidia(root: Path) -> int:
    # The pattern leaves out nvidiactl, nvidia-uvm and other control nodes.
    return sum(bool(re.fullmatch(r"nvidia\d+", node.name)) for node in (root / "dev").glob("nvidia*"))


def _count_intel(root: Path) -> int:
    cards = (root / "sys/class/drm").glob("renderD*")
    return sum(_is_discrete_intel(card / "device") for card in cards)


def _is_discrete_intel(device: Path) -> bool:
    try:
        if (device / "vendor").read_text().strip() != _INTEL_VENDOR_ID:
            return False
        windows = [line.split() for line in (device / "resource").read_text().splitlines()]
    except OSError:
        return False
    # `resource` has one line per window: first address, last address, flags. An unused window is all zeros.
    sizes = [int(end, 16) - int(start, 16) + 1 for start, end, *_ in windows if int(end, 16)]
    return max(sizes, default=0) >= _MIN_DISCRETE_BAR_BYTES
