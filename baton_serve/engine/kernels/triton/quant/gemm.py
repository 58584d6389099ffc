"""Multiplies several rows by a quantized weight with the device's matrix units, and decides their tile sizes.

The weight is the left operand, [outputs, inputs] x [inputs, tokens]: devices that multiply from registers can use
freshly decoded numbers there. A group's scale multiplies its sum, so that codes enter the product exactly. Long rows
are cut over programs and the parts are added in order, so that a result does not depend on the other rows of its tile.
Twin: `quantized_weights.linear`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.quantized_weights import STRETCH, QuantizedWeight
from baton_serve.engine.kernels.triton.codes import code_operand
from baton_serve.engine.kernels.triton.quant.codes import (
    KINDS,
    both_values,
    offset_of,
    table_of,
    values,
    word_arguments,
)
from baton_serve.engine.kernels.triton.tiles import padded

MAX_COUNTERS = 1 << 16
"""Largest number of tiles of a product, each of which has a counter."""


@lru_cache(maxsize=16)
def counters_of(device: torch.device) -> Tensor:
    """Return the device's counters, one int32 for each tile of a product, by which the program that finishes a tile
    last is found. They are zero before and after each product, so all products share them.
    """
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


MANY_OUTPUTS = 16384
"""Number of outputs from which wide tiles occupy the whole device."""


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Tile sizes and launch settings of a product of several rows of activations with a quantized weight."""

    outputs: int
    tokens: int
    depth: int  # inputs per step, of eight-bit codes; words go by stretches
    splits: int
    warps: int
    stages: int


