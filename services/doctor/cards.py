"""Decides by the kernel's files what is wrong with Intel cards: driver, memory window (ReBAR), permissions. All paths
are relative to `root`.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton_serve.services.doctor.findings import Finding, note, ok, problem, warning

INTEL_VENDOR_ID = "0x8086"
MIN_DISCRETE_BAR_BYTES = 2**30
"""Smallest memory window on the bus that identifies a discrete card: an integrated GPU has no local memory to map."""
SMALL_BAR_BYTES = 256 * 2**20
"""Size of the memory window of a discrete card without Resizable BAR."""
HOST_MIRROR_VERSION = (26, 9)
"""First compute-runtime that keeps a copy of device memory in host memory when a process uses several cards."""
RUNTIME_PACKAGES = ("libze-intel-gpu1", "intel-level-zero-gpu", "intel-opencl-icd")
"""Debian packages whose version is that of the compute runtime, the newest name first."""


@dataclass(frozen=True, slots=True)
class GpuCard:
    """An Intel GPU that the Linux kernel lists: its driver, its memory window, and whether it is a discrete card."""

    node: str
    """Name of its render node, such as `renderD128`."""
    driver: str
    """Name of its kernel module, such as `xe`; empty if no driver is bound to it."""
    bar_bytes: int
    """Largest memory window of the device on its bus. With Resizable BAR it is as large as the card's memory."""
    is_discrete: bool


def intel_cards(root: Path) -> list[GpuCard]:
    """Return the discrete Intel cards that the kernel lists. `root` is the folder with `sys`; tests pass another one
    than `/`.
    """
    found = []
    for render in sorted((root / "sys/class/drm").glob("renderD*")):
        device = render / "device"
        # Render nodes exist for GPUs of all vendors.
        if _text(device / "vendor") != INTEL_VENDOR_ID:
            continue
        driver = _link_name(device / "driver")
        bar = max(_bar_sizes(_text(device / "resource")), default=0)
        # The window alone cannot decide: without Resizable BAR a discrete card has one of 256 MiB, like an integrated
        # GPU. An integrated one is always device 02 on bus 00.
        is_discrete = bar >= MIN_DISCRETE_BAR_BYTES or not device.resolve().name.startswith("0000:00:02")
        found.append(GpuCard(render.name, driver, bar, is_discrete))
    return [card for card in found if card.is_discrete]


def check_cards(root: Path) -> Iterator[Finding]:
    """Yield findings about the driver, the memory window (Resizable BAR) and the permissions of each discrete Intel
    card. `root` is the folder with `sys` and `dev`.
    """
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
    if (root / "dev/dxg").exists():
        yield note(
            "cards",
            "this is WSL: its GPUs are behind /dev/dxg and use the driver of Windows, so cards cannot be listed here",
            "install the GPU's driver in Windows only; see docs/quickstart/wsl.md",
        )
    elif loaded:
        yield warning(
            "cards",
            f"kernel module {', '.join(loaded)} is loaded, but no discrete Intel card was found",
            "check `lspci -nn | grep -i vga`, the card's power cables and `dmesg | grep -E 'xe|i915'`; in a container "
            "pass /dev/dri through (docker --device /dev/dri)",
        )
    else:
        yield note(
            "cards",
            "no discrete Intel card was found, and neither kernel module xe nor i915 is loaded",
            "only for Arc cards: Battlemage needs kernel 6.12 or newer, which has the module xe",
        )


def _driver(card: GpuCard) -> Finding:
    if card.driver in ("xe", "i915"):
        return ok("driver", f"{card.node} uses the driver {card.driver}")
    return problem(
        "driver",
        f"{card.node} uses {f'the driver {card.driver}' if card.driver else 'no driver'} instead of xe or i915",
        "install a kernel with the module xe (Battlemage: 6.12+) or i915 (Alchemist: 6.2+), and linux-firmware",
    )


def _rebar(card: GpuCard) -> Finding:
    if card.bar_bytes > SMALL_BAR_BYTES:
        return ok("rebar", f"Resizable BAR is on: {card.node} has a memory window of {card.bar_bytes / 2**30:.0f} GiB")
    return problem(
        "rebar",
        f"Resizable BAR is off: {card.node} has a memory window of only {card.bar_bytes / 2**20:.0f} MiB",
        "turn on 'Above 4G decoding' and 'Resizable BAR' in the BIOS/UEFI setup; without them Arc loses most of its "
        "speed",
    )


def _permission(card: GpuCard, root: Path) -> Finding:
    path = root / "dev/dri" / card.node
    if not path.exists():
        # The kernel knows the card, but this file system does not: this is a container without the device.
        return problem(
            "permissions",
            f"/dev/dri/{card.node} is missing in this container",
            "pass it through: docker --device /dev/dri",
        )
    if os.access(path, os.R_OK | os.W_OK):
        return ok("permissions", f"this user may open /dev/dri/{card.node}")
    group = path.stat().st_gid
    return problem(
        "permissions",
        f"this user may not open /dev/dri/{card.node}, which belongs to group {group}",
        f"add the user to that group: usermod -aG render $USER (then log in again); docker --group-add {group}; "
        f"Helm gpu.renderGroup={group}",
    )


def check_visible(root: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a warning if one process sees several Intel cards and the compute runtime would keep copies of their memory
    in host memory.

    With two visible cards, compute-runtime 26.09 and newer keeps a copy of all device memory in host memory
    (https://github.com/intel/compute-runtime/issues/953).
    """
    mask = environ.get("ZE_AFFINITY_MASK")
    # An empty mask is treated like an unset one.
    if mask:
        yield ok("visible cards", f"limited by ZE_AFFINITY_MASK={mask}")
    visible = len(mask.split(",")) if mask else len(intel_cards(root))
    if visible < 2:
        return
    version = runtime_version(root)
    if version is not None and version < HOST_MIRROR_VERSION:
        yield ok(
            "host mirror", f"compute-runtime {version[0]}.{version[1]:02d} does not copy device memory to host memory"
        )
        return
    known = "unknown" if version is None else f"{version[0]}.{version[1]:02d}"
    yield warning(
        "host mirror",
        f"one process sees {visible} cards; then compute-runtime 26.09 and newer (version here: {known}) keeps a copy "
        "of all device memory in host memory",
        "make one card visible to each process: use `baton serve`, --device-index or ZE_AFFINITY_MASK",
    )


def runtime_version(root: Path) -> tuple[int, int] | None:
    """Return the version (year, week) of Intel's compute runtime by dpkg's database below the folder `root`, or None if
    no package of it is installed.
    """
    for package in RUNTIME_PACKAGES:
        if found := re.match(r"(\d+)\.(\d+)", installed_version(root, package)):
            return int(found[1]), int(found[2])
    return None


def installed_version(root: Path, package: str) -> str:
    """Return the version of the Debian package `package` by dpkg's database below the folder `root`, or "" if it is not
    installed.
    """
    # The middle group skips the lines of one entry: it stops at the empty line that ends the entry.
    found = re.search(
        rf"^Package: {package}$(?:\n(?!\n).*)*?\nVersion: (\S+)", _text(root / "var/lib/dpkg/status"), re.MULTILINE
    )
    return found[1] if found else ""


def _bar_sizes(text: str) -> Iterator[int]:
    """Yield the sizes in bytes of a PCI device's memory windows. `text` is the content of its file `resource`, in which
    each line is first address, last address, flags.
    """
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
