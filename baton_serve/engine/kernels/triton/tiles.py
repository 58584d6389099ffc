"""Decides the tile sizes and splits of attention kernels by what a device reports: processors, shared memory, tensor
descriptors.

The choices were measured (docs/log/gpu-kernels.md, "Triton attention"). A device with less shared memory gets smaller
tiles, never a launch that fails.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language
from triton.compiler import make_backend

WIDE_HEAD = 256
"""Heads of more elements than this, padded, get tiles with fewer rows, or programs for parts of their values."""
TWO_CHUNKS_BYTES = 160 << 10
"""Shared memory from which kernels of recurrences load a chunk ahead."""
_SMALL_TILES = [(32, 16, 2), (32, 16, 1), (16, 16, 2), (16, 16, 1)]
"""Query rows, KV tokens and stages of prefill attention for wide heads, and for devices with little memory."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The properties of a device on which tile sizes depend, such as its number of processors."""

    processors: int  # multiprocessors, or Xe cores
    shared_bytes: int  # shared local memory that one program may use
    descriptors: bool  # tensor descriptors are loads in hardware


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Tile sizes and launch settings of the decode attention kernel."""

    tile: int  # KV tokens per step
    min_split: int  # tokens, about; a multiple of tile and of the block
    max_splits: int  # per sequence
    programs: int  # at most this many run, each walking over items
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Tile sizes and launch settings of the prefill attention kernel."""

    rows: int  # query tokens x group members
    tile: int  # KV tokens per step
    warps: int
    stages: int
    descriptors: bool
    paired: bool  # two tiles per step where no mask is needed; with descriptors only
    parts: int = 1  # of the values' elements, for different programs, each of which computes the scores


@dataclass(frozen=True, slots=True)
class SplitTiles:
    """Tile sizes of a matrix product whose inputs are divided among several programs."""

    tile: int  # outputs
    step: int  # inputs
    splits: int  # of the inputs
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Tile sizes and launch settings of a matrix product with one row of activations."""

    rows: int  # of the weight, one output each
    chunk: int  # inputs
    warps: int
    stages: int


def row_tiles(inputs: int) -> RowTiles:
    """Return the tile sizes of a product with one row of activations, measured for 2,048 to 14,336 inputs: small
    programs, of which a processor runs many at a time.
    """
    if inputs % 2048 == 0:
        return RowTiles(rows=2 if inputs == 2048 else 1, chunk=2048, warps=8 if inputs <= 8192 else 4, stages=2)
    if inputs % 1024 == 0:
        return RowTiles(rows=1, chunk=1024, warps=2, stages=3)
    return RowTiles(rows=4, chunk=512, warps=4, stages=3)


def split_tiles(limits: DeviceLimits, *, outputs: int, inputs: int) -> SplitTiles:
    """Return the tile sizes of a product of up to 16 rows whose inputs are divided into ranges, for different programs;
    another kernel adds their products. There are two ranges, or more if processors would stay idle.
    """
    tile, stages = (64, 5) if limits.shared_bytes >= 96 << 10 else (32, 3)  # uses 82 or 25 KB
    splits = 2
    while outputs // tile * splits < limits.processors * 9 // 10 and splits < 8 and inputs % (256 * splits) == 0:
        splits *= 2
    return SplitTiles(tile=tile, step=128, splits=splits, warps=4, stages=stages)


def padded(size: int) -> int:
    """Return the next power of two that is not below `size`, since shapes in Triton must be powers of two."""
    return 1 << max(size - 1, 0).bit_length()


def padded_head(head_dim: int) -> int:
    """Return the size to which the elements of a head are padded: that of `padded`, but at least 16, since products in
    Triton add up 16 elements or more.
    """
    return max(16, padded(head_dim))


def device_limits(index: int) -> DeviceLimits:
    """Return the limits of the device number `index`, by Triton's driver, which reports them in the same form for every
    backend.
    """
    active = triton.runtime.driver.active
    properties = active.utils.get_device_properties(index)
    target = active.get_current_target()
    return DeviceLimits(
        processors=properties["multiprocessor_count"],
        shared_bytes=properties["max_shared_mem"],
        descriptors=target.backend == "cuda" and target.arch >= 90,
    )


@lru_cache(maxsize=16)
def chunk_stages(device: torch.device, element_bytes: int) -> int:
    """Return the stages of a kernel that passes a recurrent state from chunk to chunk: 2 where shared memory holds the
    next chunk's inputs as well.
    """
    if device.type == "cpu" or element_bytes > 2:  # Triton's interpreter, or inputs of twice the size
        return 1
    return 2 if device_limits(device.index or 0).shared_bytes >= TWO_CHUNKS_BYTES else 1


@lru_cache(maxsize=16)
def num_processors(device: torch.device) -> int:
    """Return the number of processors of a device; 0 for Triton's interpreter."""
    return 0 if device.type == "cpu" else device_limits(device.index or 0).processors


