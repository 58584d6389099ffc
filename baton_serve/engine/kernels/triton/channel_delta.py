"""The gated delta rule with a decay for each channel of the keys (Kimi Delta Attention,
https://arxiv.org/abs/2510.26692) for prompts, in chunks of tokens as matrix products.

As for one decay a head (`delta_chunks.py`), the systems of all chunks are solved at the same time, and then the state
is passed from chunk to chunk. Here the decay between two tokens is part of each product of their channels, so that no
matrix of decays can be multiplied by one of products. The pairs of tokens have a kernel of their own instead, whose
programs compute a block of rows each. Earlier blocks are decayed to the first token of the block, and so are its own
rows, by factors that are never above 1: then products of matrices remain. They also contain the pairs within the block,
by reciprocals of decays, unless a channel decays too much in it: then each of these pairs is decayed by itself. Lengths
are read from the device. Twin: `reference.mixers.channel_delta_rule`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.mixers import ChannelDeltaHeads, PackedSequences
from baton_serve.engine.kernels.triton.convolution import checkpoint_arguments, padded_seqs
from baton_serve.engine.kernels.triton.delta_chunks import MIN_SIZE, inverse_of, unit_factors
from baton_serve.engine.kernels.triton.delta_step import step_size
from baton_serve.engine.kernels.triton.tiles import chunk_stages, num_processors, padded

CHUNK_TOKENS = 64
BLOCK_TOKENS = 16
"""A quarter of the chunk, as `inverse_of` needs."""
PASS_VALUES = 64
"""Values of a program that passes the state on, which is in registers."""
GENTLE = tl.constexpr(80.0)
"""Logarithm of the largest decay within a block whose reciprocal float32 holds."""
SUM_WARPS, PAIR_WARPS, SOLVE_WARPS, PASS_WARPS = 4, 4, 4, 4


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
    mixing, totals = (torch.empty_like(like, dtype=torch.float32) for like in (scores, seen_keys))
    # The factors by which queries and keys get their lengths.
    units = totals.new_empty(2, num_tokens, num_heads)
    # The host does not know the lengths. Each sequence has at most one chunk that is not full, which bounds the number
    # of chunks; programs beyond the real number end at once.
    num_chunks = num_tokens // CHUNK_TOKENS + num_seqs
    finals = totals.new_empty(num_chunks, num_heads, key_size)
    keys = max(MIN_SIZE, padded(key_size))
    places = (sequences.starts, num_seqs, num_tokens)
    shapes = {"num_heads": num_heads, "key_size": key_size, "keys": keys, "chunk": CHUNK_TOKENS}
    search = {"seqs": padded_seqs(num_seqs)}
    constants = {**shapes, "precision": "ieee" if dtype == torch.float32 else "tf32"}
    _sum_kernel[(num_chunks, num_heads)](
        totals,
        units,
        finals,
        asking,
        adding,
        heads.qkv,
        heads.decay,
        *places,
        key_size**-0.5,
        heads.qkv.stride(0),
        heads.decay.stride(0),
        num_warps=SUM_WARPS,
        **shapes,
        **search,
    )
    _pairs_kernel[(num_chunks * (CHUNK_TOKENS // BLOCK_TOKENS), num_heads)](
        mixing,
        scores,
        totals,
        units,
        heads.qkv,
        *places,
        heads.qkv.stride(0),
        block=BLOCK_TOKENS,
        num_warps=PAIR_WARPS,
        num_stages=1,
        **constants,
        **search,
    )
    _solve_kernel[(num_chunks, num_heads)](
        new_values,
        seen_keys,
        mixing,
        totals,
        units,
        heads.qkv,
        heads.beta,
        *places,
        heads.qkv.stride(0),
        heads.beta.stride(0),
        value_size=value_size,
        values=max(MIN_SIZE, padded(value_size)),
        block=BLOCK_TOKENS,
        # The inverse enlarges errors of rounding. Three products of tf32 are almost as exact as float32.
        exact="ieee" if dtype == torch.float32 else "tf32x3",
        num_warps=SOLVE_WARPS,
        num_stages=1,
        **constants,
        **search,
    )
    parts = triton.cdiv(value_size, PASS_VALUES)
    _pass_kernel[(parts, num_heads, num_seqs)](
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
        *checkpoint_arguments(sequences),
        states.stride(0),
        value_size=value_size,
        values=PASS_VALUES,
        num_warps=PASS_WARPS,
        num_stages=_pass_stages(output, parts * num_heads * num_seqs),
        **constants,
    )
    return output


def _pass_stages(output: Tensor, num_programs: int) -> int:
    """Return the stages of the last kernel. Chunks are loaded ahead only if each program has a processor of its own:
    otherwise the memory for that keeps others from running beside it.
    """
    is_alone = num_programs <= num_processors(output.device)
    return chunk_stages(output.device, output.element_size()) if is_alone else 1


@triton.jit
def _chunk_of(number, starts, num_seqs, chunk: tl.constexpr, seqs: tl.constexpr):
    """Return (the sequence of chunk `number` of a step, the number of the chunk in its sequence, its first token, the
    end of the sequence). Behind the last chunk the sequence is `num_seqs`.
    """
    ids = tl.arange(0, seqs)
    begins = tl.load(starts + ids, ids < num_seqs, other=0)
    chunks_of = (tl.load(starts + 1 + ids, ids < num_seqs, other=0) - begins + chunk - 1) // chunk
    # It marks the sequences that end before this chunk. Their count is the number of this chunk's sequence.
    before = tl.cumsum(chunks_of, 0) <= number
    seq = tl.minimum(tl.sum(before.to(tl.int32), 0), num_seqs)
    within = number - tl.sum(tl.where(before, chunks_of, 0), 0)
    last = tl.minimum(seq, num_seqs - 1)
    return seq, within, tl.load(starts + last) + within * chunk, tl.load(starts + last + 1)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _sum_kernel(  # noqa: PLR0913
    totals,
    units,
    finals,
    asking,
    adding,
    qkv,
    decays,
    starts,
    num_seqs,
    num_tokens,
    scale,
    qkv_stride,
    decay_stride,
    num_heads: tl.constexpr,
    key_size: tl.constexpr,
    keys: tl.constexpr,
    chunk: tl.constexpr,
    seqs: tl.constexpr,
):
    """Sum up the logarithms of the decays of a chunk's tokens, and store queries and keys with their decays."""
    seq, number, first, end = _chunk_of(tl.program_id(0), starts, num_seqs, chunk, seqs)
    if seq < num_seqs:
        head, dim = tl.program_id(1), tl.arange(0, keys)
        place = tl.arange(0, chunk)
        token = (first + place).to(tl.int64)
        live = first + place < end
        dtype: tl.constexpr = asking.dtype.element_ty
        in_key = live[:, None] & (dim < key_size)[None, :]
        # Rows behind the end decay nothing.
        at_decay = decays + token[:, None] * decay_stride + head * key_size + dim[None, :]
        total = tl.cumsum(tl.load(at_decay, in_key, other=0.0).to(tl.float32), 0)
        final = tl.sum(tl.where((place == chunk - 1)[:, None], total, 0.0), 0)
        at = (token * num_heads + head)[:, None] * key_size + dim[None, :]
        tl.store(totals + at, total, in_key)
        row = qkv + token[:, None] * qkv_stride + head * key_size + dim[None, :]
        query = tl.load(row, in_key, other=0.0).to(tl.float32)
        unit = unit_factors(query, scale)
        at_unit = units + token * num_heads + head
        tl.store(at_unit, unit, live)
        # exp(total) is what is left of the state that entered the chunk.
        tl.store(asking + at, (query * unit[:, None] * tl.exp(total)).to(dtype), in_key)
        key = tl.load(row + num_heads * key_size, in_key, other=0.0).to(tl.float32)
        unit = unit_factors(key, 1.0)
        tl.store(at_unit + num_tokens.to(tl.int64) * num_heads, unit, live)
        tl.store(adding + at, (key * unit[:, None] * tl.exp(final[None, :] - total)).to(dtype), in_key)
        # No two chunks have the same of these numbers, which the last kernel finds without a search.
        to = (((first - number * chunk) // chunk + seq + number).to(tl.int64) * num_heads + head) * key_size + dim
        tl.store(finals + to, tl.exp(final), dim < key_size)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _pairs_kernel(  # noqa: PLR0913, PLR0915
    mixing,
    scores,
    totals,
    units,
    qkv,
    starts,
    num_seqs,
    num_tokens,
    qkv_stride,
    num_heads: tl.constexpr,
    key_size: tl.constexpr,
    keys: tl.constexpr,
    chunk: tl.constexpr,
    seqs: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute the products of each key with the earlier keys of its chunk, and of each query with these and its own
    key, for a block of rows. Above the diagonal they are zero.
    """
    blocks: tl.constexpr = chunk // block
    seq, _, first, end = _chunk_of(tl.program_id(0) // blocks, starts, num_seqs, chunk, seqs)
    skipped = tl.program_id(0) % blocks * block  # tokens of the chunk before this block
    if (seq < num_seqs) & (first + skipped < end):
        head, dim = tl.program_id(1), tl.arange(0, keys)
        place, own = tl.arange(0, chunk), tl.arange(0, block)
        dtype: tl.constexpr = scores.dtype.element_ty
        live, in_key = first + skipped + own < end, dim < key_size
        begin = first.to(tl.int64)
        in_rows = live[:, None] & in_key[None, :]
        at = ((begin + skipped + own) * num_heads + head)[:, None] * key_size + dim[None, :]
        total = tl.load(totals + at, in_rows, other=0.0)
        at_query = qkv + (begin + skipped + own)[:, None] * qkv_stride + head * key_size + dim[None, :]
        query = tl.load(at_query, in_rows, other=0.0).to(tl.float32)
        key = tl.load(at_query + num_heads * key_size, in_rows, other=0.0).to(tl.float32)
        at_unit = units + (begin + skipped + own) * num_heads + head
        query *= tl.load(at_unit, live, other=0.0)[:, None]
        key_units = units + num_tokens.to(tl.int64) * num_heads + head
        key *= tl.load(key_units + (begin + skipped + own) * num_heads, live, other=0.0)[:, None]
        mixed = tl.zeros([block, chunk], tl.float32)
        asked = tl.zeros([block, chunk], tl.float32)
        border = tl.load(totals + ((begin + skipped) * num_heads + head) * key_size + dim, in_key, other=0.0)
        since = tl.where(in_rows, total - border[None, :], 0.0)
        is_gentle = tl.min(tl.min(since, 1), 0) > -GENTLE
        if (skipped > 0) | is_gentle:
            columns = tl.where(is_gentle, tl.minimum(skipped + block, end - first), skipped)
            is_seen = (place < columns)[:, None] & in_key[None, :]
            at_before = totals + ((begin + place) * num_heads + head)[:, None] * key_size + dim[None, :]
            # Sums of logarithms fall, so both factors are at most 1, except for the block's own columns.
            before = tl.load(at_before, is_seen, other=0.0)
            left = tl.exp(tl.where(is_seen, border[None, :] - before, 0.0))
            at_keys = qkv + (begin + place)[:, None] * qkv_stride + (num_heads + head) * key_size + dim[None, :]
            unit = tl.load(key_units + (begin + place) * num_heads, place < columns, other=0.0)
            earlier = tl.trans(tl.load(at_keys, is_seen, other=0.0).to(tl.float32) * unit[:, None] * left)
            factor = tl.exp(since)
            mixed = tl.dot(key * factor, earlier, input_precision=precision)
            asked = tl.dot(query * factor, earlier, input_precision=precision)
            # Above the diagonal the factors of a product are together more than 1.
            mixed = tl.where(place[None, :] < (skipped + own)[:, None], mixed, 0.0)
            asked = tl.where(place[None, :] <= (skipped + own)[:, None], asked, 0.0)
        if not is_gentle:
            for column in range(tl.minimum(block, end - first - skipped)):
                one = begin + skipped + column
                there = tl.load(totals + (one * num_heads + head) * key_size + dim, in_key, other=0.0)
                at_key = qkv + one * qkv_stride + (num_heads + head) * key_size + dim
                other = tl.load(at_key, in_key, other=0.0).to(tl.float32) * tl.load(key_units + one * num_heads)
                # Rows above the diagonal, and behind the end, would grow.
                is_later = (live & (own >= column))[:, None]
                decayed = tl.exp(tl.where(is_later, total - there[None, :], 0.0)) * other[None, :]
                is_column = (place == skipped + column)[None, :]
                mixed += tl.where(is_column & (own > column)[:, None], tl.sum(key * decayed, 1)[:, None], 0.0)
                asked += tl.where(is_column & (own >= column)[:, None], tl.sum(query * decayed, 1)[:, None], 0.0)
        to = ((begin + skipped + own) * num_heads + head)[:, None] * chunk + place[None, :]
        tl.store(mixing + to, mixed, live[:, None])
        tl.store(scores + to, asked.to(dtype), live[:, None])


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _solve_kernel(  # noqa: PLR0913
    new_values,
    seen_keys,
    mixing,
    totals,
    units,
    qkv,
    beta,
    starts,
    num_seqs,
    num_tokens,
    qkv_stride,
    beta_stride,
    num_heads: tl.constexpr,
    key_size: tl.constexpr,
    keys: tl.constexpr,
    value_size: tl.constexpr,
    values: tl.constexpr,
    chunk: tl.constexpr,
    seqs: tl.constexpr,
    block: tl.constexpr,
    exact: tl.constexpr,
    precision: tl.constexpr,
):
    seq, _, first, end = _chunk_of(tl.program_id(0), starts, num_seqs, chunk, seqs)
    if seq < num_seqs:
        head, place = tl.program_id(1), tl.arange(0, chunk)
        token = (first + place).to(tl.int64)
        live = first + place < end
        dtype: tl.constexpr = new_values.dtype.element_ty
        at = (token * num_heads + head)[:, None]
        products = tl.load(mixing + at * chunk + place[None, :], live[:, None], other=0.0)
        # `step_size` loads without a mask, so rows behind the end read token 0. They update nothing.
        size = tl.where(live, step_size(beta + tl.where(live, token, 0) * beta_stride + head, dtype), 0.0)
        inverse = inverse_of(products * size[:, None], chunk, block, exact)
        inverse = (inverse * size[None, :]).to(dtype)
        dim, column = tl.arange(0, keys), tl.arange(0, values)
        width: tl.constexpr = num_heads * key_size
        row = qkv + token[:, None] * qkv_stride
        in_value = live[:, None] & (column < value_size)[None, :]
        value = tl.load(row + 2 * width + head * value_size + column[None, :], in_value, other=0.0)
        solved = tl.dot(inverse, value, input_precision=precision)
        tl.store(new_values + at * value_size + column[None, :], solved.to(dtype), in_value)
        in_key = live[:, None] & (dim < key_size)[None, :]
        key = tl.load(row + width + head * key_size + dim[None, :], in_key, other=0.0).to(tl.float32)
        unit = tl.load(units + (num_tokens + token) * num_heads + head, live, other=0.0)
        total = tl.load(totals + at * key_size + dim[None, :], in_key, other=0.0)
        decayed = (key * unit[:, None] * tl.exp(total)).to(dtype)
        solved = tl.dot(inverse, decayed, input_precision=precision)
        tl.store(seen_keys + at * key_size + dim[None, :], solved.to(dtype), in_key)


@triton.jit(do_not_specialize=["num_inner"])
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
    inner_slots,
    inner_tokens,
    num_inner,
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
    # The chunk that begins at the inner checkpoint, which lies at none without one.
    to = tl.load(inner_slots + seq, seq < num_inner, other=-1)
    inner = tl.where(to >= 0, start + tl.load(inner_tokens + seq, seq < num_inner, other=0), -1)
    if (slot >= 0) & (end > start):
        dim, column = tl.arange(0, keys), tl.program_id(0) * values + tl.arange(0, values)
        place = tl.arange(0, chunk)
        in_key, in_value = dim < key_size, column < value_size
        dtype: tl.constexpr = output.dtype.element_ty
        at_state = states + head * (key_size * value_size)
        at_state += dim[:, None] * value_size + column[None, :]
        in_state = in_key[:, None] & in_value[None, :]
        state = tl.load(at_state + slot * state_stride, in_state, other=0.0)
        # Offsets within a chunk are narrow: wide ones for whole tiles would fill the registers.
        in_keys = place[:, None] * (num_heads * key_size) + dim[None, :]
        in_values = place[:, None] * (num_heads * value_size) + column[None, :]
        in_scores = place[:, None] * (num_heads * chunk) + place[None, :]
        for first in range(start, end, chunk):
            # One loop: two, before and behind the checkpoint, gave wrong products on Hopper (Triton 3.6).
            if first == inner:
                tl.store(at_state + to * state_stride, state, in_state)
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
        tl.store(at_state + slot * state_stride, state, in_state)
