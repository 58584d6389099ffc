"""Intel cards as the kernel shows them: driver, memory window, permissions. Reads files under `root` alone."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton_serve.services.doctor.findings import Finding, note, ok, problem, warning

INTEL_VENDOR_ID = "0x8086"
MIN_DISCRETE_BAR_BYTES = 2**30
"""An integrated GPU has no local memory, and so no large window on its bus."""
SMALL_BAR_BYTES = 256 * 2**20
HOST_MIRROR_VERSION = (26, 9)
RUNTIME_PACKAGES = ("libze-intel-gpu1", "intel-level-zero-gpu", "intel-opencl-icd")


@dataclass(frozen=True, slots=True)
class GpuCard:
    node: str
    """`renderD128`."""
    driver: str
    bar_bytes: int
    """The largest window of the device on its bus; with ReBAR it is as large as the card's memory."""
    is_discrete: bool


def intel_cards(root: Path) -> list[GpuCard]:
    found = []
    for render in sorted((root / "sys/class/drm").glob("renderD*")):
        device = render / "device"
        if _text(device / "vendor") != INTEL_VENDOR_ID:
            continue
        driver = _link_name(device / "driver")
        bar = max(_bar_sizes(_text(device / "resource")), default=0)
        # A discrete card without ReBAR shows a window of 256 MiB; an integrated one is always device 02 of bus 00.
        is_discrete = bar >= MIN_DISCRETE_BAR_BYTES or not device.resolve().name.startswith("0000:00:02")
        found.append(GpuCard(render.name, driver, bar, is_discrete))
    return [card for card in found if card.is_discrete]


def check_cards(root: Path) -> Iterator[Finding]:
    cards = intel_cards(root)
    if not cards:
        yield from _no_cards(root)
        return
    names = ", ".join(f"{card.node} ({card.driver or 'no driver'})" for card in cards)
    yield ok("cards", f"{len(cards)} discrete Intel card(s): {names}")
    for card in cards:
        yield _driver(card)
        yield _rebar(card)
        yield _permission(card, root)


def _no_cards(root: Path) -> Iterator[Finding]:
    loaded = [name for name in ("xe", "i915") if (root / "sys/module" / name).exists()]
    if loaded:
        yield warning(
            "cards",
            f"kernel module {', '.join(loaded)} is loaded, but there is no discrete Intel card",
            "check `lspci -nn | grep -i vga`, the card's power cables and `dmesg | grep -E 'xe|i915'`; in a container "
            "pass /dev/dri through",
        )
    else:
        yield note(
            "cards", "no Intel card and no module xe or i915", "on Arc: kernel 6.12 or newer loads xe for Battlemage"
        )


def _driver(card: GpuCard) -> Finding:
    if card.driver in ("xe", "i915"):
        return ok("driver", f"{card.node} is driven by {card.driver}")
    return problem(
        "driver",
        f"{card.node} is driven by {card.driver or 'nothing'}",
        "install a kernel with the module xe (Battlemage: 6.12+) or i915 (Alchemist: 6.2+), and linux-firmware",
    )


def _rebar(card: GpuCard) -> Finding:
    if card.bar_bytes > SMALL_BAR_BYTES:
        return ok("rebar", f"{card.node} shows {card.bar_bytes / 2**30:.0f} GiB of its memory at once")
    return problem(
        "rebar",
        f"{card.node} shows {card.bar_bytes / 2**20:.0f} MiB of its memory: Resizable BAR is off",
        "turn on 'Above 4G decoding' and 'Resizable BAR' in the firmware; without them Arc loses most of its speed",
    )


def _permission(card: GpuCard, root: Path) -> Finding:
    path = root / "dev/dri" / card.node
    if not path.exists():
        return problem("permissions", f"/dev/dri/{card.node} is missing here", "pass /dev/dri into the container")
    if os.access(path, os.R_OK | os.W_OK):
        return ok("permissions", f"/dev/dri/{card.node} can be opened")
    group = path.stat().st_gid
    return problem(
        "permissions",
        f"/dev/dri/{card.node} cannot be opened: it belongs to group {group}",
        f"join that group: usermod -aG render $USER; docker --group-add {group}; Helm gpu.renderGroup={group}",
    )


def check_visible(root: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Two visible cards in one process: compute-runtime 26.09 and newer keeps a copy of all device memory in host
    memory (https://github.com/intel/compute-runtime/issues/953)."""
    mask = environ.get("ZE_AFFINITY_MASK")
    if mask is not None:
        yield ok("visible cards", f"ZE_AFFINITY_MASK={mask}")
    visible = len(mask.split(",")) if mask else len(intel_cards(root))
    if visible < 2:
        return
    version = runtime_version(root)
    if version is not None and version < HOST_MIRROR_VERSION:
        yield ok("host mirror", f"compute-runtime {version[0]}.{version[1]:02d} keeps no copy of device memory")
        return
    known = "of unknown version" if version is None else f"{version[0]}.{version[1]:02d}"
    yield warning(
        "host mirror",
        f"{visible} cards are visible to one process; compute-runtime ({known}) from 26.09 on then copies all device "
        "memory into host memory, 1:1",
        "show each process one card: `baton serve` does, else --device-index or ZE_AFFINITY_MASK",
    )


def runtime_version(root: Path) -> tuple[int, int] | None:
    """Of the compute runtime, as the package manager knows it."""
    for package in RUNTIME_PACKAGES:
        found = re.search(
            rf"^Package: {package}$(?:\n(?!\n).*)*?\nVersion: (\d+)\.(\d+)",
            _text(root / "var/lib/dpkg/status"),
            re.MULTILINE,
        )
        if found:
            return int(found[1]), int(found[2])
    return None


def _bar_sizes(text: str) -> Iterator[int]:
    for line in text.splitlines():
        start, end, *_ = (int(word, 16) for word in line.split())
        if end:
            yield end - start + 1


def _link_name(path: Path) -> str:
    return path.resolve().name if path.exists() else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
