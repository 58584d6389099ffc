"""Adds the products of several LoRA adapters to the output of a matrix product, for rows of different adapters
at once.

`shrink` multiplies the rows of each slot by the slot's `down` matrices, in parts of the inputs; `expand` adds up the
parts, multiplies them by `up` and adds the result. Launches depend on shapes only, and the slots of the rows are read
from the device, so one captured graph serves any mixture of adapters. Grouping rows by adapter follows Punica
(https://arxiv.org/abs/2310.18547) and S-LoRA (https://arxiv.org/abs/2311.03285). Twins: those of `reference.layers`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.kernels.interfaces import GROUP_ROWS, SlotRows, SlotWeights
from baton_serve.engine.kernels.triton.tiles import device_limits, padded

LARGEST_STEP = 256
"""Largest number of inputs that a program of `shrink` multiplies at a time."""
MAX_SPLITS = 8
"""Largest number of parts of the inputs. More parts took longer to add up than they saved (H100)."""
TILE_COLUMNS = 256
"""Outputs of a program of `expand`."""
MAX_TILE_RANKS = 64
"""Columns of `low` that a program multiplies at a time."""
INTERPRETED_PROCESSORS = 8


@dataclass(frozen=True, slots=True)
class ShrinkTiles:
    """Tile sizes of the Triton kernel `shrink`, which multiplies by the first LoRA matrices."""

    ranks: int  # rows of `down` for one program
    step: int  # inputs
    steps: int  # of the inputs, for one program
    splits: int  # of the inputs


def shrink_tiles(*, processors: int, num_slots: int, width: int, rank: int, inputs: int) -> ShrinkTiles:
    """Return the tile sizes of `shrink` for `num_slots` slots, each with `width` rows of `down` matrices: the inputs
    are divided among programs until every processor of the device has work.
    """
    ranks, step = min(rank, MAX_TILE_RANKS), min(LARGEST_STEP, max(16, padded(inputs)))
    programs, splits = num_slots * (width // ranks), 1
    while splits < MAX_SPLITS and programs * splits < processors * 9 // 10 and inputs > splits * step:
        splits *= 2
    return ShrinkTiles(ranks=ranks, step=step, steps=-(-inputs // (step * splits)), splits=splits)


def low_rank(x: Tensor, weights: SlotWeights) -> Tensor:
    """Return uninitialized memory for the result of `shrink`, float32 [splits, num_tokens, parts * rank]; see
    `AdapterKernels.low_rank`.
    """
    width = weights.down.shape[1]
    return torch.empty((_tiles(x, weights).splits, x.shape[0], width), dtype=torch.float32, device=x.device)


def shrink(low: Tensor, x: Tensor, weights: SlotWeights, rows: SlotRows) -> None:
    """Multiply each token by the `down` matrices of its adapter slot, and store the products in `low`, sorted by slot;
    see `AdapterKernels.shrink`.
    """
    assert x.stride(1) == 1
    width, inputs = weights.down.shape[1:]
    tiles = _tiles(x, weights)
    _shrink_kernel[(width // tiles.ranks, tiles.splits, rows.groups.shape[1])](
        low,
        x,
        weights.down,
        rows.slots,
        rows.order,
        rows.groups,
        x.shape[0],
        x.stride(0),
        weights.down.stride(0),
        rows.groups.stride(0),
        width=width,
        inputs=inputs,
        tile_rows=GROUP_ROWS,
        tile_ranks=tiles.ranks,
        step=tiles.step,
        steps=tiles.steps,
        is_whole=x.shape[0] <= GROUP_ROWS,
        num_warps=4,
        num_stages=3,
    )


def expand(output: Tensor, low: Tensor, weights: SlotWeights, rows: SlotRows) -> None:
    """Add the products of `low` with the `up` matrices of each token's adapter slot to `output`; see
    `AdapterKernels.expand`.
    """
    assert output.stride(1) == 1
    rank, end = weights.up.shape[2], weights.ends[-1]
    first, second = (*weights.ends, end, end)[:2]
    columns = min(TILE_COLUMNS, max(16, padded(end)))
    counts = [-(-size // columns) for size in (first, second - first, end - second)]
    _expand_kernel[(sum(counts), rows.groups.shape[1])](
        output,
        low,
        weights.up,
        rows.slots,
        rows.order,
        rows.groups,
        low.shape[1],
        output.stride(0),
        weights.up.stride(0),
        rows.groups.stride(0),
        first_end=first,
        second_end=second,
        third_end=end,
        first_tiles=counts[0],
        second_tiles=counts[0] + counts[1],
        width=low.shape[2],
        rank=rank,
        splits=low.shape[0],
        tile_rows=GROUP_ROWS,
        tile_ranks=min(rank, MAX_TILE_RANKS),
        tile_columns=columns,
        is_whole=low.shape[1] <= GROUP_ROWS,
        num_warps=4,
    )


def _tiles(x: Tensor, weights: SlotWeights) -> ShrinkTiles:
    num_slots, width, inputs = weights.down.shape
    return shrink_tiles(
        processors=_processors(x.device),
        num_slots=num_slots,
        width=width,
        rank=weights.up.shape[2],
        inputs=inputs,
    )


@cache
def _processors(device: torch.device) -> int:
    return INTERPRETED_PROCESSORS if devices.is_host(device) else device_limits(device.index or 0).processors


ANY_VALUE, ANY_ALIGNMENT = ["num_rows", "groups_stride"], ["slots", "order", "groups"]
"""Arguments for whose values the kernels are not compiled again: a request would wait for that."""


@triton.jit(do_not_specialize=ANY_VALUE, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _shrink_kernel(  # noqa: PLR0913
    low,
    x,
    down,
    slots,
    order,
    groups,
    num_rows,
    x_stride,
    slot_stride,
    groups_stride,
    width: tl.constexpr,
    inputs: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_ranks: tl.constexpr,
    step: tl.constexpr,
    steps: tl.constexpr,
    is_whole: tl.constexpr,
):
    rank = tl.program_id(0) * tile_ranks + tl.arange(0, tile_ranks)
    split = tl.program_id(1)
    slot = tl.load(groups + tl.program_id(2))
    if slot >= 0:
        position, row, present = _rows(order, groups + tl.program_id(2), groups_stride, num_rows, tile_rows, is_whole)
        acc = tl.zeros([tile_rows, tile_ranks], tl.float32)
        for number in range(steps):
            column = (split * steps + number) * step + tl.arange(0, step)
            seen = column < inputs
            at = down + slot * slot_stride + rank[:, None] * inputs + column[None, :]
            weights = tl.load(at, seen[None, :], other=0.0)
            values = tl.load(x + row[:, None] * x_stride + column[None, :], present[:, None] & seen[None, :], other=0.0)
            acc = tl.dot(values.to(weights.dtype), tl.trans(weights), acc, input_precision="ieee")
        live = _live(slots, row, present, slot, is_whole)
        tl.store(low + (split * num_rows + position[:, None]) * width + rank[None, :], acc, live[:, None])


@triton.jit(do_not_specialize=ANY_VALUE, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _expand_kernel(  # noqa: PLR0913
    output,
    low,
    up,
    slots,
    order,
    groups,
    num_rows,
    output_stride,
    slot_stride,
    groups_stride,
    first_end: tl.constexpr,
    second_end: tl.constexpr,
    third_end: tl.constexpr,
    first_tiles: tl.constexpr,
    second_tiles: tl.constexpr,
    width: tl.constexpr,
    rank: tl.constexpr,
    splits: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_ranks: tl.constexpr,
    tile_columns: tl.constexpr,
    is_whole: tl.constexpr,
):
    tile = tl.program_id(0)
    slot = tl.load(groups + tl.program_id(1))
    if slot >= 0:
        # A tile lies in one part of the outputs, since each part has its own `down` matrix.
        part, column, last = 0, tile * tile_columns, first_end
        if tile >= second_tiles:
            part, column, last = 2, second_end + (tile - second_tiles) * tile_columns, third_end
        elif tile >= first_tiles:
            part, column, last = 1, first_end + (tile - first_tiles) * tile_columns, second_end
        columns = column + tl.arange(0, tile_columns)
        seen = columns < last
        position, row, present = _rows(order, groups + tl.program_id(1), groups_stride, num_rows, tile_rows, is_whole)
        live = _live(slots, row, present, slot, is_whole)
        at = output + row[:, None] * output_stride + columns[None, :]
        mask = live[:, None] & seen[None, :]
        dtype: tl.constexpr = output.dtype.element_ty
        acc = tl.load(at, mask, other=0.0).to(tl.float32)
        for first_rank in tl.static_range(0, rank, tile_ranks):
            ranks = first_rank + tl.arange(0, tile_ranks)
            from_slot = up + slot * slot_stride + columns[:, None] * rank + ranks[None, :]
            weights = tl.load(from_slot, seen[:, None], other=0.0)
            total = tl.zeros([tile_rows, tile_ranks], tl.float32)
            for split in tl.static_range(splits):
                from_row = low + (split * num_rows + position[:, None]) * width
                total += tl.load(from_row + part * rank + ranks[None, :], live[:, None], other=0.0)
            acc = tl.dot(total.to(weights.dtype), tl.trans(weights), acc, input_precision="ieee")
        tl.store(at, acc.to(dtype), mask)


@triton.jit
def _rows(order, group, groups_stride, num_rows, tile_rows: tl.constexpr, is_whole: tl.constexpr):
    """Return (positions in `low`, tokens, mask of existing tokens) for a group of tokens with the same adapter slot.

    If all tokens of a step fit into one tile, they are all read, in their order: selecting the slot's tokens first
    would delay the reads.
    """
    position = tl.arange(0, tile_rows)
    if is_whole:
        row, present = position.to(tl.int64), position < num_rows
    else:
        position += tl.load(group + groups_stride).to(tl.int32)
        present = position < tl.load(group + 2 * groups_stride)
        row = tl.load(order + position, present, other=0)
    return position, row, present


@triton.jit
def _live(slots, row, present, slot, is_whole: tl.constexpr):
    """Return the mask of the tokens `row` whose adapter slot is `slot`."""
    live = present
    if is_whole:
        live = tl.load(slots + row, present, other=-1) == slot
    return live
