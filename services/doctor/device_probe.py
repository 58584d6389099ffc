"""Loads torch and tries the accelerators, in the child process of `device_findings.py`.

`devices` runs this module in a child process with a deadline, because a broken driver may hang or crash it. A copy
between devices counts only if exactly the bytes that were sent have arrived: some platforms corrupt them silently.
"""

import sys
import time
from typing import Any

import msgspec

COPY_BYTES = 64 << 20
"""Size of each measured copy."""
REPEATS = 5
"""Number of times that each copy is measured."""


class DeviceFacts(msgspec.Struct, frozen=True):
    """One accelerator of this machine, with its copy rates from and to pinned host memory."""

    index: int
    name: str
    memory_bytes: int
    pinned_to_device: float
    """Rate in bytes per second."""
    device_to_pinned: float
    """Rate in bytes per second."""
    driver: str = ""
    """Version of the driver as torch reports it; empty if it does not, as for CUDA."""


class PeerFacts(msgspec.Struct, frozen=True):
    """The result of a test copy between two accelerators of this machine: whether the bytes arrived intact, and the
    speed.
    """

    source: int
    target: int
    can_access: bool | None
    """True if the driver offers direct access; None if torch has no function to ask for it."""
    is_intact: bool
    """True if the bytes that arrived equal the bytes that were sent."""
    bytes_per_second: float


class ProbeFacts(msgspec.Struct, frozen=True):
    """The results of `probe`: all accelerators of this machine, and the copies between them."""

    torch: str
    """The version string of torch."""
    kind: str
    """Kind of the devices: `xpu`, `cuda` or `cpu`."""
    features: dict[str, bool]
    devices: list[DeviceFacts]
    peers: list[PeerFacts]


def probe() -> ProbeFacts:
    """Return the facts about torch and about all accelerators of the kind that instances would use.

    It measures copies between each of them and the host, and copies from each of them to each other one.
    """
    # Imported here, because `devices` imports this module for its Structs and must not load torch.
    import torch

    from baton_serve.engine.device import select_device

    kind = select_device("auto").type
    features = {"triton": _has_module("triton"), "graphs": False, "distributed": False}
    features["distributed"] = bool(torch.distributed.is_available())
    if kind == "cpu":
        return ProbeFacts(str(torch.__version__), kind, features, [], [])
    module: Any = torch.get_device_module(kind)
    # The classes for graphs have different names on CUDA and XPU.
    features["graphs"] = hasattr(module, "graph") or hasattr(module, "XPUGraph")
    count = module.device_count()
    devices = [_device(torch, module, kind, index) for index in range(count)]
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return ProbeFacts(
        str(torch.__version__), kind, features, devices, [_peer(torch, module, kind, *pair) for pair in pairs]
    )


def _device(torch: Any, module: Any, kind: str, index: int) -> DeviceFacts:
    device = torch.device(kind, index)
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    properties = module.get_device_properties(device)
    return DeviceFacts(
        index=index,
        name=str(properties.name),
        memory_bytes=int(properties.total_memory),
        pinned_to_device=_speed(lambda: on_device.copy_(host, non_blocking=True), lambda: module.synchronize(device)),
        device_to_pinned=_speed(lambda: host.copy_(on_device, non_blocking=True), lambda: module.synchronize(device)),
        # On XPU this is the version of the compute runtime, whatever package manager installed it.
        driver=str(getattr(properties, "driver_version", "")),
    )


def _peer(torch: Any, module: Any, kind: str, source: int, target: int) -> PeerFacts:
    can_access_peer = getattr(module, "can_device_access_peer", None)
    # Random bytes: a copy that was never made, or was made twice, must not look right by chance.
    sent = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8).to(torch.device(kind, source))
    received = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=torch.device(kind, target))

    # A copy between devices is complete only when the queues of both are.
    def synchronize() -> None:
        module.synchronize(torch.device(kind, source))
        module.synchronize(torch.device(kind, target))

    speed = _speed(lambda: received.copy_(sent, non_blocking=True), synchronize)
    return PeerFacts(
        source=source,
        target=target,
        can_access=bool(can_access_peer(source, target)) if can_access_peer is not None else None,
        is_intact=bool(torch.equal(sent.cpu(), received.cpu())),
        bytes_per_second=speed,
    )


def _speed(copy: Any, synchronize: Any) -> float:
    """Call `copy`, which copies `COPY_BYTES`, several times and return the fastest rate in bytes per second: a busy
    machine makes copies slower, never faster. `synchronize` waits until the device has finished the copies.
    """
    best = float("inf")
    for _ in range(REPEATS):
        synchronize()
        began = time.perf_counter()
        copy()
        synchronize()
        best = min(best, time.perf_counter() - began)
    return COPY_BYTES / best


def _has_module(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def main() -> None:
    """Print what `probe` found as a JSON object in the last line of standard output; drivers may print to it before."""
    sys.stdout.buffer.write(msgspec.json.encode(probe()) + b"\n")


if __name__ == "__main__":
    main()
