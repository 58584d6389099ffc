"""Decode attention that also norms and rotates heads and stores K and V, for sequences with one new token each.

Every split norms and rotates its own queries. The last split takes K and V of the new token from its heads and not
from the cache. Twin: `rms_norm` of heads, `rotary_store`, then attention.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec, NewHeads
from baton_serve.engine.kernels.quantized_kv import is_coded
from baton_serve.engine.kernels.triton.decode import attend_split, combine, cut, most_splits, store_split
from baton_serve.engine.kernels.triton.overlap import overlapping, start_early
from baton_serve.engine.kernels.triton.softmax import capped_scores, factor_of
from baton_serve.engine.kernels.triton.tiles import DecodeTiles, padded, padded_head


def fits(new: NewHeads, cache: Tensor, meta: AttentionMetadata) -> bool:
    """Return whether `decode_new` supports these heads and this cache: each sequence has one new token, and the cache
    is not quantized.
    """
    num_tokens, num_seqs = new.heads.shape[0], meta.context_lens.shape[0]
    is_plain = not is_coded(cache) and cache.dtype == new.heads.dtype and new.heads.stride(2) == 1
    return meta.max_query_len == 1 and num_tokens == num_seqs and is_plain


def decode_new(
    new: NewHeads, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec, tiles: DecodeTiles
) -> Tensor:
    """Compute `AttentionBackend.attend_new` (norms, rotation, KV store and attention) with one kernel. Return
    [num_tokens, num_heads, head_dim], in which the rows of padding sequences are undefined. Call it only if `fits` is
    True.
    """
    num_kv_heads, block_tokens, head_dim = cache.shape[2:]
    num_tokens, num_heads = new.heads.shape[0], new.heads.shape[1] - 2 * num_kv_heads
    output = torch.empty((num_tokens, num_heads, head_dim), dtype=new.heads.dtype, device=new.heads.device)
    tile = min(tiles.tile, tiles.min_split)
    align = max(tile, block_tokens)
    num_splits = most_splits(meta, spec, tiles)
    partial = output.new_empty((num_tokens, num_heads, num_splits, head_dim), dtype=torch.float32)
    stats = output.new_empty((num_tokens, num_heads, num_splits, 2), dtype=torch.float32)
    items = num_tokens * num_kv_heads * num_splits
    group, (cos, sin) = num_heads // num_kv_heads, new.rotation
    query_norm, key_norm = new.query_norm, new.key_norm
    _decode_new_kernel[(min(items, tiles.programs),)](
        output,
        partial,
        stats,
        new.heads,
        cos,
        sin,
        output if query_norm is None else query_norm.weight,
        output if key_norm is None else key_norm.weight,
        cache,
        meta.slots,
        meta.context_lens,
        meta.block_tables,
        output if spec.sinks is None else spec.sinks,
        num_tokens,
        num_splits,
        spec.scale,
        spec.softcap or 1.0,
        0.0 if query_norm is None else query_norm.eps,
        0.0 if key_norm is None else key_norm.eps,
        new.heads.stride(0),
        new.heads.stride(1),
        cos.stride(0),
        cache.stride(0) // head_dim,
        meta.block_tables.stride(0),
        kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        dims=padded_head(head_dim),
        half=cos.shape[-1] // 2,
        rows=max(16, padded(group)),
        few=padded(group),
        tile=tile,
        block_tokens=block_tokens,
        head_rows=cache.stride(2) // head_dim,
        min_split=tiles.min_split,
        split_limit=tiles.max_splits,
        align=align,
        window=spec.sliding_window or 0,
        capped=spec.softcap is not None,
        sunk=spec.sinks is not None,
        query_normed=query_norm is not None,
        key_normed=key_norm is not None,
        seqs=1 if num_tokens == 1 else next((s for s in (16, 64, 256) if num_tokens <= s), padded(num_tokens)),
        precision="ieee" if output.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **overlapping(output.device),
    )
    combine(output, partial, stats, meta, spec, tiles, align)
    return output


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "table_stride"])  # they change with every batch
def _decode_new_kernel(  # noqa: PLR0913, PLR0915
    output,
    partial,
    stats,
    heads,
    cos,
    sin,
    query_norm,
    key_norm,
    cache,
    slots,
    context_lens,
    block_tables,
    sinks,
    num_seqs,
    num_splits,
    scale,
    softcap,
    query_eps,
    key_eps,
    token_stride,
    head_stride,
    rotation_stride,
    block_rows,
    table_stride,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    half: tl.constexpr,
    rows: tl.constexpr,
    few: tl.constexpr,
    tile: tl.constexpr,
    block_tokens: tl.constexpr,
    head_rows: tl.constexpr,
    min_split: tl.constexpr,
    split_limit: tl.constexpr,
    align: tl.constexpr,
    window: tl.constexpr,
    capped: tl.constexpr,
    sunk: tl.constexpr,
    query_normed: tl.constexpr,
    key_normed: tl.constexpr,
    seqs: tl.constexpr,
    precision: tl.constexpr,
    overlaps: tl.constexpr,
):
    start_early(overlaps)
    if seqs > 1:
        ids = tl.arange(0, seqs)
        contexts = tl.load(context_lens + ids, mask=ids < num_seqs, other=0)
        _, _, splits_of = cut(contexts, min_split, split_limit, align, window)
        item_ends = tl.cumsum(splits_of, 0)
        num_items = tl.sum(splits_of, 0) * kv_heads
    else:
        _, _, all_splits = cut(tl.load(context_lens), min_split, split_limit, align, window)
        num_items = all_splits * kv_heads
    row, few_row, dim = tl.arange(0, rows), tl.arange(0, few), tl.arange(0, dims)
    dtype: tl.constexpr = output.dtype.element_ty
    partner = tl.where(dim < half, dim + half, tl.where(dim < 2 * half, dim - half, dim))
    side = tl.where(dim < half, -1.0, 1.0)
    turns = dim < 2 * half
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        pair, kv_head = item // kv_heads, item % kv_heads
        if seqs > 1:
            before = item_ends <= pair
            seq = tl.sum(before.to(tl.int32), 0)
            split = pair - tl.sum(tl.where(before, splits_of, 0), 0)
        else:
            seq = pair * 0
            split = pair
        token = seq.to(tl.int64)
        context = tl.load(context_lens + seq)
        slot = tl.load(slots + token)
        first, size, splits = cut(context, min_split, split_limit, align, window)
        begin = first + split * size
        lowest = tl.maximum(context - window, 0) if window > 0 else 0

        c = tl.load(cos + token * rotation_stride + dim % half, turns, other=1.0).to(tl.float32)
        s = tl.load(sin + token * rotation_stride + dim % half, turns, other=0.0).to(tl.float32) * side
        asked_at = heads + token * token_stride + (kv_head * group + few_row)[:, None] * head_stride
        mask = (few_row < group)[:, None] & (dim < head_dim)[None, :]
        straight = tl.load(asked_at + dim[None, :], mask, other=0.0)
        turned = tl.load(asked_at + partner[None, :], mask, other=0.0)
        new_at = heads + token * token_stride + (kv_heads * group + kv_head) * head_stride
        key_straight = tl.load(new_at + dim, dim < head_dim, other=0.0)
        key_turned = tl.load(new_at + partner, dim < head_dim, other=0.0)
        value = tl.load(new_at + kv_heads * head_stride + dim, dim < head_dim, other=0.0)
        if query_normed:
            wide = straight.to(tl.float32)
            factor = tl.rsqrt(tl.sum(wide * wide, 1) / head_dim + query_eps)[:, None]
            straight = _normed(straight, factor, query_norm, dim, head_dim, dtype)
            turned = _normed(turned, factor, query_norm, partner, head_dim, dtype)
        if key_normed:
            wide_key = key_straight.to(tl.float32)
            key_factor = tl.rsqrt(tl.sum(wide_key * wide_key, 0) / head_dim + key_eps)
            key_straight = _normed(key_straight, key_factor, key_norm, dim, head_dim, dtype)
            key_turned = _normed(key_turned, key_factor, key_norm, partner, head_dim, dtype)
        rotated = (straight.to(tl.float32) * c[None, :] + turned.to(tl.float32) * s[None, :]).to(dtype)
        asked = tl.reshape(tl.broadcast_to(rotated[None, :, :], [rows // few, few, dims]), [rows, dims])
        key = (key_straight.to(tl.float32) * c + key_turned.to(tl.float32) * s).to(dtype)
        # Only the last split contains the new token. It stores K and V, and adds them to the result from its registers.
        is_newest = split == splits - 1
        if is_newest & (slot >= 0):
            place = (slot // block_tokens) * block_rows + kv_head * head_rows + slot % block_tokens
            tl.store(cache + place * head_dim + dim, key, dim < head_dim)
            tl.store(cache + (place + kv_heads * head_rows) * head_dim + dim, value, dim < head_dim)
        raw = tl.sum(rotated.to(tl.float32) * key.to(tl.float32)[None, :], 1)
        score = capped_scores(raw, scale, softcap, capped) * factor_of(scale, softcap, capped)
        score = tl.reshape(tl.broadcast_to(score[None, :], [rows // few, few]), [rows])

        acc, total, peak = attend_split(
            asked,
            cache,
            block_tables + token * table_stride,
            kv_head,
            begin,
            tl.minimum(begin + size, context - 1),
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
        if is_newest:
            new_peak = tl.maximum(peak, score)
            shrink, weight = tl.exp2(peak - new_peak), tl.exp2(score - new_peak)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + weight[:, None] * value.to(tl.float32)[None, :]
            peak = new_peak
        store_split(
            output, partial, stats, sinks, acc, total, peak, token, token, kv_head * group + row, split, splits,
            num_splits, kv_heads, group, head_dim, sunk,
        )  # fmt: skip


@triton.jit
def _normed(rows, factor, weight, at, head_dim: tl.constexpr, dtype: tl.constexpr):
    """Return `rows` (heads) multiplied by their RMSNorm `factor` and by the weight, with the same rounding as
    `rms_norm`.
    """
    worth = tl.load(weight + at, at < head_dim, other=0.0).to(tl.float32)
    return ((rows.to(tl.float32) * factor).to(dtype).to(tl.float32) * worth).to(dtype)
