"""Products of a few tokens with a quantized weight, computed with integers: the codes enter the matrix units as they
are stored.

For four-bit codes, the low nibble of a byte is a number of one operand, and its high nibble, as sixteen times (code -
8), is a number of the other one, so that one mask serves four weights. The constants that this adds are subtracted from
each group's sum with the sums of its inputs. The scales of a group, those of the weight and of the activations,
multiply its sum. Long rows are cut over programs, and the parts are added in order. Twin: `quantized_weights.linear`
of the numbers that the digits represent (`triton.activation_digits.values_of`).
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kernels.triton.activation_digits import GROUP, Digits
from baton_serve.engine.kernels.triton.quant.gemm import MAX_COUNTERS, counters_of, write_sums
from baton_serve.engine.kernels.triton.tiles import narrowest_columns, padded

MAX_TOKENS = {"int4": 16, "uint4": 16, "int8": 64}
"""Largest number of tokens for each codebook. With more, the sums of all columns cost more than decoding the weight."""
MANY_OUTPUTS = 16384
"""Number of outputs from which eight-bit codes gain by this method (measured from 1 to 64 tokens)."""


@dataclass(frozen=True, slots=True)
class DigitTiles:
    """Tile sizes of a product of integer activations (`Digits`) with a quantized weight."""

    outputs: int
    splits: int
    unroll: int  # stretches per step: neighbours in memory
    warps: int
    stages: int


def takes_digits(weight: QuantizedWeight, num_tokens: int, dtype: torch.dtype) -> bool:
    """Return whether a product of `num_tokens` tokens in `dtype` with this weight is computed with integers. The codes
    must be integers in groups of a multiple of 128, and the tokens few.
    """
    if dtype.itemsize != 2 or num_tokens > MAX_TOKENS.get(weight.codebook, 0) or weight.inputs % GROUP:
        return False
    if weight.codebook == "int8" and weight.outputs < MANY_OUTPUTS:
        return False
    return weight.group >= weight.inputs or weight.group % GROUP == 0


def has_nibbles(weight: QuantizedWeight) -> bool:
    """Return whether the weight has four-bit codes, for which the inputs of `Digits` are in another order."""
    return weight.codebook != "int8"


def digit_tiles(weight: QuantizedWeight, num_tokens: int) -> DigitTiles:
    """Return the tile sizes of an integer product, which were measured (docs/log/low-bit-formats.md, "Products over
    integers"). With few outputs the inputs are divided among programs, but each part stays long enough for its loads to
    run ahead.
    """
    is_narrow = num_tokens <= 8
    outputs = 128 if weight.outputs >= 65536 and num_tokens <= 16 else 64
    tiles, stretches = -(-weight.outputs // outputs), weight.inputs // GROUP
    splits = max(1, min(8, stretches // (4 if is_narrow else 8), 512 // tiles))
    splits = 1 << (splits.bit_length() - 1)
    does_pay = has_nibbles(weight) and is_narrow and splits <= 4
    unroll = 2 if does_pay and stretches % (2 * splits) == 0 else 1
    return DigitTiles(outputs, splits, unroll, warps=4, stages=3)


def digit_product(
    digits: Digits, weight: QuantizedWeight, bias: Tensor | None, tiles: DigitTiles | None = None
) -> Tensor:
    """Return the product of integer activations (`Digits`) with a quantized weight, plus the bias, [num_tokens,
    outputs] in the dtype that the activations had. `tiles` None: those of `digit_tiles`.
    """
    tiles = tiles or digit_tiles(weight, digits.num_tokens)
    result = torch.empty((digits.num_tokens, weight.outputs), dtype=digits.dtype, device=digits.codes.device)
    _launch(digits, weight, bias, tiles, result, _sums(digits, weight, tiles) if tiles.splits > 1 else result)
    return result


def digit_parts(digits: Digits, weight: QuantizedWeight, tiles: DigitTiles | None = None) -> Tensor | None:
    """Return float32 [parts, num_tokens, outputs]: the products of ranges of the inputs, whose sum is `digit_product`
    without a bias. Return None if the inputs are not divided into ranges.
    """
    tiles = tiles or digit_tiles(weight, digits.num_tokens)
    if tiles.splits == 1:
        return None
    sums = _sums(digits, weight, tiles)
    _launch(digits, weight, None, tiles, None, sums)
    return sums


def _sums(digits: Digits, weight: QuantizedWeight, tiles: DigitTiles) -> Tensor:
    size = (tiles.splits, digits.num_tokens, weight.outputs)
    return torch.empty(size, dtype=torch.float32, device=digits.codes.device)


def _launch(
    digits: Digits, weight: QuantizedWeight, bias: Tensor | None, tiles: DigitTiles, to: Tensor | None, sums: Tensor
) -> None:
    """Launch the kernel of an integer product, which stores the result in `to`. If `to` is None, the products of ranges
    of the inputs stay in `sums`, [parts, num_tokens, outputs], and are not added.
    """
    assert digits.nibbles == has_nibbles(weight) and digits.inputs == weight.inputs
    num_tokens, adds = digits.num_tokens, to is not None
    result = sums if to is None else to
    grid = (-(-weight.outputs // tiles.outputs), 1, tiles.splits)
    assert grid[0] <= MAX_COUNTERS
    _digit_kernel[grid](
        result,
        sums,
        counters_of(result.device) if tiles.splits > 1 and adds else result,
        digits.codes,
        digits.scales,
        digits.low_sums,
        digits.sums,
        weight.codes.view(torch.int8),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        result if bias is None else bias,
        num_tokens,
        weight.outputs,
        inputs=weight.inputs,
        groups=weight.scales.shape[1],
        stretches_per_group=-(-min(weight.group, weight.inputs) // GROUP),
        centre=8 if weight.codebook == "int4" else 0,
        nibbles=digits.nibbles,
        has_zeros=weight.zeros is not None,
        tile_outputs=tiles.outputs,
        columns=max(narrowest_columns(result.device), 2 * padded(num_tokens)),
        splits=tiles.splits,
        unroll=tiles.unroll,
        has_bias=bias is not None,
        adds=adds,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _digit_kernel(  # noqa: PLR0913, PLR0915
    result,
    partial,
    counters,
    digits,
    digit_scales,
    low_sums,
    all_sums,
    codes,
    scales,
    zeros,
    bias,
    num_tokens,
    outputs,
    inputs: tl.constexpr,
    groups: tl.constexpr,
    stretches_per_group: tl.constexpr,
    centre: tl.constexpr,
    nibbles: tl.constexpr,
    has_zeros: tl.constexpr,
    tile_outputs: tl.constexpr,
    columns: tl.constexpr,
    splits: tl.constexpr,
    unroll: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
):
    output = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    live = output < outputs
    row = tl.where(live, output, 0).to(tl.int64)
    column = tl.arange(0, columns)  # the high and the low bytes of a token alternate
    asked = column < 2 * num_tokens
    token = tl.where(asked, column // 2, 0)
    stretches: tl.constexpr = inputs // 128
    per: tl.constexpr = (stretches + splits - 1) // splits
    first = tl.program_id(2) * per
    acc = tl.zeros([tile_outputs, columns], tl.float32)
    place = tl.arange(0, 64 if nibbles else 128)
    reader = digits + (tl.where(asked, column, 0) * inputs)[None, :] + place[:, None]
    row_bytes: tl.constexpr = inputs // 2 if nibbles else inputs
    code_reader = codes + row[:, None] * row_bytes + place[None, :]
    is_high = asked & (column % 2 == 0)
    for start in range(first, tl.minimum(first + per, stretches), unroll):
        for ahead in tl.static_range(unroll):
            stretch = start + ahead
            at = token * stretches + stretch
            index = row * groups + stretch // stretches_per_group
            if nibbles:
                both = tl.load(code_reader + stretch * 64)
                low_asked = tl.load(reader + stretch * 128, asked[None, :], other=0)
                high_asked = tl.load(reader + stretch * 128 + 64, asked[None, :], other=0)
                low_part = tl.dot(both & 15, low_asked, out_dtype=tl.int32)
                high_part = tl.dot(
                    (both & -16) ^ -128, high_asked, out_dtype=tl.int32
                )  # the operand is sixteen times (code - 8)
                part = (low_part * 16 + high_part).to(tl.float32)
            else:
                number = tl.load(code_reader + stretch * 128)
                number_asked = tl.load(reader + stretch * 128, asked[None, :], other=0)
                part = tl.dot(number, number_asked, out_dtype=tl.int32).to(tl.float32)
            part = _less_zeros(part, low_sums + at, all_sums + at, zeros + index, is_high, centre, nibbles, has_zeros)
            worth = tl.load(digit_scales + at, asked, other=0.0)
            if groups > 1:
                acc += part * (tl.load(scales + index).to(tl.float32)[:, None] * worth[None, :])
            else:
                acc += part * worth[None, :]
    # A low byte counts 1 / 256 of a high one. The sums of both nibbles are sixteen times too large.
    high_worth: tl.constexpr = 16.0 if nibbles else 256.0
    acc *= tl.where(column % 2 == 0, high_worth, high_worth / 256)[None, :]
    if groups == 1:
        acc *= tl.load(scales + row).to(tl.float32)[:, None]
    total = tl.sum(tl.reshape(acc, [tile_outputs, columns // 2, 2]), 2)
    every = tl.arange(0, columns // 2)
    write_sums(result, partial, counters, total, bias, num_tokens, outputs, output, every, splits, has_bias, adds)


@triton.jit
def _less_zeros(  # noqa: PLR0913
    part,
    low_sums,
    all_sums,
    zeros,
    is_high,
    centre: tl.constexpr,
    nibbles: tl.constexpr,
    has_zeros: tl.constexpr,
):
    """Return the sums of one group of inputs, `part` [outputs, columns], without what the weight's zero points have
    added. They are subtracted once for a token, in the column of its high bytes. With four-bit codes all sums are 16
    times as large, and eight was subtracted from the codes of high nibbles.
    """
    if has_zeros or (nibbles and centre != 8):
        whole = tl.load(all_sums, is_high, other=0.0)
        zero = tl.zeros([part.shape[0]], tl.float32)
        if has_zeros:
            zero += tl.load(zeros).to(tl.float32)
        if nibbles:
            low_sum = tl.load(low_sums, is_high, other=0.0)
            part += (128.0 * (whole - low_sum))[None, :] - (16.0 * (zero + centre))[:, None] * whole[None, :]
        else:
            part -= zero[:, None] * whole[None, :]
    elif nibbles:
        part -= (128.0 * tl.load(low_sums, is_high, other=0.0))[None, :]
    return part
