"""The short causal convolutions of recurrent layers, with the last inputs of each sequence in its slot.

Twin: `reference.mixers.convolve`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.mixers import PackedSequences
from baton_serve.engine.kernels.triton.tiles import padded

TILE_TOKENS, TILE_CHANNELS = 16, 256
"""Tile of steps with prompts."""
MAX_PADDED_SEQS = 256
"""Sequences for which the kernels are compiled once; more compile them again for each power of two."""


def padded_seqs(num_seqs: int) -> int:
    """Return the number of sequences for which kernels are compiled that look for a token's sequence."""
    return 16 if num_seqs <= 16 else max(MAX_PADDED_SEQS, padded(num_seqs))


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, sequences: PackedSequences, *, has_silu: bool
) -> Tensor:
    """Return the causal convolution of each channel; see `MixerKernels.convolve`."""
    assert x.stride(1) == 1 and states.stride(2) == 1 and states.stride(1) == states.shape[2]
    (num_tokens, channels), taps = x.shape, weight.shape[1]
    num_seqs, is_single = sequences.slots.shape[0], sequences.max_len == 1
    output = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    # With one token each, programs are small, so that a single sequence occupies many processors.
    tokens, columns = (1, min(TILE_CHANNELS, padded(channels))) if is_single else (TILE_TOKENS, TILE_CHANNELS)
    grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(channels, columns))
    _convolve_kernel[grid](
        output,
        x,
        weight.contiguous(),
        weight if bias is None else bias,
        states,
        sequences.starts,
        sequences.slots,
        num_tokens,
        num_seqs,
        x.stride(0),
        states.stride(0),
        channels=channels,
        taps=taps,
        has_bias=bias is not None,
        has_silu=has_silu,
        is_single=is_single,
        tokens=tokens,
        columns=columns,
        seqs=1 if is_single else padded_seqs(num_seqs),
        num_warps=4 if not is_single else max(1, columns // 64),
    )
    if not is_single:
        # In a launch of its own: all programs above have read the old inputs by then.
        _keep_kernel[(num_seqs, triton.cdiv(channels, TILE_CHANNELS))](
            x,
            states,
            sequences.starts,
            sequences.slots,
            x.stride(0),
            states.stride(0),
            channels=channels,
            taps=taps,
            columns=TILE_CHANNELS,
            num_warps=2,
        )
    return output


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _convolve_kernel(  # noqa: PLR0913
    output,
    x,
    weight,
    bias,
    states,
    starts,
    slots,
    num_tokens,
    num_seqs,
    x_stride,
    state_stride,
    channels: tl.constexpr,
    taps: tl.constexpr,
    has_bias: tl.constexpr,
    has_silu: tl.constexpr,
    is_single: tl.constexpr,
    tokens: tl.constexpr,
    columns: tl.constexpr,
    seqs: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * tokens + tl.arange(0, tokens).to(tl.int64)
    channel = tl.program_id(1) * columns + tl.arange(0, columns)
    live = token < num_tokens
    if is_single:
        slot = tl.load(slots + token, live, other=-1)
        first = token
    else:
        seq_ids = tl.arange(0, seqs)
        ends = tl.load(starts + 1 + seq_ids, seq_ids < num_seqs, other=2147483647)
        seq = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
        live &= seq < num_seqs
        first = tl.load(starts + seq, live, other=0).to(tl.int64)
        slot = tl.load(slots + seq, live, other=-1)
    kept = channel < channels
    mask = (live & (slot >= 0))[:, None] & kept[None, :]
    state = states + slot[:, None] * state_stride + channel[None, :] * taps
    # Only the first tokens of a sequence need its old inputs.
    needs_past = tl.min(tl.where(live, token - first, taps), 0) < taps - 1
    acc = tl.zeros([tokens, columns], tl.float32)
    for tap in tl.static_range(taps):
        # Tap 0 is multiplied by the earliest input. Those before the first token of the step are in the state.
        at = token - (taps - 1) + tap
        is_new = mask & (at >= first)[:, None]
        values = tl.load(x + at[:, None] * x_stride + channel[None, :], is_new, other=0.0)
        if is_single or needs_past:
            past = tl.load(state + (taps + at - first)[:, None], mask & (at < first)[:, None], other=0.0)
            values += past.to(values.dtype)
        if is_single:
            # Each thread moves the inputs of its own channels, one place after another.
            if tap < taps - 1:
                tl.store(state + tap, past, mask)
            else:
                tl.store(state + tap, values.to(states.dtype.element_ty), mask)
        factor = tl.load(weight + channel * taps + tap, kept, other=0.0).to(tl.float32)
        acc += values.to(tl.float32) * factor[None, :]
    if has_bias:
        acc += tl.load(bias + channel, kept, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = output.dtype.element_ty
    # Round as if the convolution had been stored, as the twin does. Padding is zero.
    acc = tl.where(mask, acc, 0.0).to(dtype).to(tl.float32)
    if has_silu:
        acc = acc / (1.0 + tl.exp(tl.minimum(-acc, 80.0)))
    tl.store(
        output + token[:, None] * channels + channel[None, :],
        acc.to(dtype),
        (token < num_tokens)[:, None] & kept[None, :],
    )


@triton.jit
def _keep_kernel(  # noqa: PLR0913
    x,
    states,
    starts,
    slots,
    x_stride,
    state_stride,
    channels: tl.constexpr,
    taps: tl.constexpr,
    columns: tl.constexpr,
):
    """Store the last inputs of each sequence in its slot."""
    seq = tl.program_id(0)
    channel = tl.program_id(1) * columns + tl.arange(0, columns)
    slot = tl.load(slots + seq)
    start, end = tl.load(starts + seq).to(tl.int64), tl.load(starts + seq + 1).to(tl.int64)
    length = end - start
    mask = (channel < channels) & (slot >= 0) & (length > 0)
    state = states + slot * state_stride + channel * taps
    for place in tl.static_range(taps):
        # A sequence shorter than the convolution keeps some of its old inputs, which move to earlier places.
        moved = place + length
        past = tl.load(state + moved, mask & (moved < taps), other=0.0)
        new = tl.load(x + (end - taps + place) * x_stride + channel, mask & (moved >= taps), other=0.0)
        tl.store(state + place, tl.where(moved < taps, past, new.to(past.dtype)), mask)
