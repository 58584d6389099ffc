"""Attention of one new token inside the row kernel: rotation, the KV store, splits, and their merge as inputs of the
next product.

Device code only. Query, key and value are sums of their product, not yet multiplied by `norm_factor`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from baton_serve.engine.kernels.triton.persistent.products import (
    add_tile,
    digits_of,
    no_digits,
    norm_factor,
    place_in,
    share_of,
    sum_of,
    wait,
)
from baton_serve.engine.kernels.triton.softmax import HIDDEN, LOG2E, LOWEST, absorb, load_rows, tile_rows


@triton.jit
def attend(  # noqa: PLR0913, PLR0915
    me,
    counter,
    failed,
    target,
    left,
    partial,
    stats,
    sums,
    squares,
    cos,
    sin,
    cache,
    block_table,
    context,
    slot,
    scale,
    eps,
    block_stride,
    hidden: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    rows: tl.constexpr,
    few: tl.constexpr,
    token_tile: tl.constexpr,
    max_splits: tl.constexpr,
    block_tokens: tl.constexpr,
    head_rows: tl.constexpr,
    programs: tl.constexpr,
):
    """Compute attention of the one new token, after a barrier of all programs. The cached context is cut into splits;
    the new token is a split by itself, whose program stores its K and V. The result of a split is normalized on its
    own; `stats` keeps the log2 of its sum of weights.
    """
    group: tl.constexpr = heads // kv_heads
    half: tl.constexpr = head_dim // 2
    dtype: tl.constexpr = cache.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype == tl.float32 else "tf32"
    is_wide: tl.constexpr = token_tile > block_tokens
    past = tl.maximum(context - 1, 0)
    size, splits = cut(past, token_tile, max_splits)
    row, dim, token = tl.arange(0, rows), tl.arange(0, head_dim), tl.arange(0, token_tile)
    c = tl.load(cos + dim % half).to(tl.float32)
    s = tl.load(sin + dim % half).to(tl.float32) * tl.where(dim < half, -1.0, 1.0)
    block_rows = block_stride // head_dim
    for item in range(me, kv_heads * (splits + 1), programs):
        kv_head, split = item % kv_heads, item // kv_heads
        if split == splits:
            left = wait(counter, failed, target, left)
            _new_token(
                kv_head, split, partial, stats, sums, squares, failed, c, s, cache, slot, scale, eps, block_stride,
                hidden, heads, kv_heads, head_dim, few, max_splits, block_tokens, head_rows,
            )  # fmt: skip
        else:
            begin, end = split * size, tl.minimum(split * size + size, past)
            query = tl.zeros([rows, head_dim], dtype)
            acc = tl.zeros([rows, head_dim], tl.float32)
            total = tl.zeros([rows], tl.float32)
            peak = tl.full([rows], LOWEST, tl.float32)
            blocks = tl.load(block_table + (begin + (token if is_wide else 0)) // block_tokens)
            for start in range(begin, end, token_tile):
                if start == begin:
                    left = wait(counter, failed, target, left)
                    asked = _query(kv_head, sums, squares, failed, c, s, eps, dtype, hidden, group, head_dim, few)
                    query = tl.reshape(
                        tl.broadcast_to(asked[None, :, :], [rows // few, few, head_dim]), [rows, head_dim]
                    )
                # The block number of the next tile is read one tile ahead, so that no load waits for another's result.
                ahead = start + token_tile + (token if is_wide else 0)
                next_blocks = tl.load(block_table + ahead // block_tokens, mask=ahead < end, other=0)
                position = start + token
                if is_wide:
                    at = tile_rows(blocks, position, kv_head, block_rows, head_rows, block_tokens)
                else:
                    at = tile_rows(blocks, start, kv_head, block_rows, head_rows, block_tokens) + token
                seen = position < end
                keys = load_rows(cache, at, seen, dim, head_dim)
                values = load_rows(cache, at + kv_heads * head_rows, seen, dim, head_dim)
                scores = tl.dot(query, tl.trans(keys), input_precision=precision)
                scores = tl.where(seen[None, :], scores, HIDDEN)
                acc, total, peak = absorb(acc, total, peak, scores, scale * LOG2E, values, scores, False, precision)
                blocks = next_blocks
            place = (kv_head * group + row) * max_splits + split
            mask = (row < group)[:, None] & (dim >= 0)[None, :]
            shares = acc / total[:, None]
            tl.store(partial + place[:, None] * head_dim + dim[None, :], shares, mask)
            tl.store(stats + place, peak + tl.log2(total), row < group)
    if me >= kv_heads * (splits + 1):
        left = wait(counter, failed, target, left)
    return left


@triton.jit
def _query(  # noqa: PLR0913
    kv_head,
    sums,
    squares,
    failed,
    c,
    s,
    eps,
    dtype: tl.constexpr,
    hidden: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    few: tl.constexpr,
):
    """Return the rotated queries of one KV head, [few, head_dim]. `sums` are the finished sums of the QKV
    projection.
    """
    dim = tl.arange(0, head_dim)
    at = (kv_head * group + tl.arange(0, few) % group)[:, None] * head_dim
    straight = sum_of(sums, at + dim[None, :], at >= 0)
    turned = sum_of(sums, at + ((dim + head_dim // 2) % head_dim)[None, :], at >= 0)
    factor = norm_factor(squares, failed, eps, hidden)
    straight, turned = (straight * factor).to(dtype).to(tl.float32), (turned * factor).to(dtype).to(tl.float32)
    return (straight * c[None, :] + turned * s[None, :]).to(dtype)


@triton.jit
def _new_token(  # noqa: PLR0913
    kv_head,
    split,
    partial,
    stats,
    sums,
    squares,
    failed,
    c,
    s,
    cache,
    slot,
    scale,
    eps,
    block_stride,
    hidden: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    few: tl.constexpr,
    max_splits: tl.constexpr,
    block_tokens: tl.constexpr,
    head_rows: tl.constexpr,
):
    """Compute the attention split that consists of the new token alone, for one KV head, and store the token's K and V
    in the cache.
    """
    group: tl.constexpr = heads // kv_heads
    dtype: tl.constexpr = cache.dtype.element_ty
    row, dim = tl.arange(0, few), tl.arange(0, head_dim)
    first = (heads + kv_head) * head_dim
    key = sum_of(sums, first + dim, dim >= 0)
    turned = sum_of(sums, first + (dim + head_dim // 2) % head_dim, dim >= 0)
    value = sum_of(sums, first + kv_heads * head_dim + dim, dim >= 0)
    query = _query(kv_head, sums, squares, failed, c, s, eps, dtype, hidden, group, head_dim, few)
    factor = norm_factor(squares, failed, eps, hidden)
    key, turned = (key * factor).to(dtype).to(tl.float32), (turned * factor).to(dtype).to(tl.float32)
    key, value = (key * c + turned * s).to(dtype), (value * factor).to(dtype)
    if slot >= 0:
        to = (slot // block_tokens) * block_stride + (kv_head * head_rows + slot % block_tokens) * head_dim
        tl.store(cache + to + dim, key)
        tl.store(cache + to + kv_heads * head_rows * head_dim + dim, value)
    score = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * (scale * LOG2E)
    place = (kv_head * group + row) * max_splits + split
    shares = tl.broadcast_to(value.to(tl.float32)[None, :], [few, head_dim])
    mask = (row < group)[:, None] & (dim >= 0)[None, :]
    tl.store(partial + place[:, None] * head_dim + dim[None, :], shares, mask)
    tl.store(stats + place, score, row < group)


@triton.jit
def cut(past, token_tile: tl.constexpr, max_splits: tl.constexpr):
    """Return (tokens of a split, number of splits) for the `past` tokens in the cache. The new token is one more
    split.
    """
    most: tl.constexpr = (max_splits - 1) * token_tile
    size = tl.maximum((past + most - 1) // most, 1) * token_tile
    return size, (past + size - 1) // size


@triton.jit
def merged_product(  # noqa: PLR0913
    me,
    counter,
    failed,
    target,
    left,
    sums,
    codes,
    scales,
    partial,
    stats,
    context,
    dtype: tl.constexpr,
    head_dim: tl.constexpr,
    token_tile: tl.constexpr,
    max_splits: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    tile: tl.constexpr,
    depth: tl.constexpr,
    columns: tl.constexpr,
    programs: tl.constexpr,
    stages: tl.constexpr,
    runs: tl.constexpr,
):
    """After a barrier of all programs, merge the attention splits of all heads, and add this program's part of the
    output projection to `sums`. Splits are merged in their order, so that results are reproducible.
    """
    tiles: tl.constexpr = outputs // tile
    steps: tl.constexpr = inputs // depth
    wide: tl.constexpr = columns if columns > depth // 64 else depth // 64
    first, last, stride = share_of(me, steps, tiles, programs, runs)
    low, high, base, worth = no_digits(depth, wide)
    for item in tl.range(first, last, stride, num_stages=stages):
        step, number = place_in(item, me, steps, tiles, runs)
        if (item == first) | (runs and number == 0):
            if item == first:
                left = wait(counter, failed, target, left)
            values = _merged(step, partial, stats, context, dtype, head_dim, token_tile, max_splits, depth)
            low, high, base, worth = digits_of(values, depth, wide)
        add_tile(sums, failed, codes, scales, low, high, base, worth, number, step, inputs, tile, depth, wide)
    if first >= last:
        left = wait(counter, failed, target, left)
    return left


@triton.jit
def _merged(  # noqa: PLR0913
    step,
    partial,
    stats,
    context,
    dtype: tl.constexpr,
    head_dim: tl.constexpr,
    token_tile: tl.constexpr,
    max_splits: tl.constexpr,
    depth: tl.constexpr,
):
    """Return the merged attention results of the heads that one step of the output projection reads, float32 [depth /
    128, 128].
    """
    _, splits = cut(tl.maximum(context - 1, 0), token_tile, max_splits)
    count: tl.constexpr = depth // head_dim
    split = tl.arange(0, max_splits)
    head = step * count + tl.arange(0, count)
    place = head[None, :] * max_splits + split[:, None]
    index = tl.arange(0, depth)
    at = ((step * count + index // head_dim)[None, :] * max_splits + split[:, None]) * head_dim
    known = (split <= splits)[:, None]
    shares = tl.load(partial + at + (index % head_dim)[None, :], known & (at >= 0), other=0.0, cache_modifier=".cg")
    peaks = tl.load(stats + place, known & (place >= 0), other=HIDDEN, cache_modifier=".cg")
    weights = tl.exp2(peaks - tl.max(peaks, 0)[None, :])
    weights = weights / tl.sum(weights, 0)[None, :]
    weights = tl.reshape(tl.broadcast_to(weights[:, :, None], [max_splits, count, head_dim]), [max_splits, depth])
    merged = tl.sum(shares * weights, 0)
    return tl.reshape(merged.to(dtype).to(tl.float32), [depth // 128, 128])
