"""The short causal convolutions of recurrent layers, with the last inputs of each sequence in its slot.

Twin: `reference.mixers.convolve`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.mixers import PackedSequences
from baton_serve.engine.kernels.triton.overlap import overlapping, start_early
from baton_serve.engine.kernels.triton.tiles import padded

TILE_TOKENS, TILE_CHANNELS = 32, 128
"""Tile of steps with prompts."""
STEP_CHANNELS = 256
"""Channels of a program in steps of one token for each sequence: few, so that a single sequence occupies many
processors."""
MAX_PADDED_SEQS = 256
"""Sequences for which the kernels are compiled once; more compile them again for each power of two."""


def padded_seqs(num_seqs: int) -> int:
    """Return `num_seqs` rounded up to one of few sizes, for which the kernels that search the sequence of a token are
    compiled.
    """
    return 16 if num_seqs <= 16 else max(MAX_PADDED_SEQS, padded(num_seqs))


def checkpoint_arguments(sequences: PackedSequences) -> tuple[Tensor, Tensor, int]:
    """Return the arguments of a kernel that stores inner checkpoints: their slots, after how many tokens they lie, and
    how many sequences may have one.
    """
    inner, count = sequences.checkpoints, len(sequences.slots)
    # Triton needs pointers even if the kernel reads nothing. With a flag it would compile each kernel twice.
    return (sequences.slots, sequences.starts, 0) if inner is None else (inner.slots, inner.tokens, count)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, sequences: PackedSequences, *, has_silu: bool
) -> Tensor:
    """Return the causal convolution of each channel, and update `states`, by a Triton kernel; see
    `MixerKernels.convolve`.
    """
    assert x.stride(1) == 1 and states.stride(2) == 1 and states.stride(1) == states.shape[2]
    (num_tokens, channels), taps = x.shape, weight.shape[1]
    output = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    # Triton needs a pointer to a bias even if the kernel does not read it.
    tensors = (output, x, weight.contiguous(), weight if bias is None else bias, states)
    constants = {"channels": channels, "taps": taps, "has_bias": bias is not None, "has_silu": has_silu}
    if sequences.max_len == 1:
        columns = min(STEP_CHANNELS, padded(channels))
        _convolve_step_kernel[(num_tokens, triton.cdiv(channels, columns))](
            *tensors,
            sequences.slots,
            x.stride(0),
            states.stride(0),
            **constants,
            padded_taps=padded(taps),
            columns=columns,
            num_warps=max(1, min(4, columns // 64)),
            **overlapping(x.device),
        )
        return output
    num_seqs, columns = sequences.slots.shape[0], min(TILE_CHANNELS, padded(channels))
    # No tile has tokens of two sequences.
    _convolve_kernel[(num_tokens // TILE_TOKENS + num_seqs, triton.cdiv(channels, columns))](
        *tensors,
        sequences.starts,
        sequences.slots,
        num_seqs,
        x.stride(0),
        states.stride(0),
        **constants,
        tokens=TILE_TOKENS,
        columns=columns,
        seqs=padded_seqs(num_seqs),
        num_warps=max(1, min(4, TILE_TOKENS * columns // 64)),
    )
    # In a launch of its own: all programs above have read the old inputs by then.
    _keep_kernel[(num_seqs, triton.cdiv(channels, columns))](
        x,
        states,
        sequences.starts,
        sequences.slots,
        *checkpoint_arguments(sequences),
        x.stride(0),
        states.stride(0),
        channels=channels,
        taps=taps,
        columns=columns,
        num_warps=2,
    )
    return output


@triton.jit
def _convolve_step_kernel(  # noqa: PLR0913
    output,
    x,
    weight,
    bias,
    states,
    slots,
    x_stride,
    state_stride,
    channels: tl.constexpr,
    taps: tl.constexpr,
    has_bias: tl.constexpr,
    has_silu: tl.constexpr,
    padded_taps: tl.constexpr,
    columns: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Convolve one token of each sequence, and move the inputs in its slot by one place. All inputs are read at once,
    since reading one takes as long.
    """
    start_early(overlaps)
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + seq)
    channel, tap = tl.program_id(1) * columns + tl.arange(0, columns), tl.arange(0, padded_taps)
    kept, has_state, is_new = channel < channels, slot >= 0, (tap == taps - 1)[None, :]
    mask = kept[:, None] & (tap < taps)[None, :]
    place = channel[:, None] * taps + tap[None, :]
    state = states + slot * state_stride + place
    past = tl.load(state + 1, kept[:, None] & (tap < taps - 1)[None, :] & has_state, other=0.0)
    new = tl.load(x + seq * x_stride + channel, kept, other=0.0)[:, None]
    factors = tl.load(weight + place, mask, other=0.0).to(tl.float32)
    acc = tl.sum(tl.where(is_new, new, past.to(new.dtype)).to(tl.float32) * factors, 1)
    tl.debug_barrier()  # the inputs of one channel may be in several threads: read all before one is overwritten
    tl.store(state, tl.where(is_new, new.to(past.dtype), past), mask & has_state)
    if has_bias:
        acc += tl.load(bias + channel, kept, other=0.0).to(tl.float32)
    tl.store(output + seq * channels + channel, _activated(acc, has_state, has_silu, output.dtype.element_ty), kept)


