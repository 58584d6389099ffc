"""Counts the accelerators of this machine by the kernel's device files, since this process must not load torch.

A restriction in the environment (`ZE_AFFINITY_MASK`, `CUDA_VISIBLE_DEVICES`) is kept: the devices it names are those to
share out.
"""

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

_INTEL_VENDOR_ID = "0x8086"
_MIN_DISCRETE_BAR_BYTES = 2**30
"""An integrated GPU has no local memory, and so no large memory window on its bus."""


def device_indexes(device: str, environ: Mapping[str, str], root: Path = Path("/")) -> list[int]:
    """Indexes to give to `--device-index`, one per accelerator; empty means the CPU. `device` is that of --device."""
    if device in ("auto", "xpu"):
        found = _allowed(environ.get("ZE_AFFINITY_MASK"), _count_intel(root))
        if found:
            return found
    if device in ("auto", "cuda"):
        return _allowed(environ.get("CUDA_VISIBLE_DEVICES"), _count_nvidia(root))
    return []


def can_torch_use_accelerators() -> bool:
    """False for torch's CPU builds, which name themselves so."""
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _allowed(mask: str | None, count: int) -> list[int]:
    if not mask:
        return list(range(count))
    named = [part.strip() for part in mask.split(",")]
    return [int(part) for part in named if part.isdigit()]


def _count_nvidia(root: Path) -> int:
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
    sizes = [int(end, 16) - int(start, 16) + 1 for start, end, *_ in windows if int(end, 16)]
    return max(sizes, default=0) >= _MIN_DISCRETE_BAR_BYTES
