"""Mamba-2's recurrence (https://arxiv.org/abs/2405.21060) and lightning attention, which is the same with a constant
decay: prompts in chunks of tokens as matrix products, and steps of one token that read and write each state once.

A program passes the state of a head from chunk to chunk, in registers, with the head's inputs divided over programs.
States between chunks are never stored, which on devices with slow memory costs less than computing chunks in parallel.
Lengths are read from the device. Twins: `reference.state_space.state_space` and `lightning`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.mixers import LightningHeads, PackedSequences, StateSpaceHeads
from baton_serve.engine.kernels.triton.convolution import checkpoint_arguments
from baton_serve.engine.kernels.triton.tiles import chunk_stages, padded

CHUNK_TOKENS = 64
MIN_SIZE = 64
"""Smallest padded size of a state, as for the delta rule (`delta_chunks.py`)."""
CHUNK_VALUES = 64
"""Inputs of a head that a program computes for prompts. Fewer would repeat the scores of a chunk more often; programs
with 32 and one stage compute wrong numbers, and leave their memory (H200, Triton 3.6)."""
CHUNK_WARPS = 4
STEP_ELEMENTS = 4096
"""Elements of a state that a program of a step of one token holds."""
FEW_PROGRAMS = 1024
"""Heads of a batch up to which programs hold a quarter as much, so that all processors have work."""
LINE_VALUES = 32
"""Neighbouring numbers of a state that are read together, if its values are its last dimension."""


def state_space(heads: StateSpaceHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute Mamba-2's recurrence by Triton kernels, as `MixerKernels.state_space` specifies. `states` are updated."""
    assert heads.xbc.stride(1) == heads.step.stride(1) == 1 and states[0].is_contiguous()
    num_heads, head_dim, size = heads.num_heads, heads.head_dim, heads.state_size
    pointers = (heads.xbc, heads.step, heads.log_rate, heads.step_bias, heads.skip)
    places = {
        "group": num_heads // heads.num_groups,
        "x_at": 0,
        "x_step": head_dim,
        "b_at": num_heads * head_dim,
        "b_step": size,
        "c_behind": heads.num_groups * size,
        "dim_stride": size,
        "size_stride": 1,
        "is_constant": False,
    }
    sizes, limits = (num_heads, head_dim, size), heads.step_limits
    return _recurrence(pointers, heads.step.stride(0), limits, sizes, places, states, sequences)


