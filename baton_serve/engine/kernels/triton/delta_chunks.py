"""The gated delta rule for prompts, in chunks of tokens as matrix products (https://arxiv.org/abs/2412.06464, 3.3).

Within a chunk the updates of the state depend on each other through a triangular system. The first kernel solves it for
all chunks at the same time: it turns values and keys of a chunk into those of the whole update. The second passes the
state from chunk to chunk, for each sequence and head, with the values divided over programs. Lengths are read from the
device. Twin: `reference.mixers.delta_rule`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.mixers import DeltaHeads, PackedSequences
from baton_serve.engine.kernels.triton.convolution import checkpoint_arguments, padded_seqs
from baton_serve.engine.kernels.triton.delta_step import gates
from baton_serve.engine.kernels.triton.tiles import padded

CHUNK_TOKENS = 64
BLOCK_TOKENS = 16
"""Tokens of a block on the diagonal of a chunk's system: a quarter of the chunk, as `inverse_of` needs."""
MIN_SIZE = 64
"""Smallest padded size of keys and values. Programs with 32 values left their memory (H100, Triton 3.6)."""
PASS_VALUES = 64
"""Values of a program that passes the state on, which is in registers."""
SOLVE_WARPS, PASS_WARPS, PASS_STAGES = 4, 4, 1


