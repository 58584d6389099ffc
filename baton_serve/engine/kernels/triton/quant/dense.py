"""Decode a whole quantized weight, for products so large that reading it twice costs little.

Twin: `quantized_weights.dequantize`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kernels.triton.quant.codes import KINDS, offset_of, table_of, values, word_arguments


def dense(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantize a weight on its device by a Triton kernel. Return floats [outputs, inputs] in `dtype`."""
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
