"""Mamba-1's recurrence, the selective scan (https://arxiv.org/abs/2312.00752), with the states of a few channels in the
registers of a program.

Prompts are cut into chunks, which three kernels compute: what each chunk adds to the state; the state that enters each
chunk; and the outputs of each chunk from that state. So chunks run at the same time, at the price of computing the
states twice. Lengths are read from the device. Twin: `reference.state_space.selective_scan`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.mixers import PackedSequences, ScanChannels
from baton_serve.engine.kernels.triton.convolution import checkpoint_arguments, padded_seqs
from baton_serve.engine.kernels.triton.state_space import softplus
from baton_serve.engine.kernels.triton.tiles import padded

CHUNK_TOKENS = 128
TILE_CHANNELS, TILE_WARPS = 32, 1
PASS_CHANNELS = 64
"""Channels of a program that passes states from chunk to chunk."""


def selective_scan(channels: ScanChannels, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute Mamba-1's recurrence by Triton kernels, as `MixerKernels.selective_scan` specifies. `states` are
    updated.
    """
    x, gate, step, b, c = channels.x, channels.gate, channels.step, channels.b, channels.c
    assert x.stride(1) == gate.stride(1) == step.stride(1) == b.stride(1) == c.stride(1) == 1
    assert states[0].is_contiguous() and channels.log_rate.is_contiguous()
    (num_tokens, count), size, num_seqs = x.shape, b.shape[1], len(sequences.slots)
    is_single = sequences.max_len == 1
    output = torch.empty((num_tokens, count), dtype=x.dtype, device=x.device)
    # The host does not know the lengths. Each sequence has at most one chunk that is not full, which bounds the number
    # of chunks; programs beyond the real number end at once.
    num_chunks = num_seqs if is_single else num_tokens // CHUNK_TOKENS + num_seqs
    entering = torch.empty((0 if is_single else num_chunks, count, size), dtype=torch.float32, device=x.device)
    totals = torch.empty((len(entering), count), dtype=torch.float32, device=x.device)
    places = (sequences.starts, sequences.slots, num_seqs)
    constants = {
        "num_channels": count,
        "state_size": size,
        "size": padded(size),
        "seqs": 1 if is_single else padded_seqs(num_seqs),
        "chunk": CHUNK_TOKENS,
    }

    def scan(*, has_output: bool) -> None:
        _scan_kernel[(triton.cdiv(count, TILE_CHANNELS), num_chunks)](
            output,
            x,
            gate,
            step,
            b,
            c,
            channels.log_rate,
            channels.skip,
            states,
            entering,
            totals,
            *places,
            *checkpoint_arguments(sequences),
            x.stride(0),
            gate.stride(0),
            step.stride(0),
            b.stride(0),
            c.stride(0),
            states.stride(0),
            tile=TILE_CHANNELS,
            is_single=is_single,
            has_output=has_output,
            num_warps=TILE_WARPS,
            **constants,
        )

    if not is_single:
        scan(has_output=False)
        _pass_kernel[(triton.cdiv(count, PASS_CHANNELS), num_seqs)](
            channels.log_rate,
            states,
            entering,
            totals,
            *places,
            states.stride(0),
            tile=PASS_CHANNELS,
            num_warps=4,
            **constants,
        )
    scan(has_output=True)
    return output


