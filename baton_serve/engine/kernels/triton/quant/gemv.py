"""One row times a quantized weight. Its time is that of reading the weight once. Twin: `quantized_weights.linear`.

Sums are float32. The constant in every four-bit number (and its zero) is subtracted from a group's sum, as that
constant times the sum of the group's inputs, so that a weight costs a shift, a mask and a multiply-add.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kernels.triton.codes import code_float
from baton_serve.engine.kernels.triton.quant.codes import KINDS, offset_of, table_of, values, word_arguments


@dataclass(frozen=True, slots=True)
class QuantizedRowTiles:
    """Tile sizes and launch settings of the kernel that multiplies one row of activations by a quantized weight."""

    rows: int  # outputs per program
    chunk: int  # words (four and six bits) or codes (eight) per step
    warps: int
    stages: int = 2


def row_tiles(weight: QuantizedWeight) -> QuantizedRowTiles:
    """Return the tile sizes for one row of activations with this weight, which were measured
    (docs/log/low-bit-formats.md, "Products over weights in few bits").
    """
    if weight.codebook in KINDS:
        return QuantizedRowTiles(rows=4, chunk=512, warps=4, stages=1)
    if weight.codebook != "int8" and weight.outputs >= 16384:
        if weight.inputs % 4096 == 0:
            return QuantizedRowTiles(rows=4, chunk=4096, warps=4, stages=1)
        return QuantizedRowTiles(rows=8, chunk=256, warps=2, stages=3)
    return QuantizedRowTiles(rows=4, chunk=512, warps=1, stages=4)


def row_product(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    tiles: QuantizedRowTiles | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Return x [1, inputs] times a quantized weight, plus the bias: [1, outputs]. With `gated`, the outputs are all
    gates and then all ups, and the result is silu(gate) * up [1, outputs / 2].
    """
    tiles = tiles or row_tiles(weight)
    outputs = weight.outputs // 2 if gated else weight.outputs
    result = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    grid = (-(-weight.outputs // tiles.rows),)
    given = (
        result,
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
    )
    if weight.codebook in KINDS:
        _word_row_kernel[grid](
            *given,
            table_of(weight.codebook, x.device) if KINDS[weight.codebook] == 3 else result,
            result if bias is None else bias,
            outputs,
            **word_arguments(weight),
            rows=tiles.rows,
            chunk=tiles.chunk,
            stages=tiles.stages,
            has_bias=bias is not None,
            gated=gated,
            num_warps=tiles.warps,
        )
    else:
        _byte_row_kernel[grid](
            *given,
            result if bias is None else bias,
            outputs,
            weight.codes.stride(0),
            inputs=weight.inputs,
            group=weight.group,
            groups=weight.scales.shape[1],
            has_zeros=weight.zeros is not None,
            rows=tiles.rows,
            chunk=tiles.chunk,
            stages=tiles.stages,
            has_bias=bias is not None,
            gated=gated,
            num_warps=tiles.warps,
        )
    return result


@triton.jit
def _rows_of(outputs, rows: tl.constexpr, gated: tl.constexpr):
    """Return (rows of the weight that this program multiplies, mask of existing rows). With `gated`, each gate is
    followed by its up, which lies `outputs` rows further.
    """
    place = tl.arange(0, rows)
    if gated:
        output = tl.program_id(0) * (rows // 2) + place // 2
        row = output + (place % 2) * outputs
    else:
        output = tl.program_id(0) * rows + place
        row = output
    return row, output < outputs


@triton.jit
def _store_rows(  # noqa: PLR0913
    result,
    summed,
    bias,
    row,
    live,
    outputs,
    rows: tl.constexpr,
    has_bias: tl.constexpr,
    gated: tl.constexpr,
):
    """Add the bias to a program's outputs, apply silu(gate) * up if `gated`, and store them. They are rounded as if
    product, SiLU and multiplication were separate.
    """
    if has_bias:
        summed += tl.load(bias + row, live, other=0.0).to(tl.float32)
    dtype = result.dtype.element_ty
    if gated:
        gate, up = tl.split(tl.reshape(summed.to(dtype).to(tl.float32), [rows // 2, 2]))
        # A gate below -80 has vanished in any dtype; the bound keeps exp finite.
        gate = (gate / (1.0 + tl.exp(tl.minimum(-gate, 80.0)))).to(dtype).to(tl.float32)
        output = tl.program_id(0) * (rows // 2) + tl.arange(0, rows // 2)
        tl.store(result + output, (gate * up).to(dtype), output < outputs)
    else:
        tl.store(result + row, summed.to(dtype), live)


@triton.jit
def _word_row_kernel(  # noqa: PLR0913
    result,
    x,
    codes,
    scales,
    zeros,
    table,
    bias,
    outputs,
    inputs: tl.constexpr,
    row_words: tl.constexpr,
    stretch_words: tl.constexpr,
    kind: tl.constexpr,
    centre: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    has_zeros: tl.constexpr,
    rows: tl.constexpr,
    chunk: tl.constexpr,
    stages: tl.constexpr,
    has_bias: tl.constexpr,
    gated: tl.constexpr,
):
    row, live = _rows_of(outputs, rows, gated)
    column = tl.arange(0, chunk)
    run: tl.constexpr = 8 if group >= 128 else group // 16  # nibbles that share a scale
    low_words: tl.constexpr = row_words // stretch_words * 16
    acc = tl.zeros([rows, chunk], tl.float32)
    for start in tl.range(0, low_words, chunk, num_stages=stages):
        word = start + column
        stretch, within = word // 16, word % 16
        seen = live[:, None] & (word < low_words)[None, :]
        at = row[:, None].to(tl.int64) * row_words + (stretch * stretch_words)[None, :]
        low = tl.load(codes + at + within[None, :], seen, other=0)
        high = low
        if kind == 2:
            high = tl.load(codes + at + 16 + (within % 8)[None, :], seen, other=0)
        for first in tl.static_range(0, 8, run):
            part = tl.zeros([rows, chunk], tl.float32)
            total = tl.zeros([chunk], tl.float32)
            for step in tl.static_range(run):
                k = stretch * 128 + (first + step) * 16 + within
                asked = tl.load(x + k, k < inputs, other=0.0).to(tl.float32)
                part += values(low, high, within[None, :], first + step, table, kind) * asked[None, :]
                total += asked
            index = tl.minimum((stretch * 128 + first * 16) // group, groups - 1)
            where = row[:, None] * groups + index[None, :]
            offset = offset_of(kind, centre)
            if has_zeros:
                part -= (offset + tl.load(zeros + where, seen, other=0.0).to(tl.float32)) * total[None, :]
            elif kind == 0:
                part -= offset * total[None, :]
            acc += part * tl.load(scales + where, seen, other=0.0).to(tl.float32)
    summed = tl.sum(acc, 1)
    _store_rows(result, summed, bias, row, live, outputs, rows, has_bias, gated)


@triton.jit
def _byte_row_kernel(  # noqa: PLR0913
    result,
    x,
    codes,
    scales,
    zeros,
    bias,
    outputs,
    row_bytes,
    inputs: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    has_zeros: tl.constexpr,
    rows: tl.constexpr,
    chunk: tl.constexpr,
    stages: tl.constexpr,
    has_bias: tl.constexpr,
    gated: tl.constexpr,
):
    row, live = _rows_of(outputs, rows, gated)
    column = tl.arange(0, chunk)
    acc = tl.zeros([rows, chunk], tl.float32)
    for start in tl.range(0, inputs, chunk, num_stages=stages):
        seen = start + column < inputs
        at = row[:, None].to(tl.int64) * row_bytes + start + column[None, :]
        number = code_float(tl.load(codes + at, live[:, None] & seen[None, :], other=0.0))
        asked = tl.load(x + start + column, seen, other=0.0).to(tl.float32)
        if groups > 1 or has_zeros:
            where = row[:, None] * groups + ((start + column) // group)[None, :]
            known = live[:, None] & seen[None, :]
            if has_zeros:
                number -= tl.load(zeros + where, known, other=0.0).to(tl.float32)
            number *= tl.load(scales + where, known, other=0.0).to(tl.float32)
        acc += number * asked[None, :]
    summed = tl.sum(acc, 1)
    # One scale for the whole row: multiply once, after the sum.
    if groups == 1 and not has_zeros:
        summed *= tl.load(scales + row, live, other=0.0).to(tl.float32)
    _store_rows(result, summed, bias, row, live, outputs, rows, has_bias, gated)
