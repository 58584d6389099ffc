"""The gated delta rule with a decay for each channel of the keys (Kimi Delta Attention,
https://arxiv.org/abs/2510.26692) for prompts, in chunks of tokens as matrix products.

As for one decay a head (`delta_chunks.py`), a first kernel solves the systems of all chunks at the same time, and a
second one passes the state from chunk to chunk. Here the decay between two tokens is part of each product of their
channels, so that no matrix of decays can be multiplied by one of products. The first kernel takes pairs of tokens level
by level instead: at each level a chunk is cut into blocks, and the later half of each block meets the earlier half.
Both halves are decayed to the border between them, by factors that are never above 1, and their product is one of
matrices. Lengths are read from the device. Twin: `reference.mixers.channel_delta_rule`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.mixers import ChannelDeltaHeads, PackedSequences
from baton_serve.engine.kernels.triton.convolution import padded_seqs
from baton_serve.engine.kernels.triton.delta_chunks import MIN_SIZE, inverse_of, unit_factors
from baton_serve.engine.kernels.triton.delta_step import step_size
from baton_serve.engine.kernels.triton.tiles import padded

CHUNK_TOKENS = 64
LEVELS = 6
"""The chunk has 2 ** LEVELS tokens."""
BLOCK_TOKENS = 16
"""A quarter of the chunk, as `inverse_of` needs."""
PASS_VALUES = 64
"""Values of a program that passes the state on, which is in registers."""
SOLVE_WARPS, PASS_WARPS, PASS_STAGES = 8, 4, 1


def channel_delta_chunks(heads: ChannelDeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute the gated delta rule with a decay for each channel for sequences of any lengths by Triton kernels, chunk
    by chunk; see `MixerKernels.channel_delta_rule`.
    """
    assert heads.qkv.stride(1) == heads.beta.stride(1) == 1 and heads.decay[0].is_contiguous()
    num_tokens, num_heads, value_size = len(heads.qkv), heads.num_heads, heads.value_size
    num_seqs, key_size, dtype = len(sequences.slots), heads.key_size, heads.qkv.dtype
    output = heads.qkv.new_empty(num_tokens, num_heads, value_size)
    new_values, seen_keys = torch.empty_like(output), output.new_empty(num_tokens, num_heads, key_size)
    # Queries decayed since the chunk began, and keys until it ends.
    asking, adding = torch.empty_like(seen_keys), torch.empty_like(seen_keys)
    scores = output.new_empty(num_tokens, num_heads, CHUNK_TOKENS)
    # The host does not know the lengths. Each sequence has at most one chunk that is not full, which bounds the number
    # of chunks; programs beyond the real number end at once.
    num_chunks = num_tokens // CHUNK_TOKENS + num_seqs
    finals = torch.empty((num_chunks, num_heads, key_size), dtype=torch.float32, device=output.device)
    constants = {
        "num_heads": num_heads,
        "key_size": key_size,
        "keys": max(MIN_SIZE, padded(key_size)),
        "value_size": value_size,
        "chunk": CHUNK_TOKENS,
        "precision": "ieee" if dtype == torch.float32 else "tf32",
    }
    _solve_kernel[(num_chunks, num_heads)](
        new_values,
        seen_keys,
        asking,
        adding,
        scores,
        finals,
        heads.qkv,
        heads.beta,
        heads.decay,
        sequences.starts,
        num_seqs,
        key_size**-0.5,
        heads.qkv.stride(0),
        heads.beta.stride(0),
        heads.decay.stride(0),
        values=max(MIN_SIZE, padded(value_size)),
        seqs=padded_seqs(num_seqs),
        levels=LEVELS,
        block=BLOCK_TOKENS,
        # The inverse enlarges errors of rounding. Three products of tf32 are almost as exact as float32.
        exact="ieee" if dtype == torch.float32 else "tf32x3",
        num_warps=SOLVE_WARPS,
        num_stages=1,
        **constants,
    )
    _pass_kernel[(triton.cdiv(value_size, PASS_VALUES), num_heads, num_seqs)](
        output,
        new_values,
        seen_keys,
        asking,
        adding,
        scores,
        finals,
        states,
        sequences.starts,
        sequences.slots,
        states.stride(0),
        values=PASS_VALUES,
        num_warps=PASS_WARPS,
        num_stages=PASS_STAGES,
        **constants,
    )
    return output