@triton.jit(do_not_specialize=["num_seqs", "num_inner"])
def _scan_kernel(  # noqa: C901, PLR0913, PLR0915
    output,
    x,
    gate,
    step,
    b,
    c,
    log_rate,
    skip,
    states,
    entering,
    totals,
    starts,
    slots,
    num_seqs,
    inner_slots,
    inner_tokens,
    num_inner,
    x_stride,
    gate_stride,
    step_stride,
    b_stride,
    c_stride,
    state_stride,
    num_channels: tl.constexpr,
    state_size: tl.constexpr,
    size: tl.constexpr,
    seqs: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
    is_single: tl.constexpr,
    has_output: tl.constexpr,
):
    number = tl.program_id(1)
    if is_single:
        seq, first, end = number, number, number + 1
    else:
        ids = tl.arange(0, seqs)
        begins = tl.load(starts + ids, ids < num_seqs, other=0)
        chunks_of = (tl.load(starts + 1 + ids, ids < num_seqs, other=0) - begins + chunk - 1) // chunk
        # It marks the sequences that end before this chunk. Their count is the number of this chunk's sequence.
        before = tl.cumsum(chunks_of, 0) <= number
        seq = tl.sum(before.to(tl.int32), 0)
        if seq >= num_seqs:
            return
        start = tl.load(starts + seq)
        first = start + (number - tl.sum(tl.where(before, chunks_of, 0), 0)) * chunk
        end = tl.minimum(first + chunk, tl.load(starts + seq + 1))
        # The last token before the inner checkpoint of the sequence, which may be one of this chunk.
        inner_slot = tl.load(inner_slots + seq, seq < num_inner, other=-1)
        inner_last = start + tl.load(inner_tokens + seq, seq < num_inner, other=0) - 1
    slot = tl.load(slots + seq)
    channel, place = tl.program_id(0) * tile + tl.arange(0, tile), tl.arange(0, size)
    in_channels, in_size = channel < num_channels, place < state_size
    mask = in_channels[:, None] & in_size[None, :]
    offset = channel[:, None] * state_size + place[None, :]
    dtype: tl.constexpr = output.dtype.element_ty
    if slot >= 0:
        rate = -tl.exp(tl.load(log_rate + offset, mask, other=0.0).to(tl.float32))
        factor = tl.load(skip + channel, in_channels, other=0.0).to(tl.float32)
        at_entering = entering + number.to(tl.int64) * (num_channels * state_size) + offset
        at_state = states + slot * state_stride + offset
        state, total = tl.zeros([tile, size], tl.float32), tl.zeros([tile], tl.float32)
        if is_single:
            state = tl.load(at_state, mask, other=0.0)
        elif has_output:
            state = tl.load(at_entering, mask, other=0.0)
        for token in range(first, end):
            row = first.to(tl.int64) + (token - first)
            value = tl.load(x + row * x_stride + channel, in_channels, other=0.0).to(tl.float32)
            duration = softplus(tl.load(step + row * step_stride + channel, in_channels, other=0.0).to(tl.float32))
            into = tl.load(b + row * b_stride + place, in_size, other=0.0).to(tl.float32)
            state = state * tl.exp(duration[:, None] * rate) + (duration * value)[:, None] * into[None, :]
            if has_output:
                out = tl.load(c + row * c_stride + place, in_size, other=0.0).to(tl.float32)
                gates = tl.load(gate + row * gate_stride + channel, in_channels, other=0.0).to(tl.float32)
                result = tl.sum(state * out[None, :], 1) + value * factor
                result *= gates / (1.0 + tl.exp(tl.minimum(-gates, 80.0)))
                tl.store(output + row * num_channels + channel, result.to(dtype), in_channels)
                if not is_single:  # noqa: SIM102 -- Triton decides it when it compiles, the other when it runs
                    if (token == inner_last) & (inner_slot >= 0):
                        tl.store(states + inner_slot * state_stride + offset, state, mask)
            else:
                total += duration
        if is_single:
            tl.store(at_state, state, mask)
        elif not has_output:
            tl.store(at_entering, state, mask)
            tl.store(totals + number.to(tl.int64) * num_channels + channel, total, in_channels)
    elif is_single:  # padding: later layers must not read what was in this memory
        tl.store(output + number.to(tl.int64) * num_channels + channel, tl.zeros([tile], dtype), in_channels)


@triton.jit(do_not_specialize=["num_seqs"])
def _pass_kernel(  # noqa: PLR0913
    log_rate,
    states,
    entering,
    totals,
    starts,
    slots,
    num_seqs,
    state_stride,
    num_channels: tl.constexpr,
    state_size: tl.constexpr,
    size: tl.constexpr,
    seqs: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
):
    """Replace what each chunk of a sequence adds to the state by the state that enters it, and store the last state."""
    seq = tl.program_id(1)
    slot, ids = tl.load(slots + seq), tl.arange(0, seqs)
    begins = tl.load(starts + ids, ids < num_seqs, other=0)
    chunks_of = (tl.load(starts + 1 + ids, ids < num_seqs, other=0) - begins + chunk - 1) // chunk
    first = tl.sum(tl.where(ids < seq, chunks_of, 0), 0)
    last = first + tl.sum(tl.where(ids == seq, chunks_of, 0), 0)
    channel, place = tl.program_id(0) * tile + tl.arange(0, tile), tl.arange(0, size)
    in_channels = channel < num_channels
    mask = in_channels[:, None] & (place < state_size)[None, :]
    offset = channel[:, None] * state_size + place[None, :]
    if (slot >= 0) & (last > first):
        rate = -tl.exp(tl.load(log_rate + offset, mask, other=0.0).to(tl.float32))
        at_state = states + slot * state_stride + offset
        state = tl.load(at_state, mask, other=0.0)
        for number in range(first, last):
            row = first.to(tl.int64) + (number - first)
            at = entering + row * (num_channels * state_size) + offset
            total = tl.load(totals + row * num_channels + channel, in_channels, other=0.0)
            added = tl.load(at, mask, other=0.0)
            tl.store(at, state, mask)
            state = state * tl.exp(total[:, None] * rate) + added
        tl.store(at_state, state, mask)
