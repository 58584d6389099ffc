"""Decode attention over one-byte K and V: one split of a sequence's context. Device code only; `triton.decode` launches
it.

Keys and values are left operands, and the few queries of a head the right one, which may be narrow. Keys are read as
codes, whose neighbours share a register already. Values need neighbouring tokens in a register, so pairs of codes are
read, and their first and second codes become operands of their own (`triton.codes`). Operands are float16, the fastest
target of a conversion.

A token's scale of K multiplies its score. The exponent of its scale of V is added to the exponent of its weight before
the running peak is taken, so that no weight leaves float16's range; the sum of weights removes it again. Everything
that a tile needs is loaded in words of 32 bits or more, in the order in which the units read it, because Triton starts
only such loads several tiles ahead.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from baton_serve.engine.kernels.triton.codes import code_half, code_numbers
from baton_serve.engine.kernels.triton.softmax import HIDDEN, LOWEST, capped_scores, factor_of

SMALLEST: tl.constexpr = tl.constexpr(2.0**-60)
"""Replaces a scale of 0, which has no logarithm."""


@triton.jit
def attend_codes(  # noqa: PLR0913, PLR0915
    asked,
    codes,
    pairs,
    words,
    table,
    kv_head,
    begin,
    end,
    lowest,
    block_rows,
    scale,
    softcap,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    tile: tl.constexpr,
    block_tokens: tl.constexpr,
    head_rows: tl.constexpr,
    kind: tl.constexpr,
    window: tl.constexpr,
    capped: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute attention of one KV head's queries over one split of the context in a quantized cache. Return (result
    before the division [rows, dims], the sum of weights [rows], the exponent [rows] by which both are scaled down).
    """
    rows: tl.constexpr = asked.shape[0]
    dims: tl.constexpr = asked.shape[1]
    dtype: tl.constexpr = tl.float32 if asked.dtype == tl.float32 else tl.float16
    # Scale the queries into float16's range. A power of two changes no digit.
    size = _power_of_two(tl.max(tl.abs(asked.to(tl.float32)), 1))
    columns = tl.trans((asked.to(tl.float32) / size[:, None]).to(dtype))
    first_acc = tl.zeros([dims // 2, rows], tl.float32)
    second_acc = tl.zeros([dims // 2, rows], tl.float32)
    total = tl.zeros([rows], tl.float32)
    peak = tl.full([rows], LOWEST, tl.float32)
    step, dim, pair = tl.arange(0, tile), tl.arange(0, dims), tl.arange(0, dims // 2)
    plane = kv_heads * head_rows
    half: tl.constexpr = head_dim // 2
    factor = factor_of(scale, softcap, capped)
    if not capped:  # the queries' sizes join the factor; a cap must see whole scores
        factor = factor * size[None, :]
    key_offsets = step[:, None] * head_dim + dim[None, :]
    value_offsets = step[None, :] * half + pair[:, None]
    # The block number of the next tile is read one tile ahead, so that no load waits for another.
    blocks = tl.load(table + (begin + (step if tile > block_tokens else 0)) // block_tokens)
    for start in range(begin, end, tile):
        ahead = start + tile + (step if tile > block_tokens else 0)
        next_blocks = tl.load(table + ahead // block_tokens, mask=ahead < end, other=0)
        position = start + step
        seen = position < end
        head = (blocks * block_rows + kv_head * head_rows).to(tl.int64)  # its first row
        if tile > block_tokens:
            row = head + position % block_tokens
            codes_at = codes + row[:, None] * head_dim + dim[None, :]
            pairs_at = pairs + (row + plane)[None, :] * half + pair[:, None]
            scales_at = words + ((head + block_tokens) * half + position % block_tokens) // 2
        else:
            row = head + start % block_tokens
            codes_at = codes + row * head_dim + key_offsets
            pairs_at = pairs + (row + plane) * half + value_offsets
            scales_at = words + ((head + block_tokens) * half + start % block_tokens) // 2 + step // 2
        keys = code_half(tl.load(codes_at, mask=seen[:, None] & (dim < head_dim)[None, :], other=0.0), dtype)
        values = tl.load(pairs_at, mask=seen[None, :] & (pair < half)[:, None], other=0)
        key_scales = _scale_of(tl.load(scales_at, mask=seen, other=0), step)
        worths = _scale_of(tl.load(scales_at + plane * half // 2, mask=seen, other=0), step)
        raw = tl.dot(keys, columns, input_precision=precision) * key_scales[:, None]
        if capped:
            raw = raw * size[None, :]
        scores = capped_scores(raw, scale, softcap, capped)
        if window > 0:
            seen = seen & (position >= lowest)
        scores = tl.where(seen[:, None], scores, HIDDEN)
        bits = tl.maximum(worths, SMALLEST).to(tl.int32, bitcast=True)
        exponent = ((bits >> 23) | 0x4B000000).to(tl.float32, bitcast=True) - 8388735.0
        mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) + worths * 0.0  # NaN stays one
        inverse = (0x7F000000 - (bits & 0x7F800000)).to(tl.float32, bitcast=True)  # of two to the exponent
        exponents = scores * factor + exponent[:, None]
        new_peak = tl.maximum(peak, tl.max(exponents, 0))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(exponents - new_peak[None, :])
        total = total * shrink + tl.sum(weights * inverse[:, None], 0)
        weights = (weights * mantissa[:, None]).to(dtype)
        first_values = code_numbers(values, False, kind, dtype)
        second_values = code_numbers(values, True, kind, dtype)
        first_acc = tl.dot(first_values, weights, first_acc * shrink[None, :], input_precision=precision)
        second_acc = tl.dot(second_values, weights, second_acc * shrink[None, :], input_precision=precision)
        peak = new_peak
        blocks = next_blocks
    acc = tl.reshape(tl.join(tl.trans(first_acc), tl.trans(second_acc)), [rows, dims])
    return acc, total, peak


@triton.jit
def _scale_of(words, step):
    """Return one of the two bfloat16 scales in each 32-bit word as float32: that of an even or of an odd token."""
    return tl.where(step % 2 == 1, words & -0x10000, words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two(number):
    """Return the largest power of two that is not above a float32 number; division by it is exact. For zero return a
    very small one.
    """
    return (tl.maximum(number, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