@triton.jit
def _decayed_products(
    query, key, total, levels: tl.constexpr, chunk: tl.constexpr, keys: tl.constexpr, precision: tl.constexpr
):
    """Return (products of each key with the earlier keys of its chunk, products of each query with these keys and its
    own key), float32 [chunk, chunk], with zeros above the diagonal. Between two tokens each channel decays by the
    difference of their sums of logarithms `total` [chunk, keys].
    """
    place = tl.arange(0, chunk)
    mixing = tl.zeros([chunk, chunk], tl.float32)
    scores = tl.where(place[:, None] == place[None, :], tl.sum(query * key, 1)[:, None], 0.0)
    for level in tl.static_range(levels):
        mixing, scores = _meet_halves(mixing, scores, query, key, total, 1 << level, chunk, keys, precision)
    return mixing, scores


@triton.jit
def _meet_halves(  # noqa: PLR0913
    mixing,
    scores,
    query,
    key,
    total,
    half: tl.constexpr,
    chunk: tl.constexpr,
    keys: tl.constexpr,
    precision: tl.constexpr,
):
    """Add to both matrices the pairs of tokens in the later and the earlier half of the same block of 2 * half."""
    place, within = tl.arange(0, chunk), tl.arange(0, 2 * half)
    blocks = tl.reshape(total, [chunk // (2 * half), 2 * half, keys])
    border = tl.sum(tl.where((within == half)[None, :, None], blocks, 0.0), 1)
    # Sums of logarithms fall: those of later rows are below the border's, those of earlier rows above it.
    behind = tl.reshape(blocks - border[:, None, :], [chunk, keys])
    is_late = (place % (2 * half) >= half)[:, None]
    factor = tl.exp(tl.where(is_late, behind, -behind))
    late, early = tl.where(is_late, factor, 0.0), tl.where(is_late, 0.0, factor)
    earlier_keys = tl.trans(key * early)
    is_own = place[:, None] // (2 * half) == place[None, :] // (2 * half)
    mixing += tl.where(is_own, tl.dot(key * late, earlier_keys, input_precision=precision), 0.0)
    scores += tl.where(is_own, tl.dot(query * late, earlier_keys, input_precision=precision), 0.0)
    return mixing, scores


@triton.jit(do_not_specialize=["num_seqs"])
def _solve_kernel(  # noqa: PLR0913, PLR0915
    new_values,
    seen_keys,
    asking,
    adding,
    scores,
    finals,
    qkv,
    beta,
    decays,
    starts,
    num_seqs,
    scale,
    qkv_stride,
    beta_stride,
    decay_stride,
    num_heads: tl.constexpr,
    key_size: tl.constexpr,
    keys: tl.constexpr,
    value_size: tl.constexpr,
    values: tl.constexpr,
    chunk: tl.constexpr,
    seqs: tl.constexpr,
    levels: tl.constexpr,
    block: tl.constexpr,
    exact: tl.constexpr,
    precision: tl.constexpr,
):
    ids = tl.arange(0, seqs)
    begins = tl.load(starts + ids, ids < num_seqs, other=0)
    ends = tl.load(starts + 1 + ids, ids < num_seqs, other=0)
    chunks_of = (ends - begins + chunk - 1) // chunk
    if tl.program_id(0) < tl.sum(chunks_of, 0):
        # It marks the sequences that end before this chunk. Their count is the number of this chunk's sequence.
        before = tl.cumsum(chunks_of, 0) <= tl.program_id(0)
        seq = tl.sum(before.to(tl.int32), 0)
        number = tl.program_id(0) - tl.sum(tl.where(before, chunks_of, 0), 0)
        head, place = tl.program_id(1), tl.arange(0, chunk)
        start = tl.load(starts + seq)
        token = (start + number * chunk + place).to(tl.int64)
        live = token < tl.load(starts + seq + 1)
        dtype: tl.constexpr = new_values.dtype.element_ty
        dim, column = tl.arange(0, keys), tl.arange(0, values)
        in_key = live[:, None] & (dim < key_size)[None, :]
        # Rows behind the end decay nothing and update nothing.
        at_decay = decays + token[:, None] * decay_stride + head * key_size + dim[None, :]
        total = tl.cumsum(tl.load(at_decay, in_key, other=0.0).to(tl.float32), 0)
        final = tl.sum(tl.where((place == chunk - 1)[:, None], total, 0.0), 0)
        width: tl.constexpr = num_heads * key_size
        row = qkv + token[:, None] * qkv_stride
        at_query = row + head * key_size + dim[None, :]
        query = tl.load(at_query, in_key, other=0.0).to(tl.float32)
        query *= unit_factors(query, scale)[:, None]
        key = tl.load(at_query + width, in_key, other=0.0).to(tl.float32)
        key *= unit_factors(key, 1.0)[:, None]
        mixing, products = _decayed_products(query, key, total, levels, chunk, keys, precision)
        # `step_size` loads without a mask, so rows behind the end read token 0.
        size = tl.where(live, step_size(beta + tl.where(live, token, 0) * beta_stride + head, dtype), 0.0)
        inverse = inverse_of(mixing * size[:, None], place, chunk, block, exact)
        inverse = (inverse * size[None, :]).to(dtype)
        at = token[:, None] * num_heads + head
        tl.store(scores + at * chunk + place[None, :], products.to(dtype), live[:, None])
        in_value = live[:, None] & (column < value_size)[None, :]
        value = tl.load(row + 2 * width + head * value_size + column[None, :], in_value, other=0.0)
        solved = tl.dot(inverse, value, input_precision=precision)
        tl.store(new_values + at * value_size + column[None, :], solved.to(dtype), in_value)
        # exp(total) is what is left of the state that entered the chunk.
        left = tl.exp(total)
        at_keys = at * key_size + dim[None, :]
        solved = tl.dot(inverse, (key * left).to(dtype), input_precision=precision)
        tl.store(seen_keys + at_keys, solved.to(dtype), in_key)
        tl.store(asking + at_keys, (query * left).to(dtype), in_key)
        tl.store(adding + at_keys, (key * tl.exp(final[None, :] - total)).to(dtype), in_key)
        # No two chunks have the same of these numbers, which the second kernel finds without a search.
        to = ((start // chunk + seq + number).to(tl.int64) * num_heads + head) * key_size + dim
        tl.store(finals + to, tl.exp(final), dim < key_size)


@triton.jit
def _pass_kernel(  # noqa: PLR0913
    output,
    new_values,
    seen_keys,
    asking,
    adding,
    scores,
    finals,
    states,
    starts,
    slots,
    state_stride,
    num_heads: tl.constexpr,
    key_size: tl.constexpr,
    keys: tl.constexpr,
    value_size: tl.constexpr,
    values: tl.constexpr,
    chunk: tl.constexpr,
    precision: tl.constexpr,
):
    seq, head = tl.program_id(2), tl.program_id(1)
    slot = tl.load(slots + seq)
    start, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    if (slot >= 0) & (end > start):
        dim, column = tl.arange(0, keys), tl.program_id(0) * values + tl.arange(0, values)
        place = tl.arange(0, chunk)
        in_key, in_value = dim < key_size, column < value_size
        dtype: tl.constexpr = output.dtype.element_ty
        at_state = states + slot * state_stride + head * (key_size * value_size)
        at_state += dim[:, None] * value_size + column[None, :]
        in_state = in_key[:, None] & in_value[None, :]
        state = tl.load(at_state, in_state, other=0.0)
        # Offsets within a chunk are narrow: wide ones for whole tiles would fill the registers.
        in_keys = place[:, None] * (num_heads * key_size) + dim[None, :]
        in_values = place[:, None] * (num_heads * value_size) + column[None, :]
        in_scores = place[:, None] * (num_heads * chunk) + place[None, :]
        for first in range(start, end, chunk):
            live = first + place < end
            row = (start.to(tl.int64) + (first - start)) * num_heads + head
            rows, mask = live[:, None] & in_key[None, :], live[:, None] & in_value[None, :]
            seen = tl.load(seen_keys + row * key_size + in_keys, rows, other=0.0)
            update = tl.load(new_values + row * value_size + in_values, mask, other=0.0).to(tl.float32)
            # Matrix units read the model's dtype; sums and the state stay float32.
            narrow = state.to(dtype)
            update = (update - tl.dot(seen, narrow, input_precision=precision)).to(dtype)
            query = tl.load(asking + row * key_size + in_keys, rows, other=0.0)
            result = tl.dot(query, narrow, input_precision=precision)
            products = tl.load(scores + row * chunk + in_scores, live[:, None], other=0.0)
            result = tl.dot(products, update, result, input_precision=precision)
            tl.store(output + row * value_size + in_values, result.to(dtype), mask)
            key = tl.load(adding + row * key_size + in_keys, rows, other=0.0)
            number = (start // chunk + seq + (first - start) // chunk).to(tl.int64)
            final = tl.load(finals + (number * num_heads + head) * key_size + dim, in_key, other=0.0)
            state = tl.dot(tl.trans(key), update, state * final[:, None], input_precision=precision)
        tl.store(at_state, state, in_state)
