"""Multiplies a few rows by a weight with sums cut along the inputs (split-K), and adds the parts in the
following norm.

With few rows every weight is read once, so that the number of programs that read at a time determines the speed. A
library that cuts the sums of such a product adds them in a separate pass; here the norm does it. Twin: `rms_norm` of
`linear`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.kernels.triton.tiles import DeviceLimits, SplitTiles, device_limits, padded, split_tiles

MAX_ROWS = 16
"""Rows of an operand of a matrix unit; fewer rows cost the same."""
INTERPRETED = DeviceLimits(processors=1, shared_bytes=0, descriptors=False)
"""Limits for Triton's interpreter, which has no device."""


def fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether `product_parts` supports x [rows, inputs] and weight [outputs, inputs]: a few rows (more than one)
    in 16-bit floats, and sizes in whole tiles.
    """
    if not 1 < x.shape[0] <= MAX_ROWS or x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return False
    outputs, inputs = weight.shape
    tiles = _tiles(outputs, inputs, x.device)
    is_whole = outputs % tiles.tile == 0 and inputs % (tiles.step * tiles.splits) == 0
    return is_whole and x.is_contiguous() and weight.is_contiguous()


def product_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Return float32 [parts, rows, outputs]: the products of ranges of the inputs, whose sum is x @ weight.T. Call it
    only if `fits`.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    tiles = _tiles(outputs, inputs, x.device)
    parts = torch.empty((tiles.splits, rows, outputs), dtype=torch.float32, device=x.device)
    _product_kernel[(outputs // tiles.tile, tiles.splits)](
        parts,
        x,
        weight,
        rows,
        outputs=outputs,
        inputs=inputs,
        tile=tiles.tile,
        step=tiles.step,
        steps=inputs // (tiles.step * tiles.splits),
        rows_padded=MAX_ROWS,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return parts


def norm_of_parts(parts: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """Add the sum of `parts`, float32 [parts, rows, hidden], which `product_parts` has returned, to the contiguous
    `residual` in place, and return the RMSNorm of the result. The sum of the parts is rounded to the dtype of
    `residual` first, as a product would round it.
    """
    splits, rows, hidden = parts.shape
    normed = torch.empty_like(residual)
    dims = padded(hidden)
    _norm_kernel[(rows,)](
        normed,
        parts,
        residual,
        norm_weight,
        eps,
        rows,
        hidden=hidden,
        dims=dims,
        splits=splits,
        num_warps=max(1, min(16, dims // 256)),
    )
    return normed


@cache
def _tiles(outputs: int, inputs: int, device: torch.device) -> SplitTiles:
    limits = INTERPRETED if devices.is_host(device) else device_limits(device.index or 0)
    return split_tiles(limits, outputs=outputs, inputs=inputs)


@triton.jit
def _product_kernel(  # noqa: PLR0913
    parts,
    x,
    weight,
    rows,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    tile: tl.constexpr,
    step: tl.constexpr,
    steps: tl.constexpr,
    rows_padded: tl.constexpr,
):
    output = tl.program_id(0) * tile + tl.arange(0, tile)
    split = tl.program_id(1)
    row = tl.arange(0, rows_padded)
    column = split * steps * step + tl.arange(0, step)
    weights = weight + output[:, None].to(tl.int64) * inputs + column[None, :]
    inputs_at = x + row[None, :] * inputs + column[:, None]
    live = row[None, :] < rows
    acc = tl.zeros([tile, rows_padded], tl.float32)
    for number in range(steps):
        loaded = tl.load(weights + number * step)
        seen = tl.load(inputs_at + number * step, live, other=0.0)
        acc = tl.dot(loaded, seen, acc)
    at = (split * rows + row[None, :]) * outputs + output[:, None]
    tl.store(parts + at, acc, live)


@triton.jit
def _norm_kernel(  # noqa: PLR0913
    normed,
    parts,
    residual,
    weight,
    eps,
    rows,
    hidden: tl.constexpr,
    dims: tl.constexpr,
    splits: tl.constexpr,
):
    row, dim = tl.program_id(0), tl.arange(0, dims)
    mask = dim < hidden
    dtype = residual.dtype.element_ty
    total = tl.zeros([dims], tl.float32)
    for split in tl.static_range(splits):
        total += tl.load(parts + (split * rows + row) * hidden + dim, mask, other=0.0)
    at = residual + row * hidden + dim
    summed = (total.to(dtype).to(tl.float32) + tl.load(at, mask, other=0.0).to(tl.float32)).to(dtype)
    tl.store(at, summed, mask)
    values = summed.to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values, 0) / hidden + eps)
    factor = tl.load(weight + dim, mask, other=0.0).to(tl.float32)
    tl.store(normed + row * hidden + dim, (scaled.to(dtype).to(tl.float32) * factor).to(dtype), mask)