@lru_cache(maxsize=16)
def narrowest_columns(device: torch.device) -> int:
    """Return the smallest number of columns, at least 8, that Triton's backend for this device supports for the right
    operand of a product.
    """
    if device.type == "cpu":  # Triton's interpreter
        return 8
    backend = make_backend(triton.runtime.driver.active.get_current_target())
    smallest = backend.get_codegen_implementation(backend.parse_options({})).get("min_dot_size")
    if smallest is None:
        return 16
    half = triton.language.block_type(triton.language.float16, [16, 16])
    return max(8, int(smallest(half, half)[1]))


def decode_tiles(
    limits: DeviceLimits, *, head_bytes: int, block_tokens: int, is_coded: bool = False, num_heads: int = 0
) -> DecodeTiles:
    """Return the tile sizes of decode attention. `head_bytes` is the size of one token's K of one head in the dtype of
    the query, padded to a power of two.

    The contexts of one or two sequences are cut into enough splits to fill the device; `num_heads` is the number of KV
    heads of all sequences together. `is_coded` means a one-byte KV cache, whose decoding needs registers.
    """
    room = limits.shared_bytes // 3  # three programs share a processor and hide each other's waits
    # A token of a wide head takes 1 KiB: tiles of 32 tokens were faster than more stages.
    candidates = [(64, 3), (32, 3), *([(32, 2)] if head_bytes >= 1024 else []), (16, 3), (16, 2), (16, 1)]
    tile, stages = next(
        (fit for fit in candidates if 2 * fit[0] * max(fit[1] - 1, 1) * head_bytes <= room), candidates[-1]
    )
    tiles = DecodeTiles(
        tile=tile,
        min_split=max(512 if is_coded else 256, block_tokens),
        max_splits=max(4, min(32, padded(limits.processors // 8))),
        programs=limits.processors * 32,
        warps=4,
        stages=stages,
    )
    if is_coded and num_heads >= limits.processors:  # small programs, many at a time
        return replace(tiles, tile=min(tile, 32), warps=1)
    if is_coded and num_heads <= limits.processors // 4:
        return replace(tiles, min_split=max(128, block_tokens), max_splits=64, stages=min(stages, 2))
    if not is_coded and 0 < num_heads <= limits.processors // 8:  # one or two sequences use the whole device
        min_split = 64 if num_heads <= limits.processors // 16 else 128
        return replace(tiles, min_split=max(min_split, block_tokens), max_splits=max(tiles.max_splits, 32))
    return tiles


def prefill_tiles(limits: DeviceLimits, *, head_bytes: int, element_bytes: int, is_coded: bool = False) -> PrefillTiles:
    """Return the tile sizes of prefill attention. `head_bytes` is the size of one token's K of one head, padded, in the
    dtype of the query. `is_coded` means a one-byte KV cache. Query rows and tiles of K and V share the device's shared
    memory.
    """
    has_matrix_units = element_bytes <= 2  # float32 is multiplied in registers, which are scarce
    is_wide = head_bytes > WIDE_HEAD * element_bytes
    rows = 128 if has_matrix_units else 32
    # Registers hold the results of 128 rows for half of such a head only. Codes would lie in memory twice, as stored
    # and as numbers.
    if is_wide and has_matrix_units and not is_coded:
        tile, stages, parts = 64, 1, 2
        if _prefill_bytes(rows, tile, stages, head_bytes, parts) <= limits.shared_bytes:
            return PrefillTiles(rows, tile, 8, stages, limits.descriptors, paired=False, parts=parts)
    if is_wide:
        # The results of 64 rows of such heads fill half of the registers of a processor that has this much memory.
        candidates = [(64, 32, 2), *_SMALL_TILES] if has_matrix_units else _SMALL_TILES[-2:]
    else:
        pairs = [(64, 3), (64, 2), (32, 2), (16, 2), (16, 1)] if has_matrix_units else [(16, 2), (16, 1)]
        candidates = [*((rows, *pair) for pair in pairs), *_SMALL_TILES]
    rows, tile, stages = next(
        (fit for fit in candidates if _prefill_bytes(*fit, head_bytes) <= limits.shared_bytes), candidates[-1]
    )
    is_paired = has_matrix_units and not is_wide
    return PrefillTiles(
        rows=rows,
        tile=tile,
        warps=8,
        stages=stages,
        descriptors=limits.descriptors and not is_wide,
        paired=is_paired and _prefill_bytes(rows, 2 * tile, stages, head_bytes) <= limits.shared_bytes,
    )


def fits_heads(limits: DeviceLimits, *, head_bytes: int, group: int) -> bool:
    """Return whether the smallest tiles of prefill attention fit into the shared memory of a device, if `group` query
    heads share a KV head. `head_bytes` is as for `prefill_tiles`.
    """
    _, tile, stages = _SMALL_TILES[-1]
    return _prefill_bytes(max(16, padded(group)), tile, stages, head_bytes) <= limits.shared_bytes


def latent_tiles(
    limits: DeviceLimits, token_bytes: int, num_seqs: int, block_tokens: int, *, are_halved: bool = False
) -> tuple[DecodeTiles, PrefillTiles]:
    """Return (tile sizes for decode, tile sizes for prefill) of latent attention (MLA), which has one cache row of
    `token_bytes` for each token, in the dtype of the query. `are_halved` means latents so large that each program of
    prefill should compute half of the results.

    The contexts of a few sequences are cut into enough splits to fill the device.
    """
    candidates = [(64, 2), (32, 2), (16, 2), (16, 1)]
    room = limits.shared_bytes * 3 // 4
    tile, stages = next((fit for fit in candidates if fit[0] * fit[1] * token_bytes <= room), candidates[-1])
    is_small = num_seqs <= limits.processors // 8
    decoding = DecodeTiles(
        tile=tile,
        min_split=max(64 if is_small else 512, block_tokens),
        max_splits=64 if is_small else 16,
        programs=limits.processors * 8,
        warps=4,
        stages=stages,
    )
    rows = 64 if tile >= 32 else 16
    prefilling = PrefillTiles(
        rows=rows, tile=min(tile, 32), warps=8 if rows == 64 else 4, stages=stages, descriptors=False, paired=False
    )
    # As for wide heads.
    if are_halved and (128 + 64) * token_bytes + 1024 <= limits.shared_bytes:
        prefilling = PrefillTiles(rows=128, tile=64, warps=8, stages=1, descriptors=False, paired=False, parts=2)
    return decoding, prefilling


def _prefill_bytes(rows: int, tile: int, stages: int, head_bytes: int, parts: int = 1) -> int:
    return (rows + tile * stages) * head_bytes + tile * stages * head_bytes // parts + 1024  # the rest: barriers
