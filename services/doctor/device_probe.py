"""Runs alone in a process that may hang or die: loads torch, tries the accelerators, prints one JSON object.

Peer copies are believed only when the bytes that arrived are those that were sent.
"""

import sys
import time
from typing import Any

import msgspec

COPY_BYTES = 64 << 20
REPEATS = 5


class DeviceFacts(msgspec.Struct, frozen=True):
    index: int
    name: str
    memory_bytes: int
    pinned_to_device: float
    """Bytes per second, as the next one."""
    device_to_pinned: float


class PeerFacts(msgspec.Struct, frozen=True):
    source: int
    target: int
    can_access: bool | None
    is_intact: bool
    bytes_per_second: float


class ProbeFacts(msgspec.Struct, frozen=True):
    torch: str
    kind: str
    """`xpu`, `cuda` or `cpu`."""
    features: dict[str, bool]
    devices: list[DeviceFacts]
    peers: list[PeerFacts]


def probe() -> ProbeFacts:
    import torch

    from baton_serve.engine.device import select_device

    kind = select_device("auto").type
    features = {"triton": _has_module("triton"), "graphs": False, "distributed": False}
    features["distributed"] = bool(torch.distributed.is_available())
    if kind == "cpu":
        return ProbeFacts(str(torch.__version__), kind, features, [], [])
    module: Any = torch.get_device_module(kind)
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
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    properties = module.get_device_properties(device)
    return DeviceFacts(
        index=index,
        name=str(properties.name),
        memory_bytes=int(properties.total_memory),
        pinned_to_device=_speed(lambda: there.copy_(host, non_blocking=True), lambda: module.synchronize(device)),
        device_to_pinned=_speed(lambda: host.copy_(there, non_blocking=True), lambda: module.synchronize(device)),
    )


def _peer(torch: Any, module: Any, kind: str, source: int, target: int) -> PeerFacts:
    ask = getattr(module, "can_device_access_peer", None)
    sent = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8).to(torch.device(kind, source))
    received = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=torch.device(kind, target))

    def synchronize() -> None:
        module.synchronize(torch.device(kind, source))
        module.synchronize(torch.device(kind, target))

    speed = _speed(lambda: received.copy_(sent, non_blocking=True), synchronize)
    return PeerFacts(
        source=source,
        target=target,
        can_access=bool(ask(source, target)) if ask is not None else None,
        is_intact=bool(torch.equal(sent.cpu(), received.cpu())),
        bytes_per_second=speed,
    )


def _speed(copy: Any, synchronize: Any) -> float:
    """Best of some: a busy machine makes copies slower, never faster."""
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
    sys.stdout.buffer.write(msgspec.json.encode(probe()) + b"\n")


if __name__ == "__main__":
    main()
