"""Argmax of each row of logits; among equal values, the lowest column. The parts of a row come first, then their
results.

A row is much longer than one program should read, and a small batch has few rows. A row that contains NaN has no
largest value: its result is the number of columns, which is not a valid column. Twin: `reference.layers.argmax`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.triton.overlap import overlapping, start_early
from baton_serve.engine.kernels.triton.tiles import padded

NO_NUMBER: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""Key of NaN, above that of infinity."""
_PART = 2048
"""Columns that one program reads."""


def argmax(logits: Tensor, out: Tensor) -> Tensor:
    """Write the column of the largest value of each row to `out`, int64 [rows], and return `out`. `logits` is [rows,
    columns] with floats of at most 32 bits. A row with NaN gets the number of columns.
    """
    found = part_keys(logits)
    (rows, columns), parts = logits.shape, found.shape[2]
    _whole_kernel[(rows,)](
        out, found[0], found[1], parts, columns, width=padded(parts), num_warps=1, **overlapping(out.device)
    )
    return out


def part_keys(logits: Tensor) -> Tensor:
    """Divide each row of logits into parts, and return int32 [2, rows, parts]: the largest value of each part, as an
    integer that sorts like the float, and the lowest column that holds it.
    """
    assert logits.dtype.itemsize <= 4
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, columns = logits.shape
    parts = -(-columns // _PART)
    keys = torch.empty((2, rows, parts), dtype=torch.int32, device=logits.device)
    _part_kernel[(rows, parts)](
        keys[0],
        keys[1],
        logits,
        logits.stride(0),
        columns,
        parts,
        part=_PART,
        num_warps=4,
        **overlapping(logits.device),
    )
    return keys


@triton.jit
def _part_kernel(  # noqa: PLR0913
    keys, places, logits, stride, columns, parts, part: tl.constexpr, overlaps: tl.constexpr
):
    start_early(overlaps)
    row = tl.program_id(0)
    column = tl.program_id(1) * part + tl.arange(0, part)
    number = tl.load(logits + row.to(tl.int64) * stride + column, column < columns, other=0.0).to(tl.float32)
    bits = tl.where(number == 0, 0.0, number).to(tl.int32, bitcast=True)  # zero and minus zero must be equal
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats sort the other way: flip their bits
    key = tl.where(number != number, NO_NUMBER, key)
    # Columns beyond the end of the row must never win.
    key = tl.where(column < columns, key, -0x80000000)
    largest = tl.max(key, 0)
    at = row * parts + tl.program_id(1)
    tl.store(keys + at, largest)
    tl.store(places + at, tl.min(tl.where(key == largest, column, columns), 0))


@triton.jit
def _whole_kernel(out, keys, places, parts, columns, width: tl.constexpr, overlaps: tl.constexpr):
    start_early(overlaps)
    row = tl.program_id(0)
    part = tl.arange(0, width)
    key = tl.load(keys + row * parts + part, part < parts, other=-0x80000000)
    place = tl.load(places + row * parts + part, part < parts, other=0)
    largest = tl.max(key, 0)
    best = tl.min(tl.where((key == largest) & (part < parts), place, columns), 0)
    tl.store(out + row, tl.where(largest == NO_NUMBER, columns, best).to(tl.int64))
