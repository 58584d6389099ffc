"""A machine as files: cards, drivers, packages."""

import os
from pathlib import Path

GIB = 2**30


def add_card(root: Path, number: int, *, driver: str = "xe", bar_bytes: int = 16 * GIB, vendor: str = "0x8086") -> None:
    """`renderD<128 + number>` behind PCIe bus number + 3."""
    device = root / f"sys/devices/pci0000:00/0000:{number + 3:02x}:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    window = 0x4000000000
    (device / "resource").write_text(f"{window:#018x} {window + bar_bytes - 1:#018x} 0x000000000014220c\n0x0 0x0 0x0\n")
    module = root / "sys/module" / driver
    module.mkdir(parents=True, exist_ok=True)
    drivers = root / "sys/bus/pci/drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    (device / "driver").symlink_to(drivers)
    render = root / f"sys/class/drm/renderD{128 + number}"
    render.mkdir(parents=True)
    (render / "device").symlink_to(device)
    node = root / f"dev/dri/renderD{128 + number}"
    node.parent.mkdir(parents=True, exist_ok=True)
    node.touch()


def install(root: Path, package: str, version: str) -> None:
    status = root / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True, exist_ok=True)
    text = f"Package: {package}\nStatus: install ok installed\nVersion: {version}\n\n"
    status.write_text((status.read_text() if status.exists() else "") + text)


def forbid(path: Path) -> None:
    os.chmod(path, 0)
