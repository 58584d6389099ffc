"""Calls the C++ kernels of recurrent layers, for many sequences whose states lie in batch slots: steps of one token,
and prompts of the gated delta rule and of short convolutions.

Each state is read and written once and in place. transformers' functions copy the states several times. Inputs that the
library does not support return None, and the caller uses transformers' function.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton_serve.engine.kernels.cpu.layers import DTYPE_CODES
from baton_serve.engine.kernels.mixers import DeltaHeads, PackedSequences

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
MIN_PARALLEL_ELEMENTS = 1 << 16
"""Elements of states below which a second thread costs more time than it saves."""


class _DeltaArguments(ctypes.Structure):
    """Mirrors the C struct `DeltaArguments` of src/arguments.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "key", "value", "decay", "beta", "states", "slots", "output")),
        *((name, _LONG) for name in ("query_stride", "key_stride", "value_stride", "state_stride", "num_seqs")),
        *((name, _INT) for name in ("num_heads", "num_key_heads", "key_size", "value_size", "dtype", "num_threads")),
        *((name, _INT) for name in ("has_channel_decay", "normalizes")),
        ("scale", _FLOAT),
    )


class _DeltaPromptArguments(ctypes.Structure):
    """Mirrors the C struct `DeltaPromptArguments` of src/arguments.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "beta", "step", "log_rate", "step_bias", "states", "starts", "slots")),
        *((name, _POINTER) for name in ("inner_slots", "inner_tokens", "output")),
        *((name, _LONG) for name in ("qkv_stride", "beta_stride", "step_stride", "state_stride", "num_seqs")),
        *((name, _INT) for name in ("num_heads", "num_key_heads", "key_size", "value_size", "dtype", "num_threads")),
    )


class _StateSpaceArguments(ctypes.Structure):
    """Mirrors the C struct `StateSpaceArguments` of src/arguments.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("input", "input_map", "output_map", "step", "decay")),
        *((name, _POINTER) for name in ("skip", "states", "slots", "output")),
        *((name, _LONG) for name in ("input_stride", "input_map_stride", "output_map_stride")),
        *((name, _LONG) for name in ("state_stride", "num_seqs")),
        *((name, _INT) for name in ("num_heads", "num_groups", "head_dim", "state_size", "dtype", "num_threads")),
    )


class _ConvolutionArguments(ctypes.Structure):
    """Mirrors the C struct `ConvolutionArguments` of src/arguments.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("input", "weight", "bias", "states", "starts", "slots")),
        *((name, _POINTER) for name in ("inner_slots", "inner_tokens", "output")),
        *((name, _LONG) for name in ("input_stride", "state_stride", "num_seqs")),
        *((name, _INT) for name in ("num_channels", "taps", "dtype", "num_threads", "has_silu")),
    )


@dataclass(frozen=True, slots=True)
class SlotState:
    """The recurrent states that one layer has for the sequences of a step: the rows `slots` of `states` [num_slots,
    *shape], which a kernel changes in place.
    """

    states: Tensor
    slots: Tensor  # int64 [num_seqs]

    def to(self, *_: object, **__: object) -> "SlotState":
        """Return the object itself, whatever the arguments are: modules convert states to float32, which these are
        already.
        """
        return self

    def load(self) -> Tensor:
        """Return a copy of the sequences' states, gathered from their slots, [num_seqs, *shape]."""
        return self.states.index_select(0, self.slots)

    def store(self, states: Tensor) -> None:
        """Copy new states of the sequences, [num_seqs, *shape], into their slots."""
        self.states.index_copy_(0, self.slots, states.to(self.states.dtype))


