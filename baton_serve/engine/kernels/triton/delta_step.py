"""One token of the gated delta rule for each sequence: its state is read once, and written once to the same place.
Decays are one number for each head, or for each channel of the keys.

Twins: `reference.mixers.delta_rule` and `channel_delta_rule`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.mixers import ChannelDeltaHeads, DeltaHeads, PackedSequences
from baton_serve.engine.kernels.triton.overlap import overlapping, start_early
from baton_serve.engine.kernels.triton.tiles import padded

FEW_PROGRAMS = 1024
"""Heads of a batch up to which the values of a head are divided over several programs."""


def delta_step(heads: DeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute the gated delta rule for one token of each sequence by a Triton kernel; see `MixerKernels.delta_rule`."""
    assert heads.qkv.stride(1) == 1 and heads.beta.stride(1) == heads.step.stride(1) == 1
    factors = (heads.beta, heads.step, heads.log_rate, heads.step_bias)
    return _step(heads, heads.num_key_heads, factors, heads.step.stride(0), states, sequences, by_channel=False)


def channel_delta_step(heads: ChannelDeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute the gated delta rule with a decay for each channel for one token of each sequence by a Triton kernel; see
    `MixerKernels.channel_delta_rule`.
    """
    assert heads.qkv.stride(1) == heads.beta.stride(1) == 1 and heads.decay[0].is_contiguous()
    # Triton needs pointers here that the kernel does not read.
    factors = (heads.beta, heads.decay, heads.beta, heads.beta)
    return _step(heads, heads.num_heads, factors, heads.decay.stride(0), states, sequences, by_channel=True)


def _step(
    heads: DeltaHeads | ChannelDeltaHeads,
    num_key_heads: int,
    factors: tuple[Tensor, ...],
    step_stride: int,
    states: Tensor,
    sequences: PackedSequences,
    *,
    by_channel: bool,
) -> Tensor:
    """Launch the kernel. `factors` are what decays and step sizes are computed from."""
    num_seqs, num_heads, value_size = len(heads.qkv), heads.num_heads, heads.value_size
    output = torch.empty((num_seqs, num_heads, value_size), dtype=heads.qkv.dtype, device=heads.qkv.device)
    values = min(padded(value_size), 32 if num_seqs * num_heads <= FEW_PROGRAMS else 64)
    _step_kernel[(num_seqs, num_heads, triton.cdiv(value_size, values))](
        output,
        heads.qkv,
        *factors,
        states,
        sequences.slots,
        heads.key_size**-0.5,
        heads.qkv.stride(0),
        heads.beta.stride(0),
        step_stride,
        states.stride(0),
        num_heads=num_heads,
        group=num_heads // num_key_heads,
        key_size=heads.key_size,
        keys=padded(heads.key_size),
        value_size=value_size,
        values=values,
        by_channel=by_channel,
        num_warps=4,
        **overlapping(states.device),
    )
    return output


@triton.jit
def _step_kernel(  # noqa: PLR0913
    output,
    qkv,
    beta,
    step,
    log_rate,
    step_bias,
    states,
    slots,
    scale,
    qkv_stride,
    beta_stride,
    step_stride,
    state_stride,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    key_size: tl.constexpr,
    keys: tl.constexpr,
    value_size: tl.constexpr,
    values: tl.constexpr,
    by_channel: tl.constexpr,
    overlaps: tl.constexpr,
):
    start_early(overlaps)
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim, column = tl.arange(0, keys), tl.program_id(2) * values + tl.arange(0, values)
    in_key, in_value = dim < key_size, column < value_size
    slot = tl.load(slots + seq)
    dtype: tl.constexpr = output.dtype.element_ty
    at_output = output + (seq * num_heads + head) * value_size + column
    if slot >= 0:
        row, key_head = qkv + seq * qkv_stride, head // group
        width: tl.constexpr = num_heads // group * key_size
        # All inputs are read at once, since reading one takes as long: query and key by one load, as Triton moves the
        # result of each load to other threads behind it, with a barrier.
        at = states + slot * state_stride + head * (key_size * value_size) + dim[:, None] * value_size + column[None, :]
        mask = in_key[:, None] & in_value[None, :]
        state = tl.load(at, mask, other=0.0)
        pair = row + key_head * key_size + dim[:, None] + tl.arange(0, 2)[None, :] * width
        both = tl.load(pair, in_key[:, None], other=0.0).to(tl.float32)
        value = tl.load(row + 2 * width + head * value_size + column, in_value, other=0.0).to(tl.float32)
        if by_channel:
            size = step_size(beta + seq * beta_stride + head, dtype)
            log_decay = tl.load(step + seq * step_stride + head * key_size + dim, in_key, other=0.0)
            decay = tl.exp(log_decay.to(tl.float32))[:, None]
        else:
            at_step = step + seq * step_stride
            log_decay, size = gates(beta + seq * beta_stride, at_step, log_rate, step_bias, head, dtype)
            decay = tl.exp(log_decay)
        query, key = tl.split(both * tl.rsqrt(tl.sum(both * both, 0) + 1e-6)[None, :])
        query *= scale
        # The order is that of the paper: decay, read, update, and only then the answer to the query.
        state *= decay
        delta = (value - tl.sum(state * key[:, None], 0)) * size
        state += key[:, None] * delta[None, :]
        tl.store(at, state, mask)
        tl.store(at_output, tl.sum(state * query[:, None], 0).to(dtype), in_value)
    else:  # padding: later layers must not read what was in this memory
        tl.store(at_output, tl.zeros([values], dtype), in_value)


@triton.jit
def gates(beta, step, log_rate, step_bias, at, dtype: tl.constexpr):
    """Return (logarithm of the decay, step size) of the gated delta rule for one token, for the head number `at`."""
    wide, size = tl.load(step + at).to(tl.float32) + tl.load(step_bias + at), step_size(beta + at, dtype)
    rate = tl.exp(tl.load(log_rate + at))
    # Softplus. Above 20 it is its argument.
    return -rate * tl.where(wide > 20.0, wide, tl.log(1.0 + tl.exp(tl.minimum(wide, 20.0)))), size


@triton.jit
def step_size(beta, dtype: tl.constexpr):
    """Return the sigmoid of the number at `beta`, rounded as if it had been stored."""
    size = 1.0 / (1.0 + tl.exp(-tl.load(beta).to(tl.float32)))
    return size.to(dtype).to(tl.float32)