@triton.jit
def _activated(acc, has_state, has_silu: tl.constexpr, dtype: tl.constexpr):
    """Round as if the convolution had been stored, as the twin does. Padding is zero."""
    acc = tl.where(has_state, acc, 0.0).to(dtype).to(tl.float32)
    if has_silu:
        acc = acc / (1.0 + tl.exp(tl.minimum(-acc, 80.0)))
    return acc.to(dtype)


@triton.jit(do_not_specialize=["num_seqs"])
def _convolve_kernel(  # noqa: PLR0913
    output,
    x,
    weight,
    bias,
    states,
    starts,
    slots,
    num_seqs,
    x_stride,
    state_stride,
    channels: tl.constexpr,
    taps: tl.constexpr,
    has_bias: tl.constexpr,
    has_silu: tl.constexpr,
    tokens: tl.constexpr,
    columns: tl.constexpr,
    seqs: tl.constexpr,
):
    ids = tl.arange(0, seqs)
    begins = tl.load(starts + ids, ids < num_seqs, other=0)
    tiles = (tl.load(starts + 1 + ids, ids < num_seqs, other=0) - begins + tokens - 1) // tokens
    before = tl.cumsum(tiles, 0) <= tl.program_id(0)
    seq = tl.sum(before.to(tl.int32), 0)
    number = tl.program_id(0) - tl.sum(tl.where(before, tiles, 0), 0)
    if seq >= num_seqs:
        return
    start = tl.load(starts + seq)
    length = tl.load(starts + seq + 1) - start
    slot = tl.load(slots + seq)
    first = number * tokens
    place = first + tl.arange(0, tokens)
    channel = tl.program_id(1) * columns + tl.arange(0, columns)
    kept = channel < channels
    mask = (place < length)[:, None] & kept[None, :]
    rows = x + start.to(tl.int64) * x_stride + channel[None, :]
    state = states + slot * state_stride + channel[None, :] * taps
    has_state = slot >= 0
    acc = tl.zeros([tokens, columns], tl.float32)
    for tap in tl.static_range(taps):
        # Tap 0 is multiplied by the earliest input. Those before the first token of the step are in the state.
        at = place - (taps - 1) + tap
        values = tl.load(rows + at.to(tl.int64)[:, None] * x_stride, mask & (at >= 0)[:, None], other=0.0)
        if first == 0:
            past = tl.load(state + (taps + at)[:, None], mask & (at < 0)[:, None] & has_state, other=0.0)
            values += past.to(values.dtype)
        factor = tl.load(weight + channel * taps + tap, kept, other=0.0).to(tl.float32)
        acc += values.to(tl.float32) * factor[None, :]
    if has_bias:
        acc += tl.load(bias + channel, kept, other=0.0).to(tl.float32)[None, :]
    to = output + (start.to(tl.int64) + place.to(tl.int64))[:, None] * channels + channel[None, :]
    tl.store(to, _activated(acc, has_state, has_silu, output.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_inner"])
def _keep_kernel(  # noqa: PLR0913
    x,
    states,
    starts,
    slots,
    inner_slots,
    inner_tokens,
    num_inner,
    x_stride,
    state_stride,
    channels: tl.constexpr,
    taps: tl.constexpr,
    columns: tl.constexpr,
):
    """Store the last inputs of each sequence, the state of the convolution, in the sequence's slot, and those before
    its inner checkpoint.
    """
    seq = tl.program_id(0)
    channel = tl.program_id(1) * columns + tl.arange(0, columns)
    slot, to = tl.load(slots + seq), tl.load(inner_slots + seq, seq < num_inner, other=-1)
    start, end = tl.load(starts + seq).to(tl.int64), tl.load(starts + seq + 1).to(tl.int64)
    length = tl.load(inner_tokens + seq, seq < num_inner, other=0).to(tl.int64)
    # The sequence's own slot is written last, since both read the old inputs in it.
    for _ in range(2):
        mask = (channel < channels) & (slot >= 0) & (to >= 0) & (end > start)
        state, new_state = states + slot * state_stride + channel * taps, states + to * state_stride + channel * taps
        for place in tl.static_range(taps):
            # A sequence shorter than the convolution keeps some of its old inputs, which move to earlier places.
            moved = place + length
            past = tl.load(state + moved, mask & (moved < taps), other=0.0)
            new = tl.load(x + (start + moved - taps) * x_stride + channel, mask & (moved >= taps), other=0.0)
            tl.store(new_state + place, tl.where(moved < taps, past, new.to(past.dtype)), mask)
        to, length = slot, end - start
