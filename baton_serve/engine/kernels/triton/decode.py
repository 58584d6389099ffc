"""Decode attention (split KV, flash decoding): one query token for each sequence, and the merge of the splits of its
context. The context is cut into splits, whose partial results are combined.

The cut of a sequence depends on its own context, and with one-byte K and V also on the batch size (`triton.tiles`), but
not on the contexts of other sequences. Programs iterate over (sequence, split, KV head) items that they derive from
`context_lens` on the device. The grid depends on maximal shapes only and nothing is read back, so a captured graph
serves any lengths. Twin: `reference.attention._decode`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec
from baton_serve.engine.kernels.quantized_kv import is_coded
from baton_serve.engine.kernels.triton.codes import CODE_KINDS
from baton_serve.engine.kernels.triton.decode_codes import attend_codes
from baton_serve.engine.kernels.triton.overlap import overlapping, start_early
from baton_serve.engine.kernels.triton.softmax import (
    HIDDEN,
    LOG2E,
    LOWEST,
    absorb,
    capped_scores,
    factor_of,
    load_rows,
    tile_rows,
)
from baton_serve.engine.kernels.triton.tiles import DecodeTiles, narrowest_columns, padded, padded_head

COMBINED_DIMS = 256
"""Most elements of a head that one program combines, so that the splits of wide heads fit into registers."""


def decode(
    output: Tensor,
    query: Tensor,
    cache: Tensor,
    meta: AttentionMetadata,
    spec: AttentionSpec,
    tiles: DecodeTiles,
) -> None:
    """Compute paged attention for the sequences that have exactly one new token, and write it to their rows of
    `output`. Other rows stay as they are.
    """
    num_seqs, num_heads = meta.context_lens.shape[0], query.shape[1]
    num_kv_heads, block_tokens, head_dim = cache.shape[2:]
    scaled = is_coded(cache)
    tile = min(tiles.tile, tiles.min_split)
    align = max(tile, block_tokens)
    num_splits = most_splits(meta, spec, tiles)
    # Sized by the longest possible context: the lengths are known on the device only.
    partial = query.new_empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32)
    stats = query.new_empty((num_seqs, num_heads, num_splits, 2), dtype=torch.float32)
    items = num_seqs * num_kv_heads * num_splits
    window, group = spec.sliding_window or 0, num_heads // num_kv_heads
    _decode_kernel[(min(items, tiles.programs),)](
        output,
        partial,
        stats,
        query,
        cache,
        meta.query_starts,
        meta.context_lens,
        meta.block_tables,
        output if spec.sinks is None else spec.sinks,
        cache.view(torch.int16) if scaled else output,
        cache.view(torch.int32) if scaled else output,
        num_seqs,
        num_splits,
        spec.scale,
        spec.softcap or 1.0,
        query.stride(0),
        query.stride(1),
        cache.stride(0) // head_dim,
        meta.block_tables.stride(0),
        kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        dims=max(32, padded(head_dim)) if scaled else padded_head(head_dim),
        rows=max(narrowest_columns(query.device) if scaled else 16, padded(group)),
        tile=tile,
        block_tokens=block_tokens,
        head_rows=cache.stride(2) // head_dim,
        kind=CODE_KINDS.get(cache.dtype, -1),
        min_split=tiles.min_split,
        max_splits=padded(tiles.max_splits),
        split_limit=tiles.max_splits,
        align=align,
        window=window,
        capped=spec.softcap is not None,
        sunk=spec.sinks is not None,
        seqs=next((size for size in (16, 64, 256) if num_seqs <= size), padded(num_seqs)),
        precision="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    combine(output, partial, stats, meta, spec, tiles, align)


def most_splits(meta: AttentionMetadata, spec: AttentionSpec, tiles: DecodeTiles) -> int:
    """Return the largest number of splits (parts computed in parallel) into which the context of a sequence of this
    batch is cut.
    """
    longest = meta.max_context_len
    if spec.sliding_window is not None:
        # The first split begins at a multiple of `min_split`, up to `min_split` tokens before the window.
        longest = min(longest, spec.sliding_window + tiles.min_split)
    return min(tiles.max_splits, -(-longest // tiles.min_split))


def combine(
    output: Tensor,
    partial: Tensor,
    stats: Tensor,
    meta: AttentionMetadata,
    spec: AttentionSpec,
    tiles: DecodeTiles,
    align: int,
) -> None:
    """Merge the results of the splits of each sequence's context, and write them to `output`. `partial` is [num_seqs,
    num_heads, num_splits, head_dim]; `stats`, [..., 2], are largest scores and sums of weights. `align` must be the one
    that was passed to `cut`.
    """
    num_seqs, num_heads, num_splits, head_dim = partial.shape
    if num_splits == 1:
        return
    dims = min(padded(head_dim), COMBINED_DIMS)
    _combine_kernel[(num_seqs, num_heads, -(-head_dim // dims))](
        output,
        partial,
        stats,
        meta.query_starts,
        meta.context_lens,
        output if spec.sinks is None else spec.sinks,
        num_splits,
        heads=num_heads,
        head_dim=head_dim,
        dims=dims,
        min_split=tiles.min_split,
        max_splits=padded(tiles.max_splits),
        split_limit=tiles.max_splits,
        align=align,
        window=spec.sliding_window or 0,
        sunk=spec.sinks is not None,
        num_warps=1,
        **overlapping(output.device),
    )


@triton.jit
def cut(context, min_split: tl.constexpr, split_limit: tl.constexpr, align: tl.constexpr, window: tl.constexpr):
    """Divide a context into splits that are computed in parallel. Return (first position, tokens per split, number of
    splits). There are at most `split_limit` equal splits of about `min_split` tokens or more, each a multiple of
    `align` tokens.
    """
    first = context * 0
    if window > 0:
        first = (tl.maximum(context - window, 0) // min_split) * min_split
    span = context - first
    splits = tl.minimum(tl.maximum((span + min_split // 2) // min_split, 1), split_limit)
    size = tl.maximum((span + splits * align - 1) // (splits * align), 1) * align
    return first, size, (span + size - 1) // size


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "table_stride"])  # they change with every batch
def _decode_kernel(  # noqa: PLR0913
    output,
    partial,
    stats,
    query,
    cache,
    query_starts,
    context_lens,
    block_tables,
    sinks,
    pairs,
    words,
    num_seqs,
    num_splits,
    scale,
    softcap,
    query_stride,
    head_stride,
    block_rows,
    table_stride,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
    block_tokens: tl.constexpr,
    head_rows: tl.constexpr,
    kind: tl.constexpr,
    min_split: tl.constexpr,
    max_splits: tl.constexpr,
    split_limit: tl.constexpr,
    align: tl.constexpr,
    window: tl.constexpr,
    capped: tl.constexpr,
    sunk: tl.constexpr,
    seqs: tl.constexpr,
    precision: tl.constexpr,
):
    ids = tl.arange(0, seqs)
    contexts = tl.load(context_lens + ids, mask=ids < num_seqs, other=0)
    starts = tl.load(query_starts + ids, mask=ids < num_seqs, other=0)
    ends = tl.load(query_starts + ids + 1, mask=ids < num_seqs, other=0)
    # Sequences with more new tokens belong to the prefill kernel: `cut` gives no split for a context of 0.
    contexts = tl.where(ends - starts == 1, contexts, 0)
    _, _, splits_of = cut(contexts, min_split, split_limit, align, window)
    item_ends = tl.cumsum(splits_of, 0)
    num_items = tl.sum(splits_of, 0) * kv_heads
    row, dim = tl.arange(0, rows), tl.arange(0, dims)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        pair, kv_head = item // kv_heads, item % kv_heads
        before = item_ends <= pair
        seq = tl.sum(before.to(tl.int32), 0)
        split = pair - tl.sum(tl.where(before, splits_of, 0), 0)
        context = tl.load(context_lens + seq)
        token = tl.load(query_starts + seq).to(tl.int64)
        first, size, splits = cut(context, min_split, split_limit, align, window)
        begin = first + split * size
        end = tl.minimum(begin + size, context)
        lowest = tl.maximum(context - window, 0) if window > 0 else 0

        head = kv_head * group + row
        mask = (row < group)[:, None] & (dim < head_dim)[None, :]
        reader = query + token * query_stride + head[:, None] * head_stride
        if kind < 0:
            acc, total, peak = attend_split(
                tl.load(reader + dim[None, :], mask, other=0.0),
                cache,
                block_tables + seq.to(tl.int64) * table_stride,
                kv_head,
                begin,
                end,
                lowest,
                block_rows,
                scale,
                softcap,
                kv_heads,
                head_dim,
                tile,
                block_tokens,
                head_rows,
                window,
                capped,
                precision,
            )
        else:
            acc, total, peak = attend_codes(
                tl.load(reader + dim[None, :], mask, other=0.0),
                cache,
                pairs,
                words,
                block_tables + seq.to(tl.int64) * table_stride,
                kv_head,
                begin,
                end,
                lowest,
                block_rows,
                scale,
                softcap,
                kv_heads,
                head_dim,
                tile,
                block_tokens,
                head_rows,
                kind,
                window,
                capped,
                precision,
            )
        store_split(
            output, partial, stats, sinks, acc, total, peak, seq.to(tl.int64), token, head, split, splits, num_splits,
            kv_heads, group, head_dim, sunk,
        )  # fmt: skip


@triton.jit
def store_split(  # noqa: PLR0913
    output,
    partial,
    stats,
    sinks,
    acc,
    total,
    peak,
    seq,
    token,
    head,
    split,
    splits,
    num_splits,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    sunk: tl.constexpr,
):
    """Store the attention result of one KV head's queries, `head` [rows], over one split of the context: to `output` if
    it is the only split, otherwise to `partial` and `stats`.
    """
    row, dim = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    mask = (row < group)[:, None] & (dim < head_dim)[None, :]
    if splits == 1:
        if sunk:
            sink = tl.load(sinks + head, mask=row < group, other=0.0).to(tl.float32) * LOG2E
            new_peak = tl.maximum(peak, sink)
            acc = acc * tl.exp2(peak - new_peak)[:, None]
            total = total * tl.exp2(peak - new_peak) + tl.exp2(sink - new_peak)
        at = (token * (kv_heads * group) + head)[:, None] * head_dim + dim[None, :]
        tl.store(output + at, (acc / total[:, None]).to(output.dtype.element_ty), mask)
    else:
        slot = (seq * (kv_heads * group) + head) * num_splits + split
        tl.store(partial + slot[:, None] * head_dim + dim[None, :], acc, mask)
        tl.store(stats + slot * 2, peak, row < group)
        tl.store(stats + slot * 2 + 1, total, row < group)


@triton.jit
def attend_split(  # noqa: PLR0913
    asked,
    cache,
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
    window: tl.constexpr,
    capped: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute attention of one KV head's queries over one split of the context. Return (result before the division by
    the sum of weights [rows, dims], this sum [rows], the largest score [rows]).
    """
    rows: tl.constexpr = asked.shape[0]
    dims: tl.constexpr = asked.shape[1]
    acc = tl.zeros([rows, dims], tl.float32)
    total = tl.zeros([rows], tl.float32)
    peak = tl.full([rows], LOWEST, tl.float32)
    step, dim = tl.arange(0, tile), tl.arange(0, dims)
    plane = kv_heads * head_rows
    factor = factor_of(scale, softcap, capped)
    # The block number of the next tile is read one tile ahead, so that no load has to wait for another load's result.
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
        keys = load_rows(cache, at, seen, dim, head_dim).to(asked.dtype)
        values = load_rows(cache, at + plane, seen, dim, head_dim).to(asked.dtype)
        raw = tl.dot(asked, tl.trans(keys), input_precision=precision)
        scores = capped_scores(raw, scale, softcap, capped)
        if window > 0:
            seen = seen & (position >= lowest)
        scores = tl.where(seen[None, :], scores, HIDDEN)
        acc, total, peak = absorb(acc, total, peak, scores, factor, values, raw, False, precision)
        blocks = next_blocks
    return acc, total, peak


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(  # noqa: PLR0913
    output,
    partial,
    stats,
    query_starts,
    context_lens,
    sinks,
    num_splits,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    min_split: tl.constexpr,
    max_splits: tl.constexpr,
    split_limit: tl.constexpr,
    align: tl.constexpr,
    window: tl.constexpr,
    sunk: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Merge the splits of one head of one sequence into its row of `output`. Their order is fixed, so that results are
    reproducible.
    """
    start_early(overlaps)
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(query_starts + seq).to(tl.int64)
    context, after = tl.load(context_lens + seq), tl.load(query_starts + seq + 1)
    _, _, splits = cut(context, min_split, split_limit, align, window)
    if (splits <= 1) | (after - token != 1):
        return  # `store_split` has written the result, or the sequence belongs to prefill
    split, dim = tl.arange(0, max_splits), tl.program_id(2) * dims + tl.arange(0, dims)
    slot = (seq * heads + head) * num_splits + split
    peaks = tl.load(stats + slot * 2, split < splits, other=HIDDEN)
    totals = tl.load(stats + slot * 2 + 1, split < splits, other=0.0)
    mask = (split < splits)[:, None] & (dim < head_dim)[None, :]
    parts = tl.load(partial + slot[:, None] * head_dim + dim[None, :], mask, other=0.0)
    peak = tl.max(peaks, 0)
    if sunk:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(peaks - peak)
    total = tl.sum(weights * totals, 0)
    if sunk:
        total += tl.exp2(sink - peak)
    merged = tl.sum(parts * weights[:, None], 0) / total
    to = output + (token * heads + head) * head_dim + dim
    tl.store(to, merged.to(output.dtype.element_ty), dim < head_dim)
