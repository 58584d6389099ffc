"""Mixtures of experts for many rows of an expert: grouped products whose tiles tensor descriptors load, over rows that
are sorted by expert.

The (token, expert) pairs are sorted by torch. A table names the expert and the rows of each block, so that the programs
of a product need not search for them. The result of the first product is stored in the order of the sorted rows, which
the second loads as whole tiles. Nothing is added atomically, and nothing is read back. Twin: `reference.experts.mix`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton_serve.engine.kernels.interfaces import Experts
from baton_serve.engine.kernels.triton.tiles import device_limits, padded


@dataclass(frozen=True, slots=True)
class SortedTiles:
    """Tile sizes and launch settings of a grouped product over sorted rows."""

    rows: int  # of one expert
    columns: int  # of one matrix: a program of gate and up multiplies twice as many
    depth: int
    warps: int
    stages: int


GATE_UP_TILES = SortedTiles(rows=128, columns=128, depth=64, warps=8, stages=3)
DOWN_TILES = SortedTiles(rows=128, columns=128, depth=64, warps=4, stages=3)
MIN_ROWS = 192
"""Rows of an expert, on average, from which these products are taken."""
MIN_SHARED_BYTES = 200 << 10
"""Shared memory that the tiles need."""


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """The (token, expert) pairs of a step in the order of their experts, and the blocks of rows of grouped products.

    Pair p is choice p % top_k of token p // top_k. The pairs of one expert are in ascending order.
    """

    order: Tensor
    """int64 [pairs]: the pairs, sorted. Those of experts which other ranks hold are the last."""
    blocks: Tensor
    """int32 [3, max_blocks]: the expert of each block, its first row and the end of the expert's rows. The expert of
    an unused block is the number of experts."""


def sort_pairs(chosen: Tensor, num_experts: int, block_rows: int) -> SortedPairs:
    """Sort the pairs of `chosen` [num_tokens, top_k] by expert, and cut each expert's rows into blocks of `block_rows`.

    Numbers of `num_experts` belong to experts of other ranks, which have no rows.
    """
    # Two bytes are sorted in half the passes of four.
    numbers, order = torch.sort(chosen.flatten().short(), stable=True)
    bounds = torch.arange(num_experts + 1, dtype=torch.short, device=chosen.device)
    starts = torch.searchsorted(numbers, bounds, out_int32=True)
    max_blocks = min(len(order), num_experts + len(order) // block_rows)
    blocks = torch.empty((3, max_blocks), dtype=torch.int32, device=chosen.device)
    _block_kernel[(num_experts + 1,)](
        blocks, starts, max_blocks, num_experts=num_experts, experts=padded(num_experts), rows=block_rows, num_warps=4
    )
    return SortedPairs(order, blocks)


@triton.jit(do_not_specialize=["max_blocks"])
def _block_kernel(blocks, starts, max_blocks, num_experts: tl.constexpr, experts: tl.constexpr, rows: tl.constexpr):
    """Store the blocks of one expert to `blocks`. The last program marks the blocks without an expert."""
    expert, ids, step = tl.program_id(0), tl.arange(0, experts), tl.arange(0, 64)
    before = ids < expert
    counts = tl.load(starts + ids + 1, before, other=0) - tl.load(starts + ids, before, other=0)
    first = tl.sum((counts + rows - 1) // rows, 0)
    start = tl.load(starts + expert)
    end, last = start, max_blocks
    if expert < num_experts:
        end = tl.load(starts + expert + 1)
        last = first + (end - start + rows - 1) // rows
    for block in range(first, last, 64):
        at = block + step
        tl.store(blocks + at, expert + step * 0, at < last)
        tl.store(blocks + max_blocks + at, start + (at - first) * rows, at < last)
        tl.store(blocks + 2 * max_blocks + at, end + step * 0, at < last)


def fits(x: Tensor, experts: Experts, num_pairs: int) -> bool:
    """Return whether `products` computes these experts, for this number of (token, expert) pairs, on the device of x:
    those of plain weights with 16 bits, without biases, whose sizes are multiples of the tiles, if an expert has many
    rows on average and the device loads tiles by descriptors.
    """
    gate_up, down = experts.gate_up, experts.down
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or x.element_size() != 2:
        return False
    if num_pairs < MIN_ROWS * len(gate_up) or not _has_descriptors(x.device):
        return False
    return _has_whole_tiles(x, gate_up, down) and experts.is_plain


@lru_cache(maxsize=16)
def _has_descriptors(device: torch.device) -> bool:
    """Return whether tensor descriptors are loads in hardware, with shared memory for the tiles."""
    if device.type == "cpu":  # Triton's interpreter
        return False
    limits = device_limits(device.index or 0)
    return limits.descriptors and limits.shared_bytes >= MIN_SHARED_BYTES


def _has_whole_tiles(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    hidden, width, first, second = x.shape[1], down.shape[2], GATE_UP_TILES, DOWN_TILES
    is_dense = gate_up.is_contiguous() and down.is_contiguous() and x.stride(1) == 1
    has_whole = hidden % max(first.depth, second.columns) == 0 and width % max(first.columns, second.depth) == 0
    return is_dense and has_whole


def products(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: Experts,
    output: Tensor,
) -> None:
    """Store the weighted output of each (token, expert) pair to `output` [pairs, hidden], in the order of the pairs.
    The arguments are those of `LayerKernels.mix`, and `fits` is true of them.
    """
    assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
    first, second = GATE_UP_TILES, DOWN_TILES
    assert first.rows == second.rows
    found = sort_pairs(chosen, experts.num_experts, first.rows)
    active = x.new_empty((chosen.numel(), experts.down.shape[2]))
    gate_up(active, x, experts.gate_up, found, chosen.shape[1], first, alpha=experts.alpha)
    down(output, active, experts.down, weights, found, second)


def gate_up(
    active: Tensor, x: Tensor, weight: Tensor, found: SortedPairs, top_k: int, tiles: SortedTiles, *, alpha: float
) -> None:
    """Store silu(gate) * up of each sorted pair to `active` [pairs, width]. `weight` is [num_experts, 2 * width,
    hidden].
    """
    num_experts, outputs, inputs = weight.shape[0], active.shape[1], x.shape[1]
    max_blocks = found.blocks.shape[1]
    _gate_up_kernel[(max_blocks * (outputs // tiles.columns),)](
        active,
        x,
        _described(weight, tiles.columns, tiles.depth),
        found.order,
        found.blocks,
        max_blocks,
        x.stride(0),
        alpha,
        num_experts=num_experts,
        top_k=top_k,
        inputs=inputs,
        outputs=outputs,
        tile_rows=tiles.rows,
        tile_columns=tiles.columns,
        tile_depth=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def down(
    output: Tensor, active: Tensor, weight: Tensor, factors: Tensor, found: SortedPairs, tiles: SortedTiles
) -> None:
    """Store the product of each row of `active` with its expert's `weight` [num_experts, hidden, width], times the
    pair's factor, to the pair's row of `output` [pairs, hidden].
    """
    num_experts, outputs, inputs = weight.shape
    max_blocks = found.blocks.shape[1]
    _down_kernel[(max_blocks * (outputs // tiles.columns),)](
        output,
        _described(active, tiles.rows, tiles.depth),
        _described(weight, tiles.columns, tiles.depth),
        factors,
        found.order,
        found.blocks,
        max_blocks,
        num_experts=num_experts,
        inputs=inputs,
        outputs=outputs,
        tile_rows=tiles.rows,
        tile_columns=tiles.columns,
        tile_depth=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a tensor descriptor of contiguous rows, of which it loads `rows` with `columns` elements at a time."""
    width = matrix.shape[-1]
    return TensorDescriptor(matrix, [matrix.numel() // width, width], [width, 1], [rows, columns])


@triton.jit(do_not_specialize=["max_blocks"])
def _gate_up_kernel(  # noqa: PLR0913
    active,
    x,
    weight,
    order,
    blocks,
    max_blocks,
    x_stride,
    alpha,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
):
    block, part = tl.program_id(0) // (outputs // tile_columns), tl.program_id(0) % (outputs // tile_columns)
    expert = tl.load(blocks + block)
    if expert < num_experts:
        row = tl.load(blocks + max_blocks + block) + tl.arange(0, tile_rows)
        live = row < tl.load(blocks + 2 * max_blocks + block)
        pair = tl.load(order + row, live, other=0)
        # Rows behind the end read token 0, and are not stored.
        at_x = x + (pair // top_k)[:, None] * x_stride + tl.arange(0, tile_depth)[None, :]
        first = expert * (2 * outputs) + part * tile_columns
        gate = tl.zeros([tile_rows, tile_columns], tl.float32)
        up = tl.zeros([tile_rows, tile_columns], tl.float32)
        for start in range(0, inputs, tile_depth):
            values = tl.load(at_x + start)
            gate = tl.dot(values, weight.load([first, start]).T, gate)
            up = tl.dot(values, weight.load([first + outputs, start]).T, up)
        dtype: tl.constexpr = active.dtype.element_ty
        # Round as if the product had been stored, as the twin does.
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        # A gate below -80 has vanished in any dtype; the bound keeps exp finite.
        gate = (gate / (1.0 + tl.exp(tl.minimum(-alpha * gate, 80.0)))).to(dtype).to(tl.float32)
        column = part * tile_columns + tl.arange(0, tile_columns)
        at = active + row.to(tl.int64)[:, None] * outputs + column[None, :]
        tl.store(at, (gate * up).to(dtype), live[:, None])


@triton.jit(do_not_specialize=["max_blocks"])
def _down_kernel(  # noqa: PLR0913
    output,
    active,
    weight,
    factors,
    order,
    blocks,
    max_blocks,
    num_experts: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
):
    block, part = tl.program_id(0) // (outputs // tile_columns), tl.program_id(0) % (outputs // tile_columns)
    expert = tl.load(blocks + block)
    if expert < num_experts:
        begin = tl.load(blocks + max_blocks + block)
        first = expert * outputs + part * tile_columns
        acc = tl.zeros([tile_rows, tile_columns], tl.float32)
        for start in range(0, inputs, tile_depth):
            # Rows behind the end are those of the next expert, or zeros. They are not stored.
            acc = tl.dot(active.load([begin, start]), weight.load([first, start]).T, acc)
        row = begin + tl.arange(0, tile_rows)
        live = row < tl.load(blocks + 2 * max_blocks + block)
        pair = tl.load(order + row, live, other=0)
        dtype: tl.constexpr = output.dtype.element_ty
        acc = acc.to(dtype).to(tl.float32) * tl.load(factors + pair, live, other=0.0)[:, None]
        column = part * tile_columns + tl.arange(0, tile_columns)
        tl.store(output + pair[:, None] * outputs + column[None, :], acc.to(dtype), live[:, None])
