"""Decode attention over K and V in one byte: one split of a sequence's context. Device code; see triton_decode.

Dimensions go by pairs, whose first and second codes are operands of their own (triton_codes): the queries and the
result come in two halves likewise. A token's scale multiplies its score (K) and its weight (V). Operands are float16,
which devices turn codes into fastest; powers of two keep queries and weights within its range.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from engine.kernels.triton_codes import code_numbers
from engine.kernels.triton_softmax import HIDDEN, LOWEST, capped_scores, factor_of, load_rows, load_scales, tile_rows


@triton.jit
def attend_codes(  # noqa: PLR0913, PLR0915
    first_asked,
    second_asked,
    pairs,
    scales,
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
    """(result not yet divided: of first dimensions, of second ones [rows, pairs]; sum and peak of weights [rows])."""
    rows: tl.constexpr = first_asked.shape[0]
    units: tl.constexpr = first_asked.shape[1]
    dtype: tl.constexpr = tl.float32 if first_asked.dtype == tl.float32 else tl.float16
    largest = tl.maximum(tl.max(tl.abs(first_asked.to(tl.float32)), 1), tl.max(tl.abs(second_asked.to(tl.float32)), 1))
    size = _power_of_two(largest)
    first_asked = (first_asked.to(tl.float32) / size[:, None]).to(dtype)
    second_asked = (second_asked.to(tl.float32) / size[:, None]).to(dtype)
    first_acc = tl.zeros([rows, units], tl.float32)
    second_acc = tl.zeros([rows, units], tl.float32)
    total = tl.zeros([rows], tl.float32)
    peak = tl.full([rows], LOWEST, tl.float32)
    worth = 1.0  # both accumulators count in these
    step, unit = tl.arange(0, tile), tl.arange(0, units)
    plane = kv_heads * head_rows
    factor = factor_of(scale, softcap, capped)
    half: tl.constexpr = head_dim // 2
    # The block number of the next tile is read one tile ahead, so that no load waits for another.
    blocks = tl.load(table + (begin + (step if tile > block_tokens else 0)) // block_tokens)
    for start in range(begin, end, tile):
        ahead = start + tile + (step if tile > block_tokens else 0)
        next_blocks = tl.load(table + ahead // block_tokens, mask=ahead < end, other=0)
        position = start + step
        seen = position < end
        if tile > block_tokens:
            at = tile_rows(blocks, position, kv_head, block_rows, head_rows, block_tokens)
        else:
            at = tile_rows(blocks, start, kv_head, block_rows, head_rows, block_tokens) + step
        keys = tl.trans(load_rows(pairs, at, seen, unit, half))
        values = load_rows(pairs, at + plane, seen, unit, half)
        key_scales = load_scales(scales, blocks, position, kv_head, seen, block_rows, head_rows, block_tokens, head_dim)
        worths = load_scales(
            scales + plane * half,
            blocks,
            position,
            kv_head,
            seen,
            block_rows,
            head_rows,
            block_tokens,
            head_dim,
        )
        raw = tl.dot(first_asked, code_numbers(keys, False, kind, dtype), input_precision=precision)
        raw = tl.dot(second_asked, code_numbers(keys, True, kind, dtype), raw, input_precision=precision)
        scores = capped_scores(raw * (size[:, None] * key_scales[None, :]), scale, softcap, capped)
        if window > 0:
            seen = seen & (position >= lowest)
        scores = tl.where(seen[None, :], scores, HIDDEN)
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores * factor - new_peak[:, None])
        total = total * shrink + tl.sum(weights, 1)
        next_worth = _power_of_two(tl.max(worths, 0))
        weights = (weights * (worths / next_worth)[None, :]).to(dtype)
        shrink *= worth / next_worth
        first_values = code_numbers(values, False, kind, dtype)
        second_values = code_numbers(values, True, kind, dtype)
        first_acc = tl.dot(weights, first_values, first_acc * shrink[:, None], input_precision=precision)
        second_acc = tl.dot(weights, second_values, second_acc * shrink[:, None], input_precision=precision)
        worth = next_worth
        peak = new_peak
        blocks = next_blocks
    return first_acc * worth, second_acc * worth, total, peak


@triton.jit
def _power_of_two(number):
    """The largest one up to a float32 (of zero: a very small one), which divides exactly."""
    return (tl.maximum(number, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
