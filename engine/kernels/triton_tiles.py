"""Tile sizes, from what the device says of itself: processors, shared memory, hardware tensor descriptors.

The choices were measured (docs/experiments.md, "Triton attention"); a device that reports less shared memory gets
smaller tiles, never a failure to launch.
"""

from dataclasses import dataclass

import triton


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    processors: int  # multiprocessors, or Xe cores
    shared_bytes: int  # shared local memory that one program may use
    descriptors: bool  # tensor descriptors are loads in hardware
    fused_combine: bool  # device-scope acquire/release atomics may order partial results


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    tile: int  # KV tokens per step
    min_split: int  # tokens; multiple of tile and of the block
    max_splits: int  # per sequence
    programs: int  # at most this many run, each walking over items
    warps: int
    stages: int
    fused: bool  # the last split combines, instead of a second kernel


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    rows: int  # query tokens x group members
    tile: int  # KV tokens per step
    warps: int
    stages: int
    descriptors: bool


def padded(size: int) -> int:
    """The next power of two, which Triton's shapes must be."""
    return 1 << max(size - 1, 0).bit_length()


def device_limits(index: int) -> DeviceLimits:
    """Asks Triton's driver, which answers alike for every backend."""
    active = triton.runtime.driver.active
    properties = active.utils.get_device_properties(index)
    target = active.get_current_target()
    is_cuda = target.backend == "cuda"
    return DeviceLimits(
        processors=properties["multiprocessor_count"],
        shared_bytes=properties["max_shared_mem"],
        descriptors=is_cuda and target.arch >= 90,
        fused_combine=is_cuda,
    )


def decode_tiles(limits: DeviceLimits, *, head_bytes: int, block_tokens: int) -> DecodeTiles:
    """`head_bytes`: one token's K of one head, padded. Splits are many enough to fill the device from one sequence."""
    stages = 3
    tile = max(16, min(64, _floor_power(limits.shared_bytes // 3 // (2 * stages * head_bytes))))
    return DecodeTiles(
        tile=tile,
        min_split=max(256, block_tokens),
        max_splits=max(4, min(32, padded(limits.processors // 8))),
        programs=limits.processors * 4,
        warps=4,
        stages=stages,
        fused=limits.fused_combine,
    )


def prefill_tiles(limits: DeviceLimits, *, head_bytes: int, element_bytes: int) -> PrefillTiles:
    """Query rows and two stages of K and V tiles share the device's fast memory."""
    rows = 128 if element_bytes <= 2 else 64
    room = limits.shared_bytes - rows * head_bytes
    stages = 3 if room >= 3 * 2 * 64 * head_bytes else 2
    tile = max(16, min(64, _floor_power(room // (2 * stages * head_bytes))))
    return PrefillTiles(rows=rows, tile=tile, warps=8, stages=stages, descriptors=limits.descriptors)


def _floor_power(size: int) -> int:
    return 1 << max(size, 1).bit_length() - 1
