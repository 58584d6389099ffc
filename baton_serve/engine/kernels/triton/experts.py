"""Chooses the Triton kernel of a mixture of experts (MoE) by number of rows and format; grouped products for
few rows.

The number of rows of each expert is known only on the device. Grids depend on the numbers of tokens and experts, and
each program finds its expert and rows from the counts, so that nothing is read back and a graph can capture everything.
Nothing is added atomically, so results do not depend on the order of programs. Twin: `reference.experts`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.interfaces import Experts
from baton_serve.engine.kernels.triton import experts_row, experts_sorted
from baton_serve.engine.kernels.triton.overlap import overlapping, start_early
from baton_serve.engine.kernels.triton.tiles import padded

__all__ = ["ExpertTiles", "expert_tiles", "mix", "route"]


LOWEST: tl.constexpr = tl.constexpr(-1e38)
"""The lowest logit in the routing kernel, and, negated, the highest; a NaN becomes the lowest. In float16 it is the
lowest number of that type."""
PICKED: tl.constexpr = tl.constexpr(-0x80000000)
"""The key of an expert that the routing kernel has picked already, below all others."""


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Tile sizes of a grouped product: the matrix products of all experts in one kernel."""

    rows: int  # of one expert
    columns: int  # of one matrix: a program of gate and up multiplies twice as many
    depth: int
    warps: int
    stages: int