class CpuRecurrentSteps:
    """Computes layers with recurrent states in C++, and updates the states in their slots. `library` is the result of
    `load_kernels`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._delta = library.baton_delta_step
        self._delta.argtypes = [ctypes.POINTER(_DeltaArguments)]
        self._state_space = library.baton_state_space_step
        self._state_space.argtypes = [ctypes.POINTER(_StateSpaceArguments)]
        self._delta_prompt = library.baton_delta_prompt
        self._delta_prompt.argtypes = [ctypes.POINTER(_DeltaPromptArguments)]
        self._convolution = library.baton_convolution
        self._convolution.argtypes = [ctypes.POINTER(_ConvolutionArguments)]

    def delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: SlotState, normalizes: bool
    ) -> Tensor | None:
        """Compute one step of the gated delta rule (https://arxiv.org/abs/2412.06464), update `state`, and return the
        output [num_seqs, num_heads, value_size]. Return None, with nothing done, if the dtypes are not supported.

        `query` and `key` are [num_seqs, num_key_heads, key_size], `value` [num_seqs, num_heads, value_size]. `decay` is
        the logarithm for each head or, for KDA, for each channel of the key. `normalizes` scales queries and keys to
        length 1.
        """
        num_seqs, num_heads, value_size = value.shape
        dtype = DTYPE_CODES.get(value.dtype)
        rows = [_heads(one) for one in (query, key, value)]
        if dtype is None or state.states.dtype != torch.float32 or {query.dtype, key.dtype} != {value.dtype}:
            return None
        output = torch.empty(num_seqs, num_heads, value_size, dtype=value.dtype)
        decay, beta = decay.float().contiguous(), beta.float().contiguous()
        arguments = _DeltaArguments(
            query=rows[0].data_ptr(),
            key=rows[1].data_ptr(),
            value=rows[2].data_ptr(),
            decay=decay.data_ptr(),
            beta=beta.data_ptr(),
            states=state.states.data_ptr(),
            slots=state.slots.data_ptr(),
            output=output.data_ptr(),
            query_stride=rows[0].stride(0),
            key_stride=rows[1].stride(0),
            value_stride=rows[2].stride(0),
            state_stride=state.states.stride(0),
            num_seqs=num_seqs,
            num_heads=num_heads,
            num_key_heads=key.shape[1],
            key_size=key.shape[2],
            value_size=value_size,
            dtype=dtype,
            num_threads=_num_threads(num_seqs * state.states[0].numel()),
            has_channel_decay=decay.dim() == 3,
            normalizes=normalizes,
            scale=key.shape[2] ** -0.5,
        )
        return output if self._delta(arguments) == 0 else None

    def packed_delta_rule(self, heads: DeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor | None:
        """Compute the gated delta rule as `MixerKernels.delta_rule` specifies, and update `states`. Return None, with
        nothing done, if the dtypes are not supported.
        """
        dtype = DTYPE_CODES.get(heads.qkv.dtype)
        if dtype is None or {heads.beta.dtype, heads.step.dtype} != {heads.qkv.dtype} or not _is_state(states):
            return None
        qkv, beta, step = (_rows(one) for one in (heads.qkv, heads.beta, heads.step))
        log_rate, step_bias = heads.log_rate.float().contiguous(), heads.step_bias.float().contiguous()
        output = _new_rows(sequences, (len(qkv), heads.num_heads, heads.value_size), qkv.dtype)
        arguments = _DeltaPromptArguments(
            qkv=qkv.data_ptr(),
            beta=beta.data_ptr(),
            step=step.data_ptr(),
            log_rate=log_rate.data_ptr(),
            step_bias=step_bias.data_ptr(),
            states=states.data_ptr(),
            starts=sequences.starts.data_ptr(),
            slots=sequences.slots.data_ptr(),
            **_checkpoint_arguments(sequences),
            output=output.data_ptr(),
            qkv_stride=qkv.stride(0),
            beta_stride=beta.stride(0),
            step_stride=step.stride(0),
            state_stride=states.stride(0),
            num_seqs=len(sequences.slots),
            num_heads=heads.num_heads,
            num_key_heads=heads.num_key_heads,
            key_size=heads.key_size,
            value_size=heads.value_size,
            dtype=dtype,
            num_threads=_num_threads(len(qkv) * states[0].numel()),
        )
        return output if self._delta_prompt(arguments) == 0 else None

    def state_space(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: SlotState
    ) -> Tensor | None:
        """Compute one step of Mamba-2's recurrence (https://arxiv.org/abs/2405.21060), update `state`, and return the
        output [num_seqs, num_heads, head_dim]. Return None, with nothing done, if the dtypes are not supported.

        `x` is [num_seqs, num_heads, head_dim], `dt` [num_seqs, num_heads] after its bias and softplus, `a` and `d`
        [num_heads], `b` and `c` [num_seqs, num_groups, state_size].
        """
        dtype = DTYPE_CODES.get(x.dtype)
        if dtype is None or state.states.dtype != torch.float32 or {b.dtype, c.dtype} != {x.dtype}:
            return None
        rows = [_heads(one) for one in (x, b, c)]
        step = dt.float().contiguous()
        decay = torch.exp(step * a.float())
        skip = d.float().contiguous()
        output = torch.empty(x.shape, dtype=x.dtype)
        arguments = _StateSpaceArguments(
            input=rows[0].data_ptr(),
            input_map=rows[1].data_ptr(),
            output_map=rows[2].data_ptr(),
            step=step.data_ptr(),
            decay=decay.data_ptr(),
            skip=skip.data_ptr(),
            states=state.states.data_ptr(),
            slots=state.slots.data_ptr(),
            output=output.data_ptr(),
            input_stride=rows[0].stride(0),
            input_map_stride=rows[1].stride(0),
            output_map_stride=rows[2].stride(0),
            state_stride=state.states.stride(0),
            num_seqs=x.shape[0],
            num_heads=x.shape[1],
            num_groups=b.shape[1],
            head_dim=x.shape[2],
            state_size=b.shape[2],
            dtype=dtype,
            num_threads=_num_threads(x.shape[0] * state.states[0].numel()),
        )
        return output if self._state_space(arguments) == 0 else None

    def convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: SlotState,
        *,
        has_silu: bool,
        sequences: PackedSequences | None = None,
    ) -> Tensor | None:
        """Compute a causal convolution of each channel for new tokens, `x` [num_tokens, num_channels], and return the
        same shape. Return None, with nothing done, if the dtypes or sizes are not supported.

        `weight` is [num_channels, taps]. `state`, which is updated, holds the last `taps` inputs. With `sequences` None
        each sequence has one token.
        """
        dtype = DTYPE_CODES.get(x.dtype)
        parts = [x, weight, state.states] if bias is None else [x, weight, state.states, bias]
        if dtype is None or {part.dtype for part in parts} != {x.dtype} or weight.shape != state.states.shape[1:]:
            return None
        rows, weight = _rows(x), weight.contiguous()
        output = torch.empty(x.shape, dtype=x.dtype) if sequences is None else _new_rows(sequences, x.shape, x.dtype)
        arguments = _ConvolutionArguments(
            input=rows.data_ptr(),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            states=state.states.data_ptr(),
            starts=None if sequences is None else sequences.starts.data_ptr(),
            slots=state.slots.data_ptr(),
            **_checkpoint_arguments(sequences),
            output=output.data_ptr(),
            input_stride=rows.stride(0),
            state_stride=state.states.stride(0),
            num_seqs=len(state.slots),
            num_channels=x.shape[1],
            taps=weight.shape[1],
            dtype=dtype,
            num_threads=_num_threads(x.numel() * weight.shape[1]),
            has_silu=has_silu,
        )
        return output if self._convolution(arguments) == 0 else None


def _checkpoint_arguments(sequences: PackedSequences | None) -> dict[str, int]:
    """Return the pointers of a C struct to the inner checkpoints of a step; empty, for null pointers, without any."""
    inner = None if sequences is None else sequences.checkpoints
    return {} if inner is None else {"inner_slots": inner.slots.data_ptr(), "inner_tokens": inner.tokens.data_ptr()}


def time_steps(dt: Tensor, bias: Tensor | None) -> Tensor:
    """Return the time steps of a state-space layer (Mamba), softplus(dt + bias), in float32."""
    return functional.softplus(dt.float() if bias is None else dt.float() + bias.float())


def _heads(x: Tensor) -> Tensor:
    """Return `x` [num_seqs, heads, size] so that the heads of a sequence are contiguous, as the C++ library reads them.
    It is copied only if its strides require it.
    """
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    """Return `x` [rows, size] so that rows are contiguous. It is copied only if its strides require it."""
    return x if x.stride(1) == 1 else x.contiguous()


def _is_state(states: Tensor) -> bool:
    """Return whether `states` [num_slots, ...] are float32, and each slot's state is contiguous."""
    return states.dtype == torch.float32 and states[0].is_contiguous()


def _new_rows(sequences: PackedSequences, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory for results of all rows of a step. Rows that belong to no sequence are zeros, all others are not
    initialized.
    """
    output = torch.empty(tuple(shape), dtype=dtype)
    output[int(sequences.starts[-1]) :] = 0
    return output


def _num_threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= MIN_PARALLEL_ELEMENTS else 1
