"""Prefill attention: the new tokens of many sequences attend to their cached prefix and to themselves, causally.

Tokens of an image may see the rest of their image, too (`AttentionMetadata.seen_ends`).

The query heads that share a KV head are folded into the rows of a tile (row = token * group + member), so that short
chunks fill the matrix units too. Shapes (tokens and sequences) bound the grid, and each program finds its sequence on
the device. Long tiles start first, so that the last programs to run are short. The results of wide heads do not fit
into registers: there each program computes all scores, and the sums for a part of the values' elements. Twin:
`reference.attention._prefill`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec
from baton_serve.engine.kernels.quantized_kv import is_coded
from baton_serve.engine.kernels.triton.softmax import (
    HIDDEN,
    LOG2E,
    LOWEST,
    absorb,
    capped_scores,
    factor_of,
    load_rows,
    load_scales,
    tile_rows,
)
from baton_serve.engine.kernels.triton.tiles import PrefillTiles, padded, padded_head


def prefill(
    output: Tensor,
    query: Tensor,
    cache: Tensor,
    meta: AttentionMetadata,
    spec: AttentionSpec,
    tiles: PrefillTiles,
    *,
    skip_singles: bool,
) -> None:
    """Compute paged attention of all sequences, and write it to `output`. With `skip_singles`, the rows of sequences
    with one new token stay as they are: the decode kernel computes them.
    """
    num_seqs, num_heads = meta.context_lens.shape[0], query.shape[1]
    num_kv_heads, block_tokens, head_dim = cache.shape[2:]
    scaled = is_coded(cache)
    group = num_heads // num_kv_heads
    rows = max(tiles.rows, padded(group))
    # A tile that a descriptor loads must lie within one block. With smaller blocks, pointers gather it from several.
    # Its rows begin at multiples of 16 bytes.
    is_aligned = head_dim * cache.element_size() % 16 == 0
    described = tiles.descriptors and block_tokens >= tiles.tile and is_aligned
    tile_tokens = rows // group
    grid = (num_kv_heads * tiles.parts, query.shape[0] // tile_tokens + num_seqs)
    _prefill_kernel[grid](
        output,
        query,
        _rows_descriptor(cache, tiles.tile, 1) if described else cache,
        _rows_descriptor(cache, tiles.tile, tiles.parts) if described and tiles.parts > 1 else cache,
        meta.query_starts,
        meta.context_lens,
        meta.block_tables,
        output if spec.sinks is None else spec.sinks,
        cache.view(torch.bfloat16) if scaled else output,
        output if meta.seen_ends is None else meta.seen_ends,
        num_seqs,
        spec.scale,
        spec.softcap or 1.0,
        query.stride(0),
        query.stride(1),
        cache.stride(0) // head_dim,
        meta.block_tables.stride(0),
        kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        dims=padded_head(head_dim),
        parts=tiles.parts,
        rows=rows,
        tile=tiles.tile,
        block_tokens=block_tokens,
        head_rows=cache.stride(2) // head_dim,
        scaled=scaled,
        window=spec.sliding_window or 0,
        capped=spec.softcap is not None,
        sunk=spec.sinks is not None,
        skip_singles=skip_singles,
        sees_later=meta.seen_ends is not None,
        seqs=16 if num_seqs <= 16 else max(256, padded(num_seqs)),
        described=described,
        paired=tiles.paired and described and not scaled,
        precision="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _rows_descriptor(cache: Tensor, tile: int, parts: int) -> TensorDescriptor:
    """Return a tensor descriptor that shows the cache as rows of head_dim elements, of which `tile` are loaded at a
    time, or one of `parts` equal parts of them. Each (block, plane, head) is a run of block_tokens rows.
    """
    num_blocks, _, num_kv_heads, _, head_dim = cache.shape
    num_rows = (num_blocks - 1) * (cache.stride(0) // head_dim) + 2 * num_kv_heads * cache.stride(2) // head_dim
    return TensorDescriptor(cache, [num_rows, head_dim], [head_dim, 1], [tile, padded_head(head_dim) // parts])


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])  # they change with every batch
def _prefill_kernel(  # noqa: PLR0913, PLR0915
    output,
    query,
    cache,
    values_of,
    query_starts,
    context_lens,
    block_tables,
    sinks,
    scales,
    seen_ends,
    num_seqs,
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
    parts: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
    block_tokens: tl.constexpr,
    head_rows: tl.constexpr,
    scaled: tl.constexpr,
    window: tl.constexpr,
    capped: tl.constexpr,
    sunk: tl.constexpr,
    skip_singles: tl.constexpr,
    sees_later: tl.constexpr,
    seqs: tl.constexpr,
    described: tl.constexpr,
    paired: tl.constexpr,
    precision: tl.constexpr,
):
    tokens: tl.constexpr = rows // group
    ids = tl.arange(0, seqs)
    starts = tl.load(query_starts + ids, mask=ids < num_seqs, other=0)
    lens = tl.load(query_starts + ids + 1, mask=ids < num_seqs, other=0) - starts
    if skip_singles:
        lens = tl.where(lens == 1, 0, lens)
    lens = tl.maximum(lens, 0)
    tiles_of = (lens + (tokens - 1)) // tokens
    tile_ends = tl.cumsum(tiles_of, 0)
    # Counted from the end, because the last tile of a sequence sees the longest context: long tiles start first.
    index = tl.sum(tiles_of, 0) - 1 - tl.program_id(1)
    if index < 0:
        return
    kv_head = tl.program_id(0) // parts
    before = tile_ends <= index
    seq = tl.sum(before.to(tl.int32), 0)
    token = (index - tl.sum(tl.where(before, tiles_of, 0), 0)) * tokens  # of this sequence's new tokens
    query_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_start
    context = tl.load(context_lens + seq)

    row, dim = tl.arange(0, rows), tl.arange(0, dims)
    mine = token + row // group
    head = kv_head * group + row % group
    live = (mine < query_len) & (row < tokens * group)
    at = (query_start + mine).to(tl.int64)
    mask = live[:, None] & (dim < head_dim)[None, :]
    asked = tl.load(query + at[:, None] * query_stride + head[:, None] * head_stride + dim[None, :], mask, other=0.0)

    # This program sums up some elements of the values; those of the other parts compute the same scores.
    own_dims: tl.constexpr = dims // parts
    first_dim = tl.program_id(0) % parts * own_dims
    if parts == 1:
        values_of = cache
    acc = tl.zeros([rows, own_dims], tl.float32)
    total = tl.zeros([rows], tl.float32)
    peak = tl.full([rows], LOWEST, tl.float32)
    if sunk:
        peak = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    position = context - query_len + mine
    lowest = context - query_len + token
    stride: tl.constexpr = 2 * tile if paired else tile
    begin, plain_end = 0, ((lowest + 1) // stride) * stride  # the tiles before it need no mask
    end = tl.minimum(lowest + tokens, context)
    last = position
    if sees_later:
        last = tl.load(seen_ends + at, mask=live, other=0) - 1
        end = tl.max(last, 0) + 1
    if window > 0:
        begin = (tl.maximum(lowest - window + 1, 0) // tile) * tile
        plain_end = begin
    table = block_tables + seq.to(tl.int64) * table_stride
    if paired and window == 0:
        acc, total, peak = _attend_pairs(
            acc,
            total,
            peak,
            asked,
            cache,
            scales,
            table,
            kv_head,
            begin,
            plain_end,
            block_rows,
            scale,
            softcap,
            kv_heads,
            tile,
            block_tokens,
            head_rows,
            scaled,
            capped,
            precision,
        )
    else:
        acc, total, peak = _attend_tiles(
            acc,
            total,
            peak,
            asked,
            position,
            last,
            cache,
            values_of,
            first_dim,
            scales,
            table,
            kv_head,
            begin,
            plain_end,
            block_rows,
            scale,
            softcap,
            kv_heads,
            head_dim,
            tile,
            block_tokens,
            head_rows,
            scaled,
            window,
            capped,
            False,
            described,
            precision,
        )
    acc, total, peak = _attend_tiles(
        acc,
        total,
        peak,
        asked,
        position,
        last,
        cache,
        values_of,
        first_dim,
        scales,
        table,
        kv_head,
        plain_end,
        end,
        block_rows,
        scale,
        softcap,
        kv_heads,
        head_dim,
        tile,
        block_tokens,
        head_rows,
        scaled,
        window,
        capped,
        True,
        described,
        precision,
    )
    own_dim = first_dim + tl.arange(0, own_dims)
    to = (at * (kv_heads * group) + head)[:, None] * head_dim + own_dim[None, :]
    own = live[:, None] & (own_dim < head_dim)[None, :]
    tl.store(output + to, (acc / total[:, None]).to(output.dtype.element_ty), own)


@triton.jit
def _attend_tiles(  # noqa: PLR0913
    acc,
    total,
    peak,
    asked,
    position,
    last,
    cache,
    values_of,
    first_dim,
    scales,
    table,
    kv_head,
    begin,
    end,
    block_rows,
    scale,
    softcap,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    tile: tl.constexpr,
    block_tokens: tl.constexpr,
    head_rows: tl.constexpr,
    scaled: tl.constexpr,
    window: tl.constexpr,
    capped: tl.constexpr,
    masked: tl.constexpr,
    described: tl.constexpr,
    precision: tl.constexpr,
):
    dims: tl.constexpr = asked.shape[1]
    step, dim, own_dim = tl.arange(0, tile), tl.arange(0, dims), first_dim + tl.arange(0, acc.shape[1])
    plane = kv_heads * head_rows
    factor = factor_of(scale, softcap, capped)
    wide: tl.constexpr = tile > block_tokens
    first = begin + (step if wide else 0)
    blocks = tl.load(table + first // block_tokens, mask=first < end, other=0)
    for start in range(begin, end, tile):
        ahead = start + tile + (step if wide else 0)
        next_blocks = tl.load(table + ahead // block_tokens, mask=ahead < end, other=0)
        at = tile_rows(blocks, start + (step if wide else 0), kv_head, block_rows, head_rows, block_tokens)
        there = start + step
        if described:
            keys = cache.load([at, 0]).to(asked.dtype)
            values = values_of.load([at + plane, first_dim]).to(asked.dtype)
            if masked:
                values = tl.where((there < end)[:, None], values, 0.0)
        else:
            at = at if wide else at + step
            known = (there < end) if masked else (there >= 0)
            keys = load_rows(cache, at, known, dim, head_dim).to(asked.dtype)
            values = load_rows(cache, at + plane, known, own_dim, head_dim).to(asked.dtype)
        raw = tl.dot(asked, tl.trans(keys), input_precision=precision)
        worths = raw
        if scaled:
            known = (there < end) if masked else (there >= 0)
            raw *= load_scales(scales, blocks, there, kv_head, known, block_rows, head_rows, block_tokens, head_dim)[
                None, :
            ]
            worths = load_scales(
                scales + plane * (head_dim // 2),
                blocks,
                there,
                kv_head,
                known,
                block_rows,
                head_rows,
                block_tokens,
                head_dim,
            )
        scores = capped_scores(raw, scale, softcap, capped)
        if masked:
            seen = there[None, :] <= last[:, None]
            if window > 0:
                seen = seen & (there[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, HIDDEN)
        acc, total, peak = absorb(acc, total, peak, scores, factor, values, worths, scaled, precision)
        blocks = next_blocks
    return acc, total, peak


@triton.jit
def _attend_pairs(  # noqa: PLR0913
    acc,
    total,
    peak,
    asked,
    cache,
    scales,
    table,
    kv_head,
    begin,
    end,
    block_rows,
    scale,
    softcap,
    kv_heads: tl.constexpr,
    tile: tl.constexpr,
    block_tokens: tl.constexpr,
    head_rows: tl.constexpr,
    scaled: tl.constexpr,
    capped: tl.constexpr,
    precision: tl.constexpr,
):
    """Add the key tokens [begin, end), which need no mask, to the running softmax of the queries (acc, total, peak),
    two tiles in each step, which halves the reductions and rescalings. Return the three.
    """
    plane = kv_heads * head_rows
    factor = factor_of(scale, softcap, capped)
    block0 = tl.load(table + begin // block_tokens, mask=begin < end, other=0)
    block1 = tl.load(table + (begin + tile) // block_tokens, mask=begin < end, other=0)
    for start in range(begin, end, 2 * tile):
        ahead = start + 2 * tile
        next0 = tl.load(table + ahead // block_tokens, mask=ahead < end, other=0)
        next1 = tl.load(table + (ahead + tile) // block_tokens, mask=ahead < end, other=0)
        at0 = tile_rows(block0, start, kv_head, block_rows, head_rows, block_tokens)
        at1 = tile_rows(block1, start + tile, kv_head, block_rows, head_rows, block_tokens)
        keys0 = cache.load([at0, 0]).to(asked.dtype)
        keys1 = cache.load([at1, 0]).to(asked.dtype)
        values0 = cache.load([at0 + plane, 0]).to(asked.dtype)
        values1 = cache.load([at1 + plane, 0]).to(asked.dtype)
        scores0 = capped_scores(tl.dot(asked, tl.trans(keys0), input_precision=precision), scale, softcap, capped)
        scores1 = capped_scores(tl.dot(asked, tl.trans(keys1), input_precision=precision), scale, softcap, capped)
        new_peak = tl.maximum(peak, tl.max(tl.maximum(scores0, scores1), 1) * factor)
        shrink = tl.exp2(peak - new_peak)
        weights0 = tl.exp2(scores0 * factor - new_peak[:, None])
        weights1 = tl.exp2(scores1 * factor - new_peak[:, None])
        total = total * shrink + tl.sum(weights0 + weights1, 1)
        acc = tl.dot(weights0.to(asked.dtype), values0, acc * shrink[:, None], input_precision=precision)
        acc = tl.dot(weights1.to(asked.dtype), values1, acc, input_precision=precision)
        peak = new_peak
        block0, block1 = next0, next1
    return acc, total, peak