def route(
    logits: Tensor, top_k: int, *, renormalize: bool, num_shared: int = 0, has_gate: bool = False
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token by a Triton kernel, as `LayerKernels.route` specifies."""
    num_tokens, num_experts = logits.shape[0], logits.shape[1] - has_gate
    weights = torch.empty((num_tokens, top_k + num_shared), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((num_tokens, top_k + num_shared), dtype=torch.int32, device=logits.device)
    _route_kernel[(num_tokens,)](
        weights,
        chosen,
        logits,
        logits.stride(0),
        num_experts=num_experts,
        experts=padded(num_experts),
        top_k=top_k,
        num_shared=num_shared,
        picks=padded(top_k + num_shared),
        renormalize=renormalize,
        has_gate=has_gate,
        # Several warps would exchange every maximum through shared memory.
        num_warps=1,
        **overlapping(logits.device),
    )
    return weights, chosen


def expert_tiles(num_pairs: int, num_experts: int, element_bytes: int) -> tuple[ExpertTiles, ExpertTiles]:
    """Return (tile sizes for gate and up, tile sizes for down) of grouped products, by the average number of (token,
    expert) pairs of an expert. They use at most 100 KB of shared memory.
    """
    mean = num_pairs / num_experts
    if element_bytes > 2:  # float32 is multiplied in registers, which are scarce
        tiles = ExpertTiles(16 if mean <= 16 else 32, 32, 32, 4, 2)
        return tiles, tiles
    if mean <= 8:
        return ExpertTiles(16, 32, 128, 4, 4), ExpertTiles(16, 64, 128, 4, 4)
    if mean <= 48:
        rows = 16 if mean <= 12 else 32
        return ExpertTiles(rows, 64, 64, 4, 4), ExpertTiles(rows, 64, 128, 4, 4)
    if mean <= 96:
        return ExpertTiles(64, 64, 64, 4, 3), ExpertTiles(64, 128, 64, 4, 3)
    return ExpertTiles(128, 64, 64, 8, 3), ExpertTiles(128, 128, 64, 8, 3)


def mix(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: Experts,
    *,
    tiles: tuple[ExpertTiles, ExpertTiles] | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts by Triton kernels, with the shape of x [num_tokens, hidden].
    `weights` and `chosen` are results of `route`; a token chooses an expert at most once. `tiles` None: those of
    `expert_tiles`.
    """
    assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
    if tiles is None and experts_row.fits(x, experts):
        return experts_row.mix_row(x, weights, chosen, experts)
    num_tokens, hidden = x.shape
    top_k, num_experts, width = chosen.shape[1], experts.gate_up.shape[0], experts.down.shape[2]
    pairs = num_tokens * top_k
    output = new_output(experts, x, pairs)
    if tiles is None and experts_sorted.fits(x, experts, pairs):
        experts_sorted.products(x, weights, chosen, experts, output)
        return summed(output, x)
    first, second = tiles or expert_tiles(pairs, num_experts, x.element_size())
    # The experts of one token are different, so that each of its pairs is a block of its own.
    is_single = num_tokens == 1
    if is_single:
        rows = counts = chosen
    else:
        rows = torch.empty((num_experts, num_tokens), dtype=torch.int32, device=x.device)
        counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
        chunk = 1024 if pairs <= 1024 else 4096
        assign_kernel[(num_experts,)](rows, counts, chosen, pairs, num_tokens, chunk=chunk, num_warps=4)
    active = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    shared = {"num_experts": num_experts, "experts": padded(num_experts), "top_k": top_k, "is_single": is_single}
    # One token may have more pairs than there are experts, if other ranks have most of them.
    first_blocks, second_blocks = (
        pairs if is_single else num_blocks(pairs, num_experts, tile.rows) for tile in (first, second)
    )
    _gate_up_kernel[(first_blocks * triton.cdiv(width, first.columns),)](
        active,
        x,
        experts.gate_up,
        experts.gate_up if experts.gate_up_bias is None else experts.gate_up_bias,
        rows,
        counts,
        num_tokens,
        x.stride(0),
        experts.gate_up.stride(0),
        experts.limit or 0.0,
        experts.alpha,
        inputs=hidden,
        outputs=width,
        has_bias=experts.gate_up_bias is not None,
        interleaved=experts.is_interleaved,
        clamped=experts.limit is not None,
        tile_rows=first.rows,
        tile_columns=first.columns,
        tile_depth=first.depth,
        precision="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=first.warps,
        num_stages=first.stages,
        **shared,
    )
    _down_kernel[(second_blocks * triton.cdiv(hidden, second.columns),)](
        output,
        active,
        experts.down,
        experts.down if experts.down_bias is None else experts.down_bias,
        weights,
        rows,
        counts,
        num_tokens,
        experts.down.stride(0),
        inputs=width,
        outputs=hidden,
        has_bias=experts.down_bias is not None,
        tile_rows=second.rows,
        tile_columns=second.columns,
        tile_depth=second.depth,
        precision="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=second.warps,
        num_stages=second.stages,
        **shared,
    )
    return summed(output, x)


def summed(output: Tensor, x: Tensor) -> Tensor:
    """Return the sum of each token's rows of `output` [pairs, hidden], with the shape of x [num_tokens, hidden]."""
    num_tokens, hidden = x.shape
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    tile = min(1024, padded(hidden))
    sum_kernel[(num_tokens, triton.cdiv(hidden, tile))](
        result, output, hidden=hidden, tile=tile, top_k=len(output) // max(1, num_tokens), num_warps=4
    )
    return result


def new_output(experts: Experts, x: Tensor, pairs: int) -> Tensor:
    """Return memory for the experts' outputs of all (token, expert) pairs, [pairs, hidden]. It is filled with zeros if
    other ranks hold some experts, whose pairs no program writes.
    """
    make = torch.zeros if experts.is_part else torch.empty
    return make((pairs, x.shape[1]), dtype=x.dtype, device=x.device)


def num_blocks(pairs: int, num_experts: int, rows: int) -> int:
    """Return an upper bound of the number of blocks of `rows` rows in a grouped product. Each chosen expert may have
    one block that is almost empty.
    """
    return min(pairs, num_experts + pairs // rows)


@triton.jit
def _route_kernel(  # noqa: PLR0913
    weights,
    chosen,
    logits,
    stride,
    num_experts: tl.constexpr,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    num_shared: tl.constexpr,
    picks: tl.constexpr,
    renormalize: tl.constexpr,
    has_gate: tl.constexpr,
    overlaps: tl.constexpr,
):
    start_early(overlaps)
    token, expert, pick = tl.program_id(0).to(tl.int64), tl.arange(0, experts), tl.arange(0, picks)
    dtype: tl.constexpr = logits.dtype.element_ty
    is_short: tl.constexpr = dtype.primitive_bitwidth == 16
    scores = tl.load(logits + token * stride + expert, expert < num_experts, other=float("-inf")).to(tl.float32)
    # Padding tokens may have any logits. Comparisons with a NaN are false, so one expert would be picked again and
    # again, and other kernels expect different experts.
    lowest: tl.constexpr = -65504.0 if dtype == tl.float16 else LOWEST
    scores = tl.minimum(tl.maximum(scores, lowest), -lowest)
    # A warp finds its largest integer by one instruction, so experts are compared by integers that sort like their
    # logits. Those of 16 bits have room for the expert's number, so that of equal ones the first is the largest.
    if is_short:
        keys = _sortable(scores.to(dtype).to(tl.int16, bitcast=True).to(tl.int32), 0x7FFF) * 65536 + (0xFFFF - expert)
    else:
        keys = _sortable(scores.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    keys = tl.where(expert < num_experts, keys, PICKED)
    best = tl.full([picks], PICKED, tl.int32)
    where = tl.zeros([picks], tl.int32)
    for number in tl.static_range(top_k):
        peak = tl.max(keys, 0)
        at = 0xFFFF - (peak & 0xFFFF) if is_short else tl.min(tl.where(keys == peak, expert, experts), 0)
        best = tl.where(pick == number, peak, best)
        where = tl.where(pick == number, at, where)
        keys = tl.where(expert == at, PICKED, keys)
    if is_short:
        found = _sortable(best >> 16, 0x7FFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        found = _sortable(best, 0x7FFFFFFF).to(tl.float32, bitcast=True)
    found = tl.where(pick < top_k, found, float("-inf"))
    largest = tl.max(found, 0)
    likely = tl.exp(found - largest)
    if renormalize:
        total = tl.sum(likely, 0)
    else:
        total = tl.sum(tl.where(expert < num_experts, tl.exp(scores - largest), 0.0), 0)
    best = likely / total
    # The experts of all tokens stand behind the chosen ones.
    factor = 1.0
    if has_gate:
        gate = tl.load(logits + token * stride + num_experts)
        factor = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(gate.dtype).to(tl.float32)
    best = tl.where(pick < top_k, best, factor)
    where = tl.where(pick < top_k, where, num_experts + pick - top_k)
    width: tl.constexpr = top_k + num_shared
    tl.store(weights + token * width + pick, best, pick < width)
    tl.store(chosen + token * width + pick, where, pick < width)


@triton.jit
def _sortable(bits, magnitude: tl.constexpr):
    """Return int32 numbers that sort like the floats with these bits, or the bits of such numbers. `magnitude` is all
    bits but the sign, which bits of 16-bit floats have in front too.
    """
    return bits ^ ((bits >> 31) & magnitude)


@triton.jit(do_not_specialize=["pairs", "num_tokens"])
def assign_kernel(rows, counts, chosen, pairs, num_tokens, chunk: tl.constexpr):
    """Store, for each expert, the (token, expert) pairs that chose it to `rows` [num_experts, num_tokens], in order,
    and their number to `counts`.

    Pair p is choice p % top_k of token p // top_k. One program handles one expert, in steps of `chunk` pairs.
    """
    expert, step = tl.program_id(0), tl.arange(0, chunk)
    count = 0
    for start in range(0, pairs, chunk):
        pair = start + step
        mine = (tl.load(chosen + pair, pair < pairs, other=-1) == expert).to(tl.int32)
        place = count + tl.cumsum(mine, 0) - mine
        tl.store(rows + expert.to(tl.int64) * num_tokens + place, pair, mine == 1)
        count += tl.sum(mine, 0)
    tl.store(counts + expert, count)


@triton.jit
def tile_of(  # noqa: PLR0913
    rows,
    counts,
    num_tokens,
    num_experts: tl.constexpr,
    experts: tl.constexpr,
    outputs: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    is_single: tl.constexpr = False,
):
    """Return the tile that a program of a grouped product computes: (expert, pairs [tile_rows], mask of valid pairs,
    columns [tile_columns], mask of valid columns). An expert of `num_experts` or more means that there is nothing to
    do. With `is_single` there is one token, and `rows` are its experts.
    """
    num_tiles: tl.constexpr = (outputs + tile_columns - 1) // tile_columns
    block, part = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    if is_single:
        expert = tl.load(rows + block)
        live = tl.arange(0, tile_rows) == 0
        pair = block.to(tl.int64) + tl.zeros([tile_rows], tl.int64)
    else:
        expert, count, first = _find(block, counts, num_experts, experts, tile_rows)
        row = first + tl.arange(0, tile_rows)
        live = (row < count) & (expert < num_experts)
        pair = tl.load(rows + expert.to(tl.int64) * num_tokens + row, live, other=0).to(tl.int64)
    column = part * tile_columns + tl.arange(0, tile_columns)
    return expert, pair, live, column, column < outputs


@triton.jit
def _find(block, counts, num_experts: tl.constexpr, experts: tl.constexpr, tile_rows: tl.constexpr):
    """Return (expert, its number of rows, first row) for the block number `block` of a grouped product. An expert of
    `num_experts` or more means that the block does not exist.
    """
    ids = tl.arange(0, experts)
    blocks = (tl.load(counts + ids, ids < num_experts, other=0) + tile_rows - 1) // tile_rows
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum(((ends <= block) & (ids < num_experts)).to(tl.int32), 0)
    before = tl.sum(tl.where(ids < expert, blocks, 0), 0)
    count = tl.load(counts + tl.minimum(expert, num_experts - 1))
    return expert, count, (block - before) * tile_rows


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_kernel(  # noqa: PLR0913
    active,
    x,
    weight,
    bias,
    rows,
    counts,
    num_tokens,
    x_stride,
    expert_stride,
    limit,
    alpha,
    num_experts: tl.constexpr,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    is_single: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    has_bias: tl.constexpr,
    interleaved: tl.constexpr,
    clamped: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
    precision: tl.constexpr,
):
    expert, pair, live, column, kept = tile_of(
        rows, counts, num_tokens, num_experts, experts, outputs, tile_rows, tile_columns, is_single
    )
    if expert < num_experts:
        depth = tl.arange(0, tile_depth)
        step: tl.constexpr = 2 if interleaved else 1
        gap: tl.constexpr = 1 if interleaved else outputs
        at_x = x + (pair // top_k)[:, None] * x_stride + depth[None, :]
        at_gate = weight + expert.to(tl.int64) * expert_stride + (column * step * inputs)[None, :] + depth[:, None]
        gate = tl.zeros([tile_rows, tile_columns], tl.float32)
        up = tl.zeros([tile_rows, tile_columns], tl.float32)
        for start in range(0, inputs, tile_depth):
            inside = depth < inputs - start
            values = tl.load(at_x + start, live[:, None] & inside[None, :], other=0.0)
            mask = kept[None, :] & inside[:, None]
            gates = tl.load(at_gate + start, mask, other=0.0)
            ups = tl.load(at_gate + gap * inputs + start, mask, other=0.0)
            gate = tl.dot(values, gates, gate, input_precision=precision)
            up = tl.dot(values, ups, up, input_precision=precision)
        if has_bias:
            at_bias = bias + expert * (2 * outputs) + column * step
            gate += tl.load(at_bias, kept, other=0.0).to(tl.float32)[None, :]
            up += tl.load(at_bias + gap, kept, other=0.0).to(tl.float32)[None, :]
        dtype = active.dtype.element_ty
        # Round as if the product had been stored, as the twin does.
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        if clamped:
            gate = tl.minimum(gate, limit, tl.PropagateNan.ALL)
            up = tl.minimum(tl.maximum(up, -limit, tl.PropagateNan.ALL), limit, tl.PropagateNan.ALL) + 1.0
        # A gate below -80 has vanished in any dtype; the bound keeps exp finite.
        gate = (gate / (1.0 + tl.exp(tl.minimum(-alpha * gate, 80.0)))).to(dtype).to(tl.float32)
        at = active + pair[:, None] * outputs + column[None, :]
        tl.store(at, (gate * up).to(dtype), live[:, None] & kept[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(  # noqa: PLR0913
    output,
    active,
    weight,
    bias,
    factors,
    rows,
    counts,
    num_tokens,
    expert_stride,
    num_experts: tl.constexpr,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    is_single: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
    precision: tl.constexpr,
):
    expert, pair, live, column, kept = tile_of(
        rows, counts, num_tokens, num_experts, experts, outputs, tile_rows, tile_columns, is_single
    )
    if expert < num_experts:
        depth = tl.arange(0, tile_depth)
        at_x = active + pair[:, None] * inputs + depth[None, :]
        at_weight = weight + expert.to(tl.int64) * expert_stride + (column * inputs)[None, :] + depth[:, None]
        acc = tl.zeros([tile_rows, tile_columns], tl.float32)
        for start in range(0, inputs, tile_depth):
            inside = depth < inputs - start
            values = tl.load(at_x + start, live[:, None] & inside[None, :], other=0.0)
            weights = tl.load(at_weight + start, kept[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(values, weights, acc, input_precision=precision)
        if has_bias:
            acc += tl.load(bias + expert * outputs + column, kept, other=0.0).to(tl.float32)[None, :]
        dtype = output.dtype.element_ty
        acc = acc.to(dtype).to(tl.float32) * tl.load(factors + pair, live, other=0.0)[:, None]
        at = output + pair[:, None] * outputs + column[None, :]
        tl.store(at, acc.to(dtype), live[:, None] & kept[None, :])


@triton.jit
def sum_kernel(result, output, hidden: tl.constexpr, tile: tl.constexpr, top_k: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * tile + tl.arange(0, tile)
    kept = column < hidden
    total = tl.zeros([tile], tl.float32)
    for number in tl.static_range(top_k):
        at = output + (token * top_k + number) * hidden + column
        total += tl.load(at, kept, other=0.0).to(tl.float32)
    tl.store(result + token * hidden + column, total.to(result.dtype.element_ty), kept)