def delta_chunks(heads: DeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute the gated delta rule for sequences of any lengths by Triton kernels, chunk by chunk; see
    `MixerKernels.delta_rule`.
    """
    assert heads.qkv.stride(1) == 1 and heads.beta.stride(1) == heads.step.stride(1) == 1
    num_tokens, num_heads, value_size = len(heads.qkv), heads.num_heads, heads.value_size
    num_seqs, device, dtype = len(sequences.slots), heads.qkv.device, heads.qkv.dtype
    output = torch.empty((num_tokens, num_heads, value_size), dtype=dtype, device=device)
    totals = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=device)
    new_values, seen_keys = torch.empty_like(output), output.new_empty(num_tokens, num_heads, heads.key_size)
    # How far each token attends to the tokens of its chunk.
    scores = output.new_empty(num_tokens, num_heads, CHUNK_TOKENS)
    # The factors of a token's query and of its key where the state enters and leaves its chunk.
    factors = torch.empty((2, num_tokens, num_heads), dtype=torch.float32, device=device)
    constants = {
        "num_heads": num_heads,
        "group": num_heads // heads.num_key_heads,
        "key_size": heads.key_size,
        "keys": max(MIN_SIZE, padded(heads.key_size)),
        "value_size": value_size,
        "chunk": CHUNK_TOKENS,
        "precision": "ieee" if dtype == torch.float32 else "tf32",
    }
    # The host does not know the lengths. Each sequence has at most one chunk that is not full, which bounds the number
    # of chunks; programs beyond the real number end at once.
    _solve_kernel[(num_tokens // CHUNK_TOKENS + num_seqs, num_heads)](
        new_values,
        seen_keys,
        totals,
        scores,
        factors,
        heads.qkv,
        heads.beta,
        heads.step,
        heads.log_rate,
        heads.step_bias,
        sequences.starts,
        num_seqs,
        num_tokens,
        heads.key_size**-0.5,
        heads.qkv.stride(0),
        heads.beta.stride(0),
        heads.step.stride(0),
        values=max(MIN_SIZE, padded(value_size)),
        seqs=padded_seqs(num_seqs),
        block=BLOCK_TOKENS,
        # The inverse enlarges errors of rounding. Three products of tf32 are almost as exact as float32.
        exact="ieee" if dtype == torch.float32 else "tf32x3",
        num_warps=SOLVE_WARPS,
        **constants,
    )
    values = PASS_VALUES
    _pass_kernel[(triton.cdiv(value_size, values), num_heads, num_seqs)](
        output,
        new_values,
        seen_keys,
        totals,
        scores,
        factors,
        heads.qkv,
        states,
        sequences.starts,
        sequences.slots,
        *checkpoint_arguments(sequences),
        num_tokens,
        heads.qkv.stride(0),
        states.stride(0),
        values=values,
        num_warps=PASS_WARPS,
        num_stages=PASS_STAGES,
        **constants,
    )
    return output


@triton.jit
def unit_factors(rows, scale):
    """Return the factor of each row that scales it to a vector of length `scale`, float32."""
    wide = rows.to(tl.float32)
    # The epsilon is that of transformers' `l2norm`.
    return tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * scale


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _solve_kernel(  # noqa: PLR0913, PLR0915
    new_values,
    seen_keys,
    totals,
    scores,
    factors,
    qkv,
    beta,
    step,
    log_rate,
    step_bias,
    starts,
    num_seqs,
    num_tokens,
    scale,
    qkv_stride,
    beta_stride,
    step_stride,
    num_heads: tl.constexpr,
    group: tl.constexpr,
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
        token = (tl.load(starts + seq) + number * chunk + place).to(tl.int64)
        live = token < tl.load(starts + seq + 1)
        dtype: tl.constexpr = new_values.dtype.element_ty
        # `gates` loads without a mask, so rows behind the end read token 0.
        at_gates = tl.where(live, token, 0)
        decay, size = gates(
            beta + at_gates * beta_stride, step + at_gates * step_stride, log_rate, step_bias, head, dtype
        )
        # Rows behind the end decay nothing and update nothing.
        total = tl.cumsum(tl.where(live, decay, 0.0), 0)
        size = tl.where(live, size, 0.0)
        tl.store(totals + token * num_heads + head, total, live)
        dim, column = tl.arange(0, keys), tl.arange(0, values)
        width: tl.constexpr = num_heads // group * key_size
        row = qkv + token[:, None] * qkv_stride
        in_key = live[:, None] & (dim < key_size)[None, :]
        at_query = row + head // group * key_size + dim[None, :]
        # Matrix units read queries, keys and values as they are. Their factors scale rows or columns of results.
        key = tl.load(at_query + width, in_key, other=0.0)
        unit = unit_factors(key, 1.0)
        mixing = tl.dot(key, tl.trans(key), input_precision=precision)
        below = place[:, None] > place[None, :]
        # Above the diagonal the exponent is positive and might overflow.
        between = tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0))
        mixing = tl.where(below, mixing * between * (size * unit)[:, None] * unit[None, :], 0.0)
        query = tl.load(at_query, in_key, other=0.0)
        query_unit = unit_factors(query, scale)
        attended = tl.dot(query, tl.trans(key), input_precision=precision)
        attended = tl.where(
            place[:, None] >= place[None, :], attended * between * query_unit[:, None] * unit[None, :], 0.0
        )
        at = token[:, None] * num_heads + head
        tl.store(scores + at * chunk + place[None, :], attended.to(dtype), live[:, None])
        at_factor = factors + token * num_heads + head
        tl.store(at_factor, query_unit * tl.exp(total), live)
        # A token's update decays until the end of the chunk.
        final = tl.sum(tl.where(live, decay, 0.0), 0)
        tl.store(at_factor + num_tokens.to(tl.int64) * num_heads, tl.exp(final - total) * unit, live)
        inverse = inverse_of(mixing, chunk, block, exact)
        in_value = live[:, None] & (column < value_size)[None, :]
        value = tl.load(row + 2 * width + head * value_size + column[None, :], in_value, other=0.0)
        solved = tl.dot((inverse * size[None, :]).to(dtype), value, input_precision=precision)
        tl.store(new_values + at * value_size + column[None, :], solved.to(dtype), in_value)
        # `total` sums up logarithms since the chunk began: exp(total) is what is left of the state that entered it.
        factor = size * unit * tl.exp(total)
        solved = tl.dot((inverse * factor[None, :]).to(dtype), key, input_precision=precision)
        tl.store(seen_keys + at * key_size + dim[None, :], solved.to(dtype), in_key)


@triton.jit
def inverse_of(mixing, chunk: tl.constexpr, block: tl.constexpr, exact: tl.constexpr):
    """Return the inverse of the matrix 1 + mixing, in which `mixing` has numbers below the diagonal only.

    The blocks on the diagonal are inverted all at the same time. Two neighbours and the block below the first are then
    inverted as one, twice.
    """
    count: tl.constexpr = chunk // block
    number, row = tl.arange(0, count), tl.arange(0, block)
    # As [block, row, block, column], the blocks on the diagonal are those with two equal numbers.
    is_own = (number[:, None] == number[None, :])[:, None, :, None]
    found = -tl.sum(tl.where(is_own, tl.reshape(mixing, [count, block, count, block]), 0.0), 2)
    one = tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :]
    if exact == "ieee":
        # Row i is final once it has been multiplied by the rows above it, which are.
        for at in range(1, block):
            is_row = (row == at)[None, :, None]
            final = tl.sum(tl.where(is_row, found, 0.0), 1)
            final += tl.sum(final[:, :, None] * found, 1)
            found = tl.where(is_row, final[:, None, :], found)
        found += one
    else:
        # The sixteenth power of a block is zero: 1 / (1 - x) = (1 + x) (1 + x^2) (1 + x^4) (1 + x^8). Powers enlarge
        # errors of rounding, which float32 would show and 16 bits do not.
        square = tl.dot(found, found, input_precision=exact)
        fourth = tl.dot(square, square, input_precision=exact)
        eighth = tl.dot(fourth, fourth, input_precision=exact)
        low = tl.dot(one + found, one + square, input_precision=exact)
        high = tl.dot(one + fourth, one + eighth, input_precision=exact)
        found = tl.dot(low, high, input_precision=exact)
    found = _doubled(found, mixing, count, block, exact)
    return tl.reshape(_doubled(found, mixing, count // 2, 2 * block, exact), [chunk, chunk])


@triton.jit
def _doubled(found, mixing, count: tl.constexpr, block: tl.constexpr, exact: tl.constexpr):
    """Return the inverses of the blocks of twice the size on the diagonal of 1 + mixing, [count / 2, 2 * block, 2 *
    block]. `found` has the inverses of the `count` blocks of size `block`.
    """
    half: tl.constexpr = count // 2
    number = tl.arange(0, count)
    is_left = (number[:, None] == number[None, :] + 1)[:, None, :, None]
    left = tl.sum(tl.where(is_left, tl.reshape(mixing, [count, block, count, block]), 0.0), 2)
    first, second = _pairs(found, half, block)
    _, left = _pairs(left, half, block)
    # The inverse of [[a, 0], [c, b]] is [[1 / a, 0], [-1 / b * c * 1 / a, 1 / b]].
    if half == 1:
        corner = tl.dot(tl.reshape(second, [block, block]), tl.reshape(left, [block, block]), input_precision=exact)
        corner = tl.dot(corner, tl.reshape(first, [block, block]), input_precision=exact)
        corner = tl.reshape(corner, [half, block, block])
    else:
        corner = tl.dot(tl.dot(second, left, input_precision=exact), first, input_precision=exact)
    above = tl.reshape(tl.permute(tl.join(first, tl.zeros_like(first)), (0, 1, 3, 2)), [half, block, 2 * block])
    below = tl.reshape(tl.permute(tl.join(-corner, second), (0, 1, 3, 2)), [half, block, 2 * block])
    return tl.reshape(tl.permute(tl.join(above, below), (0, 3, 1, 2)), [half, 2 * block, 2 * block])


@triton.jit
def _pairs(blocks, half: tl.constexpr, block: tl.constexpr):
    """Return the blocks with even and those with odd numbers, both [half, block, block]."""
    return tl.split(tl.permute(tl.reshape(blocks, [half, 2, block, block]), (0, 2, 3, 1)))


@triton.jit(do_not_specialize=["num_tokens", "num_inner"])
def _pass_kernel(  # noqa: PLR0913, PLR0915
    output,
    new_values,
    seen_keys,
    totals,
    scores,
    factors,
    qkv,
    states,
    starts,
    slots,
    inner_slots,
    inner_tokens,
    num_inner,
    num_tokens,
    qkv_stride,
    state_stride,
    num_heads: tl.constexpr,
    group: tl.constexpr,
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
        width: tl.constexpr = num_heads // group * key_size
        at_state = states + head * (key_size * value_size)
        at_state += dim[:, None] * value_size + column[None, :]
        in_state = in_key[:, None] & in_value[None, :]
        state = tl.load(at_state + slot * state_stride, in_state, other=0.0)
        # Offsets within a chunk are narrow: wide ones for whole tiles would fill the registers.
        in_row = place[:, None] * qkv_stride + dim[None, :]
        in_keys = place[:, None] * (num_heads * key_size) + dim[None, :]
        in_values = place[:, None] * (num_heads * value_size) + column[None, :]
        in_scores = place[:, None] * (num_heads * chunk) + place[None, :]
        for first in range(start, end, chunk):
            # One loop: two, before and behind the checkpoint, gave wrong products on Hopper (Triton 3.6).
            if first == inner:
                tl.store(at_state + to * state_stride, state, in_state)
            live = first + place < end
            row, last = start.to(tl.int64) + (first - start), (tl.minimum(first + chunk, end) - 1).to(tl.int64)
            final = tl.load(totals + last * num_heads + head)
            rows = live[:, None] & in_key[None, :]
            at_query = qkv + row * qkv_stride + head // group * key_size
            query = tl.load(at_query + in_row, rows, other=0.0)
            key = tl.load(at_query + width + in_row, rows, other=0.0)
            at_factor = factors + row * num_heads + head + place * num_heads
            entering = tl.load(at_factor, live, other=0.0)
            leaving = tl.load(at_factor + num_tokens.to(tl.int64) * num_heads, live, other=0.0)
            at_scores = scores + (row * num_heads + head) * chunk
            score = tl.load(at_scores + in_scores, live[:, None], other=0.0)
            # The keys of the update, times the state, are the part of earlier chunks in its values.
            seen = tl.load(seen_keys + (row * num_heads + head) * key_size + in_keys, rows, other=0.0)
            mask = live[:, None] & in_value[None, :]
            from_row = (row * num_heads + head) * value_size
            update = tl.load(new_values + from_row + in_values, mask, other=0.0).to(tl.float32)
            # Matrix units read the model's dtype; sums, decays and the state stay float32.
            narrow = state.to(dtype)
            update -= tl.dot(seen, narrow, input_precision=precision)
            result = tl.dot(query, narrow, input_precision=precision) * entering[:, None]
            result = tl.dot(score, update.to(dtype), result, input_precision=precision)
            tl.store(output + from_row + in_values, result.to(dtype), mask)
            update = (update * leaving[:, None]).to(dtype)
            state = tl.dot(tl.trans(key), update, state * tl.exp(final), input_precision=precision)
        tl.store(at_state + slot * state_stride, state, in_state)
