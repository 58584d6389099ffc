"""Latent attention (MLA): all query heads attend to one row per token, which is read once as key and as value.

A row consists of the latent, which is also the value, and of the rotated part of the key behind it. The query rows of
a tile are the heads of one token (decode), or of several tokens of a chunk (prefill). Decode cuts a context into splits
as `triton.decode` does, which also combines their results. The grids depend on shapes only and nothing is read back, so
a captured graph serves any lengths. Twin: `reference.attention`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec
from baton_serve.engine.kernels.quantized_kv import is_coded
from baton_serve.engine.kernels.triton.decode import combine, cut, most_splits
from baton_serve.engine.kernels.triton.softmax import (
    HIDDEN,
    LOWEST,
    absorb,
    capped_scores,
    factor_of,
    load_scales,
    tile_rows,
)
from baton_serve.engine.kernels.triton.tiles import DecodeTiles, PrefillTiles, padded

MAX_VALUE_DIM = 512
"""Largest latent of the kernels: the sums of a tile of queries are in registers."""
MAX_ROTATED_DIM = 128
"""Largest part of a row behind the latent."""
VECTOR_BYTES = 16
"""Largest load of one thread."""
MIN_ROWS = 16
"""Rows of an operand of a matrix unit; fewer rows cost the same."""


def rows_are_aligned(row_size: int, value_dim: int, element_bytes: int) -> bool:
    """Return whether cache rows of `row_size` elements, and the latents in them, begin at addresses from which a device
    loads a whole vector.

    Triton 3.6 copies 16 bytes at a time from rows of 33 numbers too, which devices refuse; Triton 3.7 does not.
    """
    return row_size * element_bytes % VECTOR_BYTES == 0 and value_dim * element_bytes % VECTOR_BYTES == 0


def fits(cache: Tensor, spec: AttentionSpec) -> bool:
    """Return whether the kernels of this module support a layer of latent attention (MLA), whose K and V are the same
    memory.
    """
    if spec.value_dim is None or spec.alibi is not None or spec.sinks is not None or spec.sliding_window is not None:
        return False
    rotated = cache.shape[4] - spec.value_dim
    if not rows_are_aligned(cache.shape[4], spec.value_dim, cache.element_size()):
        return False
    return cache.shape[2] == 1 and padded(spec.value_dim) <= MAX_VALUE_DIM and 0 < rotated <= MAX_ROTATED_DIM


def decode_latents(
    output: Tensor, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec, tiles: DecodeTiles
) -> None:
    """Compute latent attention for the sequences with exactly one new token, and write it to their rows of `output`.
    Call it only if `fits`.
    """
    num_seqs, num_heads, value_dim = meta.context_lens.shape[0], query.shape[1], output.shape[2]
    align = max(tiles.tile, cache.shape[3])
    num_splits = most_splits(meta, spec, tiles)
    rows = min(max(MIN_ROWS, padded(num_heads)), 4 * MIN_ROWS)
    partial = query.new_empty((num_seqs, num_heads, num_splits, value_dim), dtype=torch.float32)
    stats = query.new_empty((num_seqs, num_heads, num_splits, 2), dtype=torch.float32)
    items = num_seqs * num_splits * -(-num_heads // rows)
    _decode_kernel[(min(items, tiles.programs),)](
        output,
        partial,
        stats,
        query,
        cache,
        cache.view(torch.bfloat16) if is_coded(cache) else output,
        meta.query_starts,
        meta.context_lens,
        meta.block_tables,
        num_seqs,
        num_splits,
        spec.scale,
        spec.softcap or 1.0,
        query.stride(0),
        query.stride(1),
        cache.stride(0) // cache.shape[4],
        meta.block_tables.stride(0),
        num_heads=num_heads,
        rows=rows,
        min_split=tiles.min_split,
        split_limit=tiles.max_splits,
        align=align,
        seqs=next((size for size in (16, 64, 256) if num_seqs <= size), padded(num_seqs)),
        **_constants(query, cache, spec, tiles),
    )
    combine(output, partial, stats, meta, spec, tiles, align)


def prefill_latents(
    output: Tensor,
    query: Tensor,
    cache: Tensor,
    meta: AttentionMetadata,
    spec: AttentionSpec,
    tiles: PrefillTiles,
    *,
    skip_singles: bool,
) -> None:
    """Compute latent attention of all sequences, or, with `skip_singles`, of those with several new tokens, and write
    it to `output`. Call it only if `fits`.
    """
    num_seqs, num_heads = meta.context_lens.shape[0], query.shape[1]
    head_rows = min(padded(num_heads), tiles.rows)
    tokens = tiles.rows // head_rows
    # Only whole latents are divided, so that no part needs a mask.
    parts = tiles.parts if padded(output.shape[2]) == output.shape[2] else 1
    grid = (-(-num_heads // head_rows) * parts, query.shape[0] // tokens + num_seqs)
    _prefill_kernel[grid](
        output,
        query,
        cache,
        cache.view(torch.bfloat16) if is_coded(cache) else output,
        meta.query_starts,
        meta.context_lens,
        meta.block_tables,
        num_seqs,
        spec.scale,
        spec.softcap or 1.0,
        query.stride(0),
        query.stride(1),
        cache.stride(0) // cache.shape[4],
        meta.block_tables.stride(0),
        num_heads=num_heads,
        head_rows=head_rows,
        tokens=tokens,
        parts=parts,
        skip_singles=skip_singles,
        seqs=16 if num_seqs <= 16 else max(256, padded(num_seqs)),
        **_constants(query, cache, spec, tiles),
    )


def _constants(
    query: Tensor, cache: Tensor, spec: AttentionSpec, tiles: DecodeTiles | PrefillTiles
) -> dict[str, int | bool | str | None]:
    """Return the arguments for which the decode and prefill kernels are compiled, by name."""
    assert spec.value_dim is not None
    return {
        "head_dim": cache.shape[4],
        "value_dim": spec.value_dim,
        "dims": max(16, padded(spec.value_dim)),
        "tail_dims": max(16, padded(cache.shape[4] - spec.value_dim)),
        "tile": tiles.tile,
        "block_tokens": cache.shape[3],
        "scaled": is_coded(cache),
        "capped": spec.softcap is not None,
        "precision": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "table_stride"])  # they change with every batch
def _decode_kernel(  # noqa: PLR0913
    output,
    partial,
    stats,
    query,
    cache,
    scales,
    query_starts,
    context_lens,
    block_tables,
    num_seqs,
    num_splits,
    scale,
    softcap,
    query_stride,
    head_stride,
    block_rows,
    table_stride,
    num_heads: tl.constexpr,
    rows: tl.constexpr,
    min_split: tl.constexpr,
    split_limit: tl.constexpr,
    align: tl.constexpr,
    seqs: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    dims: tl.constexpr,
    tail_dims: tl.constexpr,
    tile: tl.constexpr,
    block_tokens: tl.constexpr,
    scaled: tl.constexpr,
    capped: tl.constexpr,
    precision: tl.constexpr,
):
    ids = tl.arange(0, seqs)
    contexts = tl.load(context_lens + ids, mask=ids < num_seqs, other=0)
    starts = tl.load(query_starts + ids, mask=ids < num_seqs, other=0)
    ends = tl.load(query_starts + ids + 1, mask=ids < num_seqs, other=0)
    # Sequences with more new tokens belong to the prefill kernel: `cut` gives no split for a context of 0.
    contexts = tl.where(ends - starts == 1, contexts, 0)
    # No name of the loop below may stand for another type here.
    _firsts, _sizes, splits_of = cut(contexts, min_split, split_limit, align, 0)
    item_ends = tl.cumsum(splits_of, 0)
    parts: tl.constexpr = (num_heads + rows - 1) // rows
    num_items = tl.sum(splits_of, 0) * parts
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        pair, part = item // parts, item % parts
        before = item_ends <= pair
        seq = tl.sum(before.to(tl.int32), 0).to(tl.int64)
        split = pair - tl.sum(tl.where(before, splits_of, 0), 0)
        context = tl.load(context_lens + seq)
        token = tl.load(query_starts + seq).to(tl.int64)
        _, size, splits = cut(context, min_split, split_limit, align, 0)
        begin = split * size
        head = part * rows + tl.arange(0, rows)
        at_query = query + token * query_stride + head * head_stride
        asked, tail = _load_queries(at_query, 0, head < num_heads, head_dim, value_dim, dims, tail_dims)
        acc, total, peak = _attend(
            asked,
            None,
            tail,
            0,
            0,
            tl.zeros([rows], tl.int32) + context - 1,
            cache,
            scales,
            block_tables + seq * table_stride,
            begin,
            tl.minimum(begin + size, context),
            block_rows,
            scale,
            softcap,
            head_dim,
            value_dim,
            tile,
            block_tokens,
            scaled,
            capped,
            precision,
        )
        dim = tl.arange(0, dims)
        mask = (head < num_heads)[:, None] & (dim < value_dim)[None, :]
        if splits == 1:
            at = (token * num_heads + head)[:, None] * value_dim + dim[None, :]
            tl.store(output + at, (acc / total[:, None]).to(output.dtype.element_ty), mask)
        else:
            slot = (seq * num_heads + head) * num_splits + split
            tl.store(partial + slot[:, None] * value_dim + dim[None, :], acc, mask)
            tl.store(stats + slot * 2, peak, head < num_heads)
            tl.store(stats + slot * 2 + 1, total, head < num_heads)


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])  # they change with every batch
def _prefill_kernel(  # noqa: PLR0913
    output,
    query,
    cache,
    scales,
    query_starts,
    context_lens,
    block_tables,
    num_seqs,
    scale,
    softcap,
    query_stride,
    head_stride,
    block_rows,
    table_stride,
    num_heads: tl.constexpr,
    head_rows: tl.constexpr,
    tokens: tl.constexpr,
    parts: tl.constexpr,
    skip_singles: tl.constexpr,
    seqs: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    dims: tl.constexpr,
    tail_dims: tl.constexpr,
    tile: tl.constexpr,
    block_tokens: tl.constexpr,
    scaled: tl.constexpr,
    capped: tl.constexpr,
    precision: tl.constexpr,
):
    ids = tl.arange(0, seqs)
    starts = tl.load(query_starts + ids, mask=ids < num_seqs, other=0)
    lens = tl.load(query_starts + ids + 1, mask=ids < num_seqs, other=0) - starts
    if skip_singles:
        lens = tl.where(lens == 1, 0, lens)
    lens = tl.maximum(lens, 0)
    tiles_of = (lens + (tokens - 1)) // tokens
    # Counted from the end, because the last tile of a sequence sees the longest context: long tiles start first.
    index = tl.sum(tiles_of, 0) - 1 - tl.program_id(1)
    if index < 0:
        return
    before = tl.cumsum(tiles_of, 0) <= index
    seq = tl.sum(before.to(tl.int32), 0)
    first = (index - tl.sum(tl.where(before, tiles_of, 0), 0)) * tokens  # of this sequence's new tokens
    query_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_start
    context = tl.load(context_lens + seq)
    row = tl.arange(0, tokens * head_rows)
    token, head = first + row // head_rows, tl.program_id(0) // parts * head_rows + row % head_rows
    live = (token < query_len) & (head < num_heads)
    at = (query_start + token).to(tl.int64)
    # This program sums up some elements of the latents; the program of the other half computes the same scores.
    own_dims: tl.constexpr = dims // parts
    own, beside = tl.program_id(0) % parts * own_dims, (parts - 1 - tl.program_id(0) % parts) * own_dims
    at_query = query + at * query_stride + head * head_stride
    asked, tail = _load_queries(at_query, own, live, head_dim, value_dim, own_dims, tail_dims)
    others = None
    if parts == 2:
        others = tl.load(at_query[:, None] + beside + tl.arange(0, own_dims)[None, :], live[:, None], other=0.0)
    acc, total, _ = _attend(
        asked,
        others,
        tail,
        own,
        beside,
        context - query_len + token,
        cache,
        scales,
        block_tables + seq.to(tl.int64) * table_stride,
        0,
        tl.minimum(context - query_len + first + tokens, context),
        block_rows,
        scale,
        softcap,
        head_dim,
        value_dim,
        tile,
        block_tokens,
        scaled,
        capped,
        precision,
    )
    dim = own + tl.arange(0, own_dims)
    to = (at * num_heads + head)[:, None] * value_dim + dim[None, :]
    mask = live[:, None] & (dim < value_dim)[None, :]
    tl.store(output + to, (acc / total[:, None]).to(output.dtype.element_ty), mask)


@triton.jit
def _load_queries(
    at, first, live, head_dim: tl.constexpr, value_dim: tl.constexpr, dims: tl.constexpr, tail_dims: tl.constexpr
):
    """Load query rows. Return (what multiplies `dims` elements of the latents, from `first` on, [rows, dims], the
    rotated part [rows, tail_dims]).
    """
    dim, rest = first + tl.arange(0, dims), value_dim + tl.arange(0, tail_dims)
    asked = tl.load(at[:, None] + dim[None, :], live[:, None] & (dim < value_dim)[None, :], other=0.0)
    tail = tl.load(at[:, None] + rest[None, :], live[:, None] & (rest < head_dim)[None, :], other=0.0)
    return asked, tail


@triton.jit
def _attend(  # noqa: PLR0913
    asked,
    others,
    tail,
    own,
    beside,
    position,
    cache,
    scales,
    table,
    begin,
    end,
    block_rows,
    scale,
    softcap,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    tile: tl.constexpr,
    block_tokens: tl.constexpr,
    scaled: tl.constexpr,
    capped: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute attention of query rows over the cached tokens [begin, end). Return (result before the division by the
    sum of weights [rows, dims], this sum [rows], the largest score [rows]). The results are those of `dims` elements of
    the latents from `own` on. `others` multiplies as many elements from `beside` on; None: the latents have none.
    """
    rows: tl.constexpr = asked.shape[0]
    dims: tl.constexpr = asked.shape[1]
    tail_dims: tl.constexpr = tail.shape[1]
    own_size: tl.constexpr = value_dim if others is None else dims
    acc = tl.zeros([rows, dims], tl.float32)
    total = tl.zeros([rows], tl.float32)
    peak = tl.full([rows], LOWEST, tl.float32)
    step, dim, rest = tl.arange(0, tile), tl.arange(0, dims), tl.arange(0, tail_dims)
    factor = factor_of(scale, softcap, capped)
    wide: tl.constexpr = tile > block_tokens
    # The block number of the next tile is read one tile ahead, so that no load has to wait for another load's result.
    blocks = tl.load(table + (begin + (step if wide else 0)) // block_tokens)
    for start in range(begin, end, tile):
        ahead = start + tile + (step if wide else 0)
        next_blocks = tl.load(table + ahead // block_tokens, mask=ahead < end, other=0)
        there = start + step
        known = there < end
        if wide:
            at = tile_rows(blocks, there, 0, block_rows, 0, block_tokens)
        else:
            at = tile_rows(blocks, start, 0, block_rows, 0, block_tokens) + step
        latents = _load_columns(cache, at, known, dim, own, own_size, head_dim).to(asked.dtype)
        rotated = _load_columns(cache, at, known, rest, value_dim, head_dim - value_dim, head_dim).to(asked.dtype)
        raw = tl.dot(asked, tl.trans(latents), input_precision=precision)
        if others is not None:
            columns = _load_columns(cache, at, known, dim, beside, own_size, head_dim).to(asked.dtype)
            raw = tl.dot(others, tl.trans(columns), raw, input_precision=precision)
        raw = tl.dot(tail, tl.trans(rotated), raw, input_precision=precision)
        worths = there
        if scaled:
            worths = load_scales(scales, blocks, there, 0, known, block_rows, 0, block_tokens, head_dim)
            raw *= worths[None, :]
        seen = known[None, :] & (there[None, :] <= position[:, None])
        scores = tl.where(seen, capped_scores(raw, scale, softcap, capped), HIDDEN)
        acc, total, peak = absorb(acc, total, peak, scores, factor, latents, worths, scaled, precision)
        blocks = next_blocks
    return acc, total, peak


@triton.jit
def _load_columns(cache, rows, known, dim, first, size: tl.constexpr, head_dim: tl.constexpr):
    """Load `size` columns of the cache rows `rows`, from `first` on. Tokens outside the mask `known` read as zero,
    because memory that was never written may hold NaN.
    """
    offsets = rows.to(tl.int64)[:, None] * head_dim + first + dim[None, :]
    if size == dim.shape[0]:
        return tl.load(cache + offsets, mask=known[:, None], other=0.0)
    return tl.load(cache + offsets, mask=known[:, None] & (dim < size)[None, :], other=0.0)
