"""Some rows times a quantized weight through the device's matrix units, and a whole weight back to its numbers.

The weight is the left operand, [outputs, inputs] x [inputs, tokens]: devices that multiply from registers take freshly
decoded numbers from there. A group's scale multiplies its sum, so that codes enter the product exactly. Long rows are
cut over programs and the parts added in order: a result does not depend on who shares its batch's tile.
Twins: quantized.linear, quantized.dequantize.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.quantized import STRETCH, QuantizedWeight
from engine.kernels.triton_quant_codes import KINDS, offset_of, table_of, values, word_arguments
from engine.kernels.triton_tiles import padded


@dataclass(frozen=True, slots=True)
class ProductTiles:
    outputs: int
    tokens: int
    depth: int  # inputs per step, of eight-bit codes; words go by stretches
    splits: int
    warps: int
    stages: int


def product_tiles(weight: QuantizedWeight, num_tokens: int) -> ProductTiles:
    """Measured (docs/experiments.md)."""
    tokens = min(64, max(16, padded(num_tokens)))
    outputs = 64
    steps = -(-weight.inputs // STRETCH)
    splits = max(1, min(8, steps // 4, 1024 // max(1, -(-weight.outputs // outputs))))
    depth = 128 if weight.scales.shape[1] == 1 else min(128, weight.group)
    return ProductTiles(outputs, tokens, depth, splits, warps=4, stages=4)


def tile_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, tiles: ProductTiles | None = None) -> Tensor:
    """x [num_tokens, inputs] with contiguous rows -> [num_tokens, outputs]."""
    tiles = tiles or product_tiles(weight, x.shape[0])
    num_tokens = x.shape[0]
    result = torch.empty((num_tokens, weight.outputs), dtype=x.dtype, device=x.device)
    sums = result
    if tiles.splits > 1:
        sums = torch.empty((tiles.splits, *result.shape), dtype=torch.float32, device=x.device)
    grid = (-(-weight.outputs // tiles.outputs), -(-num_tokens // tiles.tokens), tiles.splits)
    given = (
        sums,
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
    )
    shared = {
        "tile_outputs": tiles.outputs,
        "tile_tokens": tiles.tokens,
        "splits": tiles.splits,
        "has_bias": bias is not None and tiles.splits == 1,
        "precision": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    sizes = (result if bias is None else bias, num_tokens, weight.outputs, x.stride(0))
    if weight.codebook in KINDS:
        table = table_of(weight.codebook, x.device) if KINDS[weight.codebook] == 3 else result
        _word_product_kernel[grid](*given, table, *sizes, **word_arguments(weight), **shared)
    else:
        _byte_product_kernel[grid](
            *given,
            *sizes,
            weight.codes.stride(0),
            inputs=weight.inputs,
            group=weight.group,
            groups=weight.scales.shape[1],
            has_zeros=weight.zeros is not None,
            depth=tiles.depth,
            **shared,
        )
    if tiles.splits > 1:
        _add_kernel[(num_tokens, -(-weight.outputs // 512))](
            result,
            sums,
            result if bias is None else bias,
            num_tokens,
            weight.outputs,
            splits=tiles.splits,
            tile=512,
            has_bias=bias is not None,
            num_warps=4,
        )
    return result


def dense(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs] in `dtype`: for products so large that reading the weight twice costs little."""
    result = torch.empty((weight.outputs, weight.inputs), dtype=dtype, device=weight.codes.device)
    zeros = weight.scales if weight.zeros is None else weight.zeros
    if weight.codebook in KINDS:
        arguments = word_arguments(weight)
        rows, chunk = 8, 64
        words = weight.codes.shape[1] // int(arguments["stretch_words"]) * 16
        table = table_of(weight.codebook, result.device) if KINDS[weight.codebook] == 3 else result
        _dense_words_kernel[(-(-weight.outputs // rows), -(-words // chunk))](
            result, weight.codes, weight.scales, zeros, table, weight.outputs, **arguments, rows=rows, chunk=chunk
        )
    else:
        rows, chunk = 8, 512
        _dense_bytes_kernel[(-(-weight.outputs // rows), -(-weight.inputs // chunk))](
            result,
            weight.codes,
            weight.scales,
            zeros,
            weight.outputs,
            weight.codes.stride(0),
            inputs=weight.inputs,
            group=weight.group,
            groups=weight.scales.shape[1],
            has_zeros=weight.zeros is not None,
            rows=rows,
            chunk=chunk,
        )
    return result


@triton.jit
def _write(  # noqa: PLR0913
    sums,
    acc,
    bias,
    num_tokens,
    outputs,
    output,
    token,
    tile_outputs: tl.constexpr,
    splits: tl.constexpr,
    has_bias: tl.constexpr,
):
    """acc [outputs, tokens] -> rows of tokens, or this split's part of them."""
    if has_bias:
        acc += tl.load(bias + output, output < outputs, other=0.0).to(tl.float32)[:, None]
    to = sums
    if splits > 1:
        to += tl.program_id(2).to(tl.int64) * num_tokens * outputs
    at = token[:, None].to(tl.int64) * outputs + output[None, :]
    known = (token < num_tokens)[:, None] & (output < outputs)[None, :]
    tl.store(to + at, tl.trans(acc).to(sums.dtype.element_ty), known)


@triton.jit(do_not_specialize=["num_tokens"])
def _word_product_kernel(  # noqa: PLR0913
    sums,
    x,
    codes,
    scales,
    zeros,
    table,
    bias,
    num_tokens,
    outputs,
    x_stride,
    inputs: tl.constexpr,
    row_words: tl.constexpr,
    stretch_words: tl.constexpr,
    kind: tl.constexpr,
    centre: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    has_zeros: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_tokens: tl.constexpr,
    splits: tl.constexpr,
    has_bias: tl.constexpr,
    precision: tl.constexpr,
):
    output = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    token = tl.program_id(1) * tile_tokens + tl.arange(0, tile_tokens)
    column = tl.arange(0, 16)
    run: tl.constexpr = 8 if group >= 128 else group // 16
    stretches: tl.constexpr = row_words // stretch_words
    per_split: tl.constexpr = (stretches + splits - 1) // splits
    first_stretch = tl.program_id(2) * per_split
    live = output < outputs
    row = tl.where(live, output, 0).to(tl.int64)
    reader = x + tl.where(token < num_tokens, token, 0).to(tl.int64)[None, :] * x_stride
    acc = tl.zeros([tile_outputs, tile_tokens], tl.float32)
    for stretch in range(first_stretch, tl.minimum(first_stretch + per_split, stretches)):
        at = (row * row_words + stretch * stretch_words)[:, None]
        low = tl.load(codes + at + column[None, :])
        high = low
        if kind == 2:
            high = tl.load(codes + at + 16 + (column % 8)[None, :])
        for first in tl.static_range(0, 8, run):
            part = tl.zeros([tile_outputs, tile_tokens], tl.float32)
            index = row * groups + tl.minimum((stretch * 128 + first * 16) // group, groups - 1)
            offset = tl.zeros([tile_outputs], tl.float32) + offset_of(kind, centre)
            if has_zeros:
                offset += tl.load(zeros + index).to(tl.float32)
            for step in tl.static_range(run):
                number = values(low, high, column[None, :], first + step, table, kind) - offset[:, None]
                k = stretch * 128 + (first + step) * 16 + column
                if inputs % 128 == 0:
                    asked = tl.load(reader + k[:, None])
                else:
                    asked = tl.load(reader + k[:, None], (k < inputs)[:, None], other=0.0)
                part = tl.dot(number.to(asked.dtype), asked, part, input_precision=precision)
            acc += part * tl.load(scales + index).to(tl.float32)[:, None]
    _write(sums, acc, bias, num_tokens, outputs, output, token, tile_outputs, splits, has_bias)


@triton.jit(do_not_specialize=["num_tokens"])
def _byte_product_kernel(  # noqa: PLR0913
    sums,
    x,
    codes,
    scales,
    zeros,
    bias,
    num_tokens,
    outputs,
    x_stride,
    row_bytes,
    inputs: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    has_zeros: tl.constexpr,
    depth: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_tokens: tl.constexpr,
    splits: tl.constexpr,
    has_bias: tl.constexpr,
    precision: tl.constexpr,
):
    output = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    token = tl.program_id(1) * tile_tokens + tl.arange(0, tile_tokens)
    column = tl.arange(0, depth)
    steps: tl.constexpr = (inputs + depth - 1) // depth
    per_split: tl.constexpr = (steps + splits - 1) // splits
    first_step = tl.program_id(2) * per_split
    live = output < outputs
    row = tl.where(live, output, 0).to(tl.int64)
    reader = x + tl.where(token < num_tokens, token, 0).to(tl.int64)[None, :] * x_stride
    acc = tl.zeros([tile_outputs, tile_tokens], tl.float32)
    for step in range(first_step, tl.minimum(first_step + per_split, steps)):
        k = step * depth + column
        at = codes + row[:, None] * row_bytes + k[None, :]
        if inputs % depth == 0:
            number = tl.load(at)
            asked = tl.load(reader + k[:, None])
        else:
            number = tl.load(at, (k < inputs)[None, :], other=0.0)
            asked = tl.load(reader + k[:, None], (k < inputs)[:, None], other=0.0)
        if groups > 1 or has_zeros:
            index = row * groups + (step * depth) // group
            left = number.to(asked.dtype)
            if has_zeros:
                left = (number.to(tl.float32) - tl.load(zeros + index).to(tl.float32)[:, None]).to(asked.dtype)
            part = tl.dot(left, asked, input_precision=precision)
            acc += part * tl.load(scales + index).to(tl.float32)[:, None]
        else:
            acc = tl.dot(number.to(asked.dtype), asked, acc, input_precision=precision)
    if groups == 1 and not has_zeros:
        acc *= tl.load(scales + row).to(tl.float32)[:, None]
    _write(sums, acc, bias, num_tokens, outputs, output, token, tile_outputs, splits, has_bias)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_kernel(  # noqa: PLR0913
    result, sums, bias, num_tokens, outputs, splits: tl.constexpr, tile: tl.constexpr, has_bias: tl.constexpr
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * tile + tl.arange(0, tile)
    live = column < outputs
    total = tl.zeros([tile], tl.float32)
    for split in tl.static_range(splits):
        total += tl.load(sums + (split * num_tokens.to(tl.int64) + token) * outputs + column, live, other=0.0)
    if has_bias:
        total += tl.load(bias + column, live, other=0.0).to(tl.float32)
    tl.store(result + token * outputs + column, total.to(result.dtype.element_ty), live)


@triton.jit
def _dense_words_kernel(  # noqa: PLR0913
    result,
    codes,
    scales,
    zeros,
    table,
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
):
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)
    word = tl.program_id(1) * chunk + tl.arange(0, chunk)
    stretch, within = word // 16, word % 16
    low_words: tl.constexpr = row_words // stretch_words * 16
    seen = (row < outputs)[:, None] & (word < low_words)[None, :]
    at = row[:, None] * row_words + (stretch * stretch_words)[None, :]
    low = tl.load(codes + at + within[None, :], seen, other=0)
    high = low
    if kind == 2:
        high = tl.load(codes + at + 16 + (within % 8)[None, :], seen, other=0)
    for nibble in tl.static_range(8):
        k = stretch * 128 + nibble * 16 + within
        index = row[:, None] * groups + tl.minimum(k // group, groups - 1)[None, :]
        offset = tl.zeros([rows, chunk], tl.float32) + offset_of(kind, centre)
        if has_zeros:
            offset += tl.load(zeros + index, seen, other=0.0).to(tl.float32)
        number = values(low, high, within[None, :], nibble, table, kind) - offset
        number *= tl.load(scales + index, seen, other=0.0).to(tl.float32)
        known = seen & (k < inputs)[None, :]
        tl.store(result + row[:, None] * inputs + k[None, :], number.to(result.dtype.element_ty), known)


@triton.jit
def _dense_bytes_kernel(  # noqa: PLR0913
    result,
    codes,
    scales,
    zeros,
    outputs,
    row_bytes,
    inputs: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    has_zeros: tl.constexpr,
    rows: tl.constexpr,
    chunk: tl.constexpr,
):
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)
    k = tl.program_id(1) * chunk + tl.arange(0, chunk)
    seen = (row < outputs)[:, None] & (k < inputs)[None, :]
    number = tl.load(codes + row[:, None] * row_bytes + k[None, :], seen, other=0.0).to(tl.float32)
    index = row[:, None] * groups + (k // group)[None, :]
    if has_zeros:
        number -= tl.load(zeros + index, seen, other=0.0).to(tl.float32)
    number *= tl.load(scales + index, seen, other=0.0).to(tl.float32)
    tl.store(result + row[:, None] * inputs + k[None, :], number.to(result.dtype.element_ty), seen)
