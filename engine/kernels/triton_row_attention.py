"""Attention of one new token between two meetings of a kernel's programs: rotary, the store, splits, their merge.

Device code only. Its query, key and value are read as the parts of their product.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from engine.kernels.triton_decode import attend_split
from engine.kernels.triton_row_steps import rounded_sum, store_group, sum_parts
from engine.kernels.triton_softmax import HIDDEN, LOG2E


@triton.jit
def attend(  # noqa: PLR0913
    me,
    partial,
    stats,
    parts,
    cos,
    sin,
    cache,
    block_table,
    context,
    slot,
    scale,
    block_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    count: tl.constexpr,
    rows: tl.constexpr,
    few: tl.constexpr,
    token_tile: tl.constexpr,
    max_splits: tl.constexpr,
    block_tokens: tl.constexpr,
    head_rows: tl.constexpr,
    programs: tl.constexpr,
):
    """One new token over its context, cut into splits; stores its K and V. They are not read back: the last split has
    them at hand."""
    group: tl.constexpr = heads // kv_heads
    half: tl.constexpr = head_dim // 2
    outputs: tl.constexpr = (heads + 2 * kv_heads) * head_dim
    dtype: tl.constexpr = cache.dtype.element_ty
    past = tl.maximum(context - 1, 0)
    size, splits = cut(past, token_tile, max_splits)
    row, dim = tl.arange(0, rows), tl.arange(0, head_dim)
    c = tl.load(cos + dim % half).to(tl.float32)
    s = tl.load(sin + dim % half).to(tl.float32) * tl.where(dim < half, -1.0, 1.0)
    partner = (dim + half) % head_dim
    for item in range(me, kv_heads * splits, programs):
        kv_head, split = item % kv_heads, item // kv_heads
        mask = (row < group)[:, None] & (dim >= 0)[None, :]
        at = (kv_head * group + tl.arange(0, few) % group)[:, None] * head_dim
        straight = sum_parts(parts, at + dim[None, :], at >= 0, outputs, count)
        turned = sum_parts(parts, at + partner[None, :], at >= 0, outputs, count)
        straight, turned = straight.to(dtype).to(tl.float32), turned.to(dtype).to(tl.float32)
        asked = (straight * c[None, :] + turned * s[None, :]).to(dtype)
        query = tl.reshape(tl.broadcast_to(asked[None, :, :], [rows // few, few, head_dim]), [rows, head_dim])
        acc, total, peak = attend_split(
            query,
            cache,
            block_table,
            kv_head,
            split * size,
            tl.minimum(split * size + size, past),
            0,
            block_stride // head_dim,
            scale,
            1.0,
            kv_heads,
            head_dim,
            token_tile,
            block_tokens,
            head_rows,
            0,
            False,
            "ieee" if dtype == tl.float32 else "tf32",
        )
        if split == splits - 1:
            begin = (heads + kv_head) * head_dim
            key_straight = rounded_sum(parts, begin + dim, dtype, outputs, count)
            key_turned = rounded_sum(parts, begin + partner, dtype, outputs, count)
            key = (key_straight * c + key_turned * s).to(dtype)
            value = rounded_sum(parts, begin + kv_heads * head_dim + dim, dtype, outputs, count)
            if slot >= 0:
                to = (slot // block_tokens) * block_stride + (kv_head * head_rows + slot % block_tokens) * head_dim
                tl.store(cache + to + dim, key)
                tl.store(cache + to + kv_heads * head_rows * head_dim + dim, value.to(dtype))
            score = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * (scale * LOG2E)
            new_peak = tl.maximum(peak, score)
            shrink, weight = tl.exp2(peak - new_peak), tl.exp2(score - new_peak)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + weight[:, None] * value[None, :]
            peak = new_peak
        place = (kv_head * group + row) * max_splits + split
        tl.store(partial + place[:, None] * head_dim + dim[None, :], acc, mask)
        tl.store(stats + place * 2, peak, row < group)
        tl.store(stats + place * 2 + 1, total, row < group)


@triton.jit
def cut(past, token_tile: tl.constexpr, max_splits: tl.constexpr):
    """(tokens of a split, splits) of the tokens in the cache."""
    size = tl.maximum((past + max_splits * token_tile - 1) // (max_splits * token_tile), 1) * token_tile
    return size, tl.maximum((past + size - 1) // size, 1)


@triton.jit
def merge(  # noqa: PLR0913
    me,
    digits,
    floats,
    partial,
    stats,
    context,
    dtype: tl.constexpr,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    token_tile: tl.constexpr,
    max_splits: tl.constexpr,
    programs: tl.constexpr,
):
    """The splits of each head, in their order, as digits."""
    _, splits = cut(tl.maximum(context - 1, 0), token_tile, max_splits)
    groups: tl.constexpr = heads * head_dim // 128
    split = tl.arange(0, max_splits)[:, None]
    for number in range(me, groups, programs):
        index = number * 128 + tl.arange(0, 128)
        slot = (index // head_dim)[None, :] * max_splits + split
        known = (split < splits) & (index >= 0)[None, :]
        peaks = tl.load(stats + slot * 2, known, other=HIDDEN, cache_modifier=".cg")
        totals = tl.load(stats + slot * 2 + 1, known, other=0.0, cache_modifier=".cg")
        at = partial + slot * head_dim + (index % head_dim)[None, :]
        shares = tl.load(at, known, other=0.0, cache_modifier=".cg")
        weights = tl.exp2(peaks - tl.max(peaks, 0)[None, :])
        merged = tl.sum(shares * weights, 0) / tl.sum(weights * totals, 0)
        store_group(digits, floats, merged.to(dtype).to(tl.float32), number, groups)
