"""Measure what limits kernels and steps: the read bandwidth of a device, and the speed of one large matrix product."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton_serve.bench.micro.engine_shapes import Costs
from baton_serve.engine import device


@dataclass(frozen=True, slots=True)
class DeviceSpeeds:
    """Speeds of one device, or of several together."""

    read: float  # bytes / s
    product: float  # floating-point operations / s

    def times(self, count: int) -> "DeviceSpeeds":
        """Return the speeds of `count` such devices."""
        return DeviceSpeeds(self.read * count, self.product * count)

    def decode_s(self, cost: Costs, batch: int, context: int) -> float:
        """Return the shortest possible seconds of a decode step."""
        weights = cost.decode_bytes(batch, 0) / self.read
        kv = (cost.decode_bytes(batch, context) - cost.decode_bytes(batch, 0)) / self.read
        return max(weights, cost.decode_flops(batch) / self.product) + kv

    def limit_us(self, num_bytes: float, operations: float) -> tuple[float, str]:
        """Return the longer one of the times in which so many bytes are read and so many operations are computed, in
        microseconds, and its name.
        """
        return max((num_bytes / self.read * 1e6, "bytes"), (operations / self.product * 1e6, "operations"))


def measure_limits(target: torch.device) -> DeviceSpeeds:
    """Measure read bandwidth and matrix product of one device."""
    is_host = device.is_host(target)
    # Large enough that no cache holds it.
    source = torch.ones((1 << 27) if is_host else (1 << 31), dtype=torch.int32, device=target)
    size = 2048 if is_host else 8192
    left, right = (torch.randn(size, size, device=target).to(torch.bfloat16) for _ in range(2))
    rounds = 3 if is_host else 20
    read = _seconds(target, lambda: source.max(), rounds)
    product = _seconds(target, lambda: left @ right, rounds)
    if is_host:  # some CPUs multiply bf16 more slowly than float32
        wide_left, wide_right = left.float(), right.float()
        product = min(product, _seconds(target, lambda: wide_left @ wide_right, rounds))
    return DeviceSpeeds(read=source.nbytes / read, product=2 * size**3 / product)


def _seconds(target: torch.device, call: Callable[[], object], rounds: int) -> float:
    """Return the seconds of one call: the best of five groups of calls."""
    call()
    best = float("inf")
    for _ in range(5):
        device.synchronize(target)
        started = time.perf_counter()
        for _ in range(rounds):
            call()
        device.synchronize(target)
        best = min(best, (time.perf_counter() - started) / rounds)
    return best