def is_paired(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Return whether a kernel decodes two weights by one instruction: for 16-bit floats, if the codebook allows it and
    the zero points have the same dtype.
    """
    zeros_fit = weight.zeros is None or weight.zeros.dtype == dtype
    return KINDS.get(weight.codebook, 3) <= 1 and dtype.itemsize == 2 and zeros_fit


def product_tiles(weight: QuantizedWeight, num_tokens: int, dtype: torch.dtype) -> ProductTiles:
    """Return the tile sizes of a product with a quantized weight, measured in 16 bits (docs/log/low-bit-formats.md,
    "Products over weights in few bits"). Tiles are as wide as possible while each processor gets a program; with fewer
    outputs, the inputs are divided among programs.
    """
    tokens = min(64, max(16, padded(num_tokens)))
    has_many_outputs = weight.outputs >= MANY_OUTPUTS
    if dtype == torch.float32:
        outputs, warps, stages, programs = 64, 4, 4, 512
    elif weight.codebook not in KINDS:
        outputs, warps, stages, programs = (32, 2, 4, 768) if tokens == 16 else (64, 4, 3, 384)
    elif num_tokens == 1:
        outputs, warps, stages, programs = 32, 1, 4, 1024
    elif tokens == 16:
        outputs, warps, stages, programs = 128 if has_many_outputs else 64, 4, 4, 512
    else:
        outputs, warps, stages, programs = (256, 8, 3, 192) if has_many_outputs else (128, 4, 3, 192)
    tiles = -(-weight.outputs // outputs) * -(-num_tokens // tokens)
    splits = min(8 if weight.codebook in KINDS else 4, weight.inputs // STRETCH // 8, programs // tiles)
    return ProductTiles(
        outputs,
        tokens,
        depth=128 if weight.scales.shape[1] == 1 else min(128, weight.group),
        splits=1 << max(0, splits.bit_length() - 1),
        warps=warps,
        stages=stages,
    )


def tile_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, tiles: ProductTiles | None = None) -> Tensor:
    """Return x [num_tokens, inputs], with contiguous rows, times a quantized weight, plus the bias: [num_tokens,
    outputs]. `tiles` None: those of `product_tiles`.
    """
    tiles = tiles or product_tiles(weight, x.shape[0], x.dtype)
    result = torch.empty((x.shape[0], weight.outputs), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, tiles, result, _sums(x, weight, tiles) if tiles.splits > 1 else result)
    return result


def tile_parts(x: Tensor, weight: QuantizedWeight, tiles: ProductTiles | None = None) -> Tensor | None:
    """Return float32 [parts, num_tokens, outputs]: the products of ranges of the inputs, whose sum is `tile_product`
    without a bias. Return None if the inputs are not divided into ranges.
    """
    tiles = tiles or product_tiles(weight, x.shape[0], x.dtype)
    if tiles.splits == 1:
        return None
    sums = _sums(x, weight, tiles)
    _launch(x, weight, None, tiles, None, sums)
    return sums


def _sums(x: Tensor, weight: QuantizedWeight, tiles: ProductTiles) -> Tensor:
    return torch.empty((tiles.splits, x.shape[0], weight.outputs), dtype=torch.float32, device=x.device)


def _launch(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, tiles: ProductTiles, to: Tensor | None, sums: Tensor
) -> None:
    """Launch the kernel of a product, which stores the result in `to`. If `to` is None, the products of ranges of the
    inputs stay in `sums`, [parts, num_tokens, outputs], and are not added.
    """
    num_tokens, adds = x.shape[0], to is not None
    result = sums if to is None else to
    grid = (-(-weight.outputs // tiles.outputs), -(-num_tokens // tiles.tokens), tiles.splits)
    assert grid[0] * grid[1] <= MAX_COUNTERS
    given = (
        result,
        sums,
        counters_of(x.device) if tiles.splits > 1 and adds else result,
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
    )
    shared = {
        "tile_outputs": tiles.outputs,
        "tile_tokens": tiles.tokens,
        "splits": tiles.splits,
        "single": num_tokens == 1,
        "has_bias": bias is not None,
        "adds": adds,
        "precision": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    sizes = (result if bias is None else bias, num_tokens, weight.outputs, x.stride(0))
    if weight.codebook in KINDS:
        table = table_of(weight.codebook, x.device) if KINDS[weight.codebook] == 3 else result
        paired = is_paired(weight, x.dtype)
        _word_product_kernel[grid](*given, table, *sizes, **word_arguments(weight), paired=paired, **shared)
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


@triton.jit
def write_sums(  # noqa: PLR0913
    result,
    sums,
    counters,
    acc,
    bias,
    num_tokens,
    outputs,
    output,
    token,
    splits: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
):
    """Store a program's tile of a product, `acc` [outputs, tokens], as rows of tokens. If the inputs are divided among
    programs, the one that finishes a tile last adds all its parts in their order, and resets the tile's counter.
    Without `adds`, the parts are stored, and a later kernel adds them.
    """
    at = token[:, None].to(tl.int64) * outputs + output[None, :]
    known = (token < num_tokens)[:, None] & (output < outputs)[None, :]
    total = tl.trans(acc)
    last = True
    if splits > 1:
        part = num_tokens.to(tl.int64) * outputs
        tl.store(sums + tl.program_id(2) * part + at, total, known)
        last = False
        if adds:
            # All threads must have stored their sums before the counter announces them.
            tl.debug_barrier()
            counter = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            last = tl.atomic_add(counter, 1) == splits - 1
            if last:
                tl.store(counter, 0)
                total = tl.zeros(total.shape, tl.float32)
                for split in tl.static_range(splits):
                    total += tl.load(sums + split * part + at, known, other=0.0, cache_modifier=".cg")
    if last:
        if has_bias:
            total += tl.load(bias + output, output < outputs, other=0.0).to(tl.float32)[None, :]
        tl.store(result + at, total.to(result.dtype.element_ty), known)


@triton.jit
def _inputs(reader, left, ahead: tl.constexpr, asking, whole: tl.constexpr, single: tl.constexpr):
    """Load activations [inputs, tokens] that begin `ahead` inputs after the position of `reader`. `left` [inputs] is
    the number of inputs to the end of a row. If all tokens but one are padding (`single`), the padding is not read.
    """
    if whole:
        if single:
            return tl.load(reader + ahead, asking, other=0.0)
        return tl.load(reader + ahead)
    return tl.load(reader + ahead, (left > ahead)[:, None] & asking, other=0.0)


@triton.jit
def _add_paired_stretch(  # noqa: PLR0913
    acc,
    low,
    reader,
    left,
    asking,
    scales,
    zeros,
    stretch,
    kind: tl.constexpr,
    centre: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    has_zeros: tl.constexpr,
    whole: tl.constexpr,
    single: tl.constexpr,
):
    """Return `acc` plus the products of a run of 128 inputs: its first half and its second half are decoded at the same
    time.
    """
    run: tl.constexpr = 4 if group >= 64 else group // 16
    dtype: tl.constexpr = reader.dtype.element_ty
    for first in tl.static_range(0, 4, run):
        low_part = tl.zeros(acc.shape, tl.float32)
        high_part = tl.zeros(acc.shape, tl.float32)
        low_index = tl.minimum((stretch * 128 + first * 16) // group, groups - 1)
        high_index = tl.minimum((stretch * 128 + first * 16 + 64) // group, groups - 1)
        for step in tl.static_range(run):
            one, two = both_values(low, first + step, kind, centre, dtype)
            if has_zeros:
                one -= tl.load(zeros + low_index)[:, None]
                two -= tl.load(zeros + high_index)[:, None]
            low_asked = _inputs(reader, left, (first + step) * 16, asking, whole, single)
            high_asked = _inputs(reader, left, (first + step) * 16 + 64, asking, whole, single)
            low_part = tl.dot(one, low_asked, low_part)
            if group >= 128:
                low_part = tl.dot(two, high_asked, low_part)
            else:
                high_part = tl.dot(two, high_asked, high_part)
        acc += low_part * tl.load(scales + low_index).to(tl.float32)[:, None]
        if group < 128:
            acc += high_part * tl.load(scales + high_index).to(tl.float32)[:, None]
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _word_product_kernel(  # noqa: PLR0913
    result,
    sums,
    counters,
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
    single: tl.constexpr,
    paired: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
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
    asking = (token < num_tokens)[None, :]
    for stretch in range(first_stretch, tl.minimum(first_stretch + per_split, stretches)):
        at = (row * row_words + stretch * stretch_words)[:, None]
        low = tl.load(codes + at + column[None, :])
        if paired:
            k = stretch * 128 + column
            acc = _add_paired_stretch(
                acc,
                low,
                reader + k[:, None],
                inputs - k,
                asking,
                scales + row * groups,
                zeros + row * groups,
                stretch,
                kind,
                centre,
                group,
                groups,
                has_zeros,
                inputs % 128 == 0,
                single,
            )
        else:
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
                    asked = _inputs(reader + k[:, None], inputs - k, 0, asking, inputs % 128 == 0, single)
                    part = tl.dot(number.to(asked.dtype), asked, part, input_precision=precision)
                acc += part * tl.load(scales + index).to(tl.float32)[:, None]
    write_sums(result, sums, counters, acc, bias, num_tokens, outputs, output, token, splits, has_bias, adds)


@triton.jit(do_not_specialize=["num_tokens"])
def _byte_product_kernel(  # noqa: PLR0913
    result,
    sums,
    counters,
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
    single: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
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
        number = tl.load(at) if inputs % depth == 0 else tl.load(at, (k < inputs)[None, :], other=0.0)
        asked = _inputs(reader + k[:, None], inputs - k, 0, (token < num_tokens)[None, :], inputs % depth == 0, single)
        if groups > 1 or has_zeros:
            index = row * groups + (step * depth) // group
            left = code_operand(number, asked.dtype)
            if has_zeros:
                left = (number.to(tl.float32) - tl.load(zeros + index).to(tl.float32)[:, None]).to(asked.dtype)
            part = tl.dot(left, asked, input_precision=precision)
            acc += part * tl.load(scales + index).to(tl.float32)[:, None]
        else:
            acc = tl.dot(code_operand(number, asked.dtype), asked, acc, input_precision=precision)
    # One scale for the whole row: multiply once, after the sum.
    if groups == 1 and not has_zeros:
        acc *= tl.load(scales + row).to(tl.float32)[:, None]
    write_sums(result, sums, counters, acc, bias, num_tokens, outputs, output, token, splits, has_bias, adds)
