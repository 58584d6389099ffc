"""The plain-torch twin of attention: specification, test oracle and fallback, on any device and dtype.

It computes in float32 and rounds once at the end. The query heads that share a KV head are folded into the query
dimension, because torch's `enable_gqa` is ten times slower for one query token.
"""

from itertools import pairwise

import torch
from torch import Tensor

from baton_serve.engine.kernels import quantized_kv
from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec, NewHeads

_MAX_SCORES = 1 << 24
"""Largest number of scores that are in memory at the same time; 64 MiB in float32."""


class ReferenceAttention:
    """Implements `AttentionBackend` in plain torch, as the specification and test oracle of all other backends."""

    def store(self, key: Tensor, value: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
        block_tokens = cache.shape[3]
        kept = meta.slots >= 0
        blocks, offsets = meta.slots[kept] // block_tokens, meta.slots[kept] % block_tokens
        quantized_kv.write(cache, 0, blocks, offsets, key[kept])
        quantized_kv.write(cache, 1, blocks, offsets, value[kept])

    def attend(self, query: Tensor, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        contexts, tables = (
            meta.context_lens,
            meta.block_tables[:, : -(-meta.max_context_len // cache.shape[3])],
        )
        if meta.max_query_len <= 1 and query.shape[0] == contexts.shape[0]:
            return _decode(query, cache, contexts, tables, spec)
        output = query.new_empty(*query.shape[:2], spec.value_dim or query.shape[2])
        starts, lens = meta.query_starts.tolist(), contexts.tolist()
        singles = []
        for s, (start, end) in enumerate(pairwise(starts)):
            if end == start + 1:
                singles.append(s)
            elif end > start:
                ends = None if meta.seen_ends is None else meta.seen_ends[start:end]
                output[start:end] = _prefill(query[start:end], cache, lens[s], tables[s], spec, ends)
        # Sequences with one new token are collected, so that one gather serves all of them.
        if singles:
            rows = torch.tensor(singles, device=query.device)
            tokens = meta.query_starts[rows].long()
            output[tokens] = _decode(query[tokens], cache, contexts[rows], tables[rows], spec)
        return output

    def attend_new(self, new: NewHeads, cache: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor | None:
        return None


def _decode(query: Tensor, cache: Tensor, contexts: Tensor, tables: Tensor, spec: AttentionSpec) -> Tensor:
    """Return attention for sequences with one query token each, over the K and V that a single gather of their blocks
    returns.
    """
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = cache.shape[2]
    keys, values = _gather(cache, tables)  # [num_seqs, num_kv_heads, tokens, head_dim]
    positions = (contexts.long() - 1).clamp(min=0)[:, None]
    kv_positions = torch.arange(keys.shape[2], device=query.device)[None, :]
    visible = _visible(positions, kv_positions, spec)
    folded = query.float().view(num_seqs, num_kv_heads, -1, head_dim)  # the group is the query dimension
    scores = _capped(folded @ keys.transpose(2, 3) * spec.scale, spec)
    if spec.alibi is not None:
        scores = scores + spec.alibi.view(1, num_kv_heads, -1, 1) * (kv_positions - positions)[:, None, None, :]
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    sinks = None if spec.sinks is None else spec.sinks.view(1, num_kv_heads, -1, 1)
    values = values[..., : spec.value_dim].masked_fill(~visible[:, None, :, None], 0.0)  # unwritten memory may hold NaN
    return (_softmax(scores, sinks) @ values).reshape(num_seqs, num_heads, -1).to(query.dtype)


def _prefill(
    query: Tensor, cache: Tensor, context_len: int, table: Tensor, spec: AttentionSpec, seen_ends: Tensor | None
) -> Tensor:
    """Return attention for the new tokens of one sequence of `context_len` tokens, in slices of tokens so that the
    memory for scores stays bounded. `seen_ends` is that of `AttentionMetadata`.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = cache.shape[2]
    keys, values = _gather(cache, table[None, : -(-context_len // cache.shape[3])])
    folded = query.float().view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    sinks = None if spec.sinks is None else spec.sinks.view(num_kv_heads, -1, 1, 1)
    step = max(1, _MAX_SCORES // (num_heads * context_len))
    parts = []
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        low, high = context_len - num_rows + start, context_len - num_rows + end  # positions of these rows
        last = high if seen_ends is None else context_len
        first = 0 if spec.sliding_window is None else max(0, low - spec.sliding_window + 1)
        positions = torch.arange(low, high, device=query.device)[:, None]
        kv_positions = torch.arange(first, last, device=query.device)[None, :]
        ends = None if seen_ends is None else seen_ends[start:end, None]
        visible = _visible(positions, kv_positions, spec, ends)
        scores = _capped(folded[:, :, start:end] @ keys[0, :, None, first:last].transpose(2, 3) * spec.scale, spec)
        if spec.alibi is not None:
            scores = scores + spec.alibi.view(num_kv_heads, -1, 1, 1) * (kv_positions - positions)
        weights = _softmax(scores.masked_fill(~visible, float("-inf")), sinks)
        parts.append(weights @ values[0, :, None, first:last, : spec.value_dim])
    return torch.cat(parts, dim=2).permute(2, 0, 1, 3).reshape(num_rows, num_heads, -1).to(query.dtype)


def _gather(cache: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Return (K, V) of the KV blocks `tables` [num_seqs, blocks], each float32 [num_seqs, num_kv_heads, tokens,
    head_dim].
    """
    blocks = quantized_kv.read(cache, tables.long())  # [num_seqs, blocks, 2, num_kv_heads, block_tokens, head_dim]
    keys, values = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).unbind(0)
    return keys, values


def _visible(positions: Tensor, kv_positions: Tensor, spec: AttentionSpec, seen_ends: Tensor | None = None) -> Tensor:
    visible = kv_positions <= positions if seen_ends is None else kv_positions < seen_ends
    if spec.sliding_window is not None:
        visible &= kv_positions > positions - spec.sliding_window
    return visible


def _capped(scores: Tensor, spec: AttentionSpec) -> Tensor:
    return scores if spec.softcap is None else torch.tanh(scores / spec.softcap) * spec.softcap


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over the last dimension. `sinks` are additional scores, which take a part of the probability
    but get no column in the result.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