def lightning(heads: LightningHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute lightning attention by Triton kernels, as `MixerKernels.lightning` specifies. `states` are updated."""
    assert heads.qkv.stride(1) == 1 and heads.rate.is_contiguous() and states[0].is_contiguous()
    size = heads.size
    # Triton needs pointers to what a constant decay does not have, too.
    pointers = (heads.qkv, heads.qkv, heads.rate, heads.rate, heads.rate)
    # Values, keys and queries are inputs, B and C. The state has its keys first.
    places = {
        "group": 1,
        "x_at": 2 * size,
        "x_step": 3 * size,
        "b_at": size,
        "b_step": 3 * size,
        "c_behind": -size,
        "dim_stride": 1,
        "size_stride": size,
        "is_constant": True,
    }
    return _recurrence(pointers, 0, (0.0, 0.0), (heads.num_heads, size, size), places, states, sequences)


def _recurrence(
    pointers: tuple[Tensor, ...],
    step_stride: int,
    limits: tuple[float, float],
    sizes: tuple[int, int, int],
    places: dict[str, int],
    states: Tensor,
    sequences: PackedSequences,
) -> Tensor:
    """Launch the kernels of one recurrence. `pointers` are the inputs, the time steps, rates, biases and skips; `sizes`
    are (heads, inputs of a head, size of a state), and `places` says where the parts of a head lie in a row of inputs.
    """
    (num_heads, head_dim, size), inputs = sizes, pointers[0]
    dtype, num_seqs, is_single = inputs.dtype, len(sequences.slots), sequences.max_len == 1
    output = torch.empty((len(inputs), num_heads, head_dim), dtype=dtype, device=inputs.device)
    strides = (inputs.stride(0), step_stride, states.stride(0))
    constants = {"num_heads": num_heads, "head_dim": head_dim, "state_size": size, **places}
    if is_single:
        keys = padded(size)
        room = STEP_ELEMENTS // 4 if num_seqs * num_heads <= FEW_PROGRAMS else STEP_ELEMENTS
        least = LINE_VALUES if places["dim_stride"] == 1 else 1
        values = min(padded(head_dim), max(least, room // keys))
        _step_kernel[(triton.cdiv(head_dim, values), num_heads, num_seqs)](
            output, *pointers, states, sequences.slots, *strides, keys=keys, values=values, num_warps=4, **constants
        )
        return output
    keys = max(MIN_SIZE, padded(size))
    _chunks_kernel[(triton.cdiv(head_dim, CHUNK_VALUES), num_heads, num_seqs)](
        output,
        *pointers,
        states,
        sequences.starts,
        sequences.slots,
        *checkpoint_arguments(sequences),
        *limits,
        *strides,
        keys=keys,
        values=CHUNK_VALUES,
        chunk=CHUNK_TOKENS,
        precision="ieee" if dtype == torch.float32 else "tf32",
        num_warps=CHUNK_WARPS,
        num_stages=chunk_stages(inputs.device, inputs.element_size()),
        **constants,
    )
    return output


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), exact for the small time steps of slow heads too."""
    grown = tl.exp(tl.minimum(x, 20.0))
    # The sum 1 + exp(x) has lost the digits of a small exp(x): there, the series of the logarithm is exact.
    series = grown * (1.0 - grown * (0.5 - grown * (1.0 / 3.0)))
    return tl.where(x > 20.0, x, tl.where(grown < 0.01, series, tl.log(1.0 + grown)))


@triton.jit
def _step_kernel(  # noqa: PLR0913
    output,
    xbc,
    step,
    rate,
    step_bias,
    skip,
    states,
    slots,
    xbc_stride,
    step_stride,
    state_stride,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    state_size: tl.constexpr,
    x_at: tl.constexpr,
    x_step: tl.constexpr,
    b_at: tl.constexpr,
    b_step: tl.constexpr,
    c_behind: tl.constexpr,
    dim_stride: tl.constexpr,
    size_stride: tl.constexpr,
    is_constant: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
):
    seq, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    dim, column = tl.program_id(0) * values + tl.arange(0, values), tl.arange(0, keys)
    in_head, in_state = dim < head_dim, column < state_size
    slot = tl.load(slots + seq)
    dtype: tl.constexpr = output.dtype.element_ty
    at_output = output + (seq * num_heads + head) * head_dim + dim
    if slot >= 0:
        row = xbc + seq * xbc_stride
        x = tl.load(row + x_at + head * x_step + dim, in_head, other=0.0).to(tl.float32)
        at_b = row + b_at + head // group * b_step + column
        b = tl.load(at_b, in_state, other=0.0).to(tl.float32)
        c = tl.load(at_b + c_behind, in_state, other=0.0).to(tl.float32)
        if is_constant:
            size, decay = 1.0, tl.exp(-tl.load(rate + head))
        else:
            bias = tl.load(step_bias + head).to(tl.float32)
            size = softplus(tl.load(step + seq * step_stride + head).to(tl.float32) + bias)
            decay = tl.exp(-tl.exp(tl.load(rate + head).to(tl.float32)) * size)
        at = states + slot * state_stride + head * (head_dim * state_size)
        at += dim[:, None] * dim_stride + column[None, :] * size_stride
        mask = in_head[:, None] & in_state[None, :]
        state = tl.load(at, mask, other=0.0) * decay + (x * size)[:, None] * b[None, :]
        tl.store(at, state, mask)
        result = tl.sum(state * c[None, :], 1)
        if not is_constant:
            result += x * tl.load(skip + head).to(tl.float32)
        tl.store(at_output, result.to(dtype), in_head)
    else:  # padding: later layers must not read what was in this memory
        tl.store(at_output, tl.zeros([values], dtype), in_head)


@triton.jit(do_not_specialize=["num_inner"])
def _chunks_kernel(  # noqa: PLR0913, PLR0915
    output,
    xbc,
    step,
    rate,
    step_bias,
    skip,
    states,
    starts,
    slots,
    inner_slots,
    inner_tokens,
    num_inner,
    shortest,
    longest,
    xbc_stride,
    step_stride,
    state_stride,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    state_size: tl.constexpr,
    x_at: tl.constexpr,
    x_step: tl.constexpr,
    b_at: tl.constexpr,
    b_step: tl.constexpr,
    c_behind: tl.constexpr,
    dim_stride: tl.constexpr,
    size_stride: tl.constexpr,
    is_constant: tl.constexpr,
    keys: tl.constexpr,
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
        dim, column = tl.program_id(0) * values + tl.arange(0, values), tl.arange(0, keys)
        place = tl.arange(0, chunk)
        in_head, in_size = dim < head_dim, column < state_size
        dtype: tl.constexpr = output.dtype.element_ty
        width: tl.constexpr = num_heads * head_dim
        # The state is transposed here: [state size, inputs], as the products of a chunk need it.
        at_state = states + head * (head_dim * state_size)
        at_state += column[:, None] * size_stride + dim[None, :] * dim_stride
        in_state = in_size[:, None] & in_head[None, :]
        state = tl.load(at_state + slot * state_stride, in_state, other=0.0)
        if is_constant:
            log_decay = -tl.load(rate + head)
        else:
            log_decay = -tl.exp(tl.load(rate + head).to(tl.float32))
            bias, factor = tl.load(step_bias + head).to(tl.float32), tl.load(skip + head).to(tl.float32)
        # Offsets within a chunk are narrow: wide ones for whole tiles would fill the registers.
        in_x = place[:, None] * xbc_stride + dim[None, :]
        in_b = place[:, None] * xbc_stride + column[None, :]
        in_output = place[:, None] * width + dim[None, :]
        for first in range(start, end, chunk):
            # One loop: two, before and behind the checkpoint, gave wrong products on Hopper (Triton 3.6).
            if first == inner:
                tl.store(at_state + to * state_stride, state, in_state)
            live = first + place < end
            row = start.to(tl.int64) + (first - start)
            if is_constant:
                size = live.to(tl.float32)
            else:
                at_step = step + row * step_stride + head + place * step_stride
                size = softplus(tl.load(at_step, live, other=0.0).to(tl.float32) + bias)
                if end - start > 1:
                    size = tl.minimum(tl.maximum(size, shortest), longest)
                # Rows behind the end decay nothing and add nothing.
                size = tl.where(live, size, 0.0)
            total = tl.cumsum(size * log_decay, 0)
            final = tl.sum(size * log_decay, 0)
            rows, inputs = live[:, None] & in_size[None, :], live[:, None] & in_head[None, :]
            at_b = xbc + row * xbc_stride + b_at + head // group * b_step
            b = tl.load(at_b + in_b, rows, other=0.0)
            c = tl.load(at_b + c_behind + in_b, rows, other=0.0)
            x = tl.load(xbc + row * xbc_stride + x_at + head * x_step + in_x, inputs, other=0.0)
            below = place[:, None] >= place[None, :]
            # Above the diagonal the exponent is positive and might overflow.
            between = tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0))
            scores = tl.dot(c, tl.trans(b), input_precision=precision)
            # Matrix units read the model's dtype; sums, decays and the state stay float32.
            scores = tl.where(below, scores * between * size[None, :], 0.0).to(dtype)
            result = tl.dot(c, state.to(dtype), input_precision=precision) * tl.exp(total)[:, None]
            result = tl.dot(scores, x, result, input_precision=precision)
            wide = x.to(tl.float32)
            if not is_constant:
                result += wide * factor
            at_output = output + row * width + head * head_dim
            tl.store(at_output + in_output, result.to(dtype), inputs)
            # A token's input decays until the end of the chunk.
            update = (wide * (size * tl.exp(final - total))[:, None]).to(dtype)
            state = tl.dot(tl.trans(b), update, state * tl.exp(final), input_precision=precision)
        tl.store(at_state + slot * state_stride, state, in_state)
