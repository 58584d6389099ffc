"""The kernels of token mixers on CPUs, in C++. Plain torch computes what the library does not support."""

import ctypes

import torch
from torch import Tensor

from baton_serve.engine.kernels.cpu.layers import DTYPE_CODES, SIGMOID, GateKernel, norm_kind
from baton_serve.engine.kernels.cpu.linear import Matrix, PackedHeads
from baton_serve.engine.kernels.cpu.recurrent import CpuRecurrentSteps, SlotState
from baton_serve.engine.kernels.interfaces import Norm, PackedWeight
from baton_serve.engine.kernels.mixers import (
    ChannelDeltaHeads,
    DeltaHeads,
    LatentRows,
    LightningHeads,
    PackedSequences,
    ScanChannels,
    StateSpaceHeads,
)
from baton_serve.engine.kernels.reference import mixers as twin

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class _LatentRowsArguments(ctypes.Structure):
    """Mirrors the C struct `LatentRowsArguments` of src/arguments.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("latents", "weight", "query", "cos", "sin", "output", "attending")),
        *((name, _LONG) for name in ("latent_stride", "query_token_stride", "query_head_stride")),
        *((name, _LONG) for name in ("attending_token_stride", "attending_head_stride", "num_tokens")),
        ("rotary_stride", _LONG),
        *((name, _INT) for name in ("num_heads", "rank", "rotary_dim", "dtype", "num_threads")),
        *((name, _INT) for name in ("is_interleaved", "keeps_order")),
        ("epsilon", _FLOAT),
    )


class CpuMixers:
    """Implements `MixerKernels` by C++ kernels. `library` is the result of `load_kernels`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._steps = CpuRecurrentSteps(library)
        self._gates = GateKernel(library)
        self._heads = PackedHeads(library)
        self._latent_rows = library.baton_latent_rows
        self._latent_rows.argtypes = [ctypes.POINTER(_LatentRowsArguments)]

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        sequences: PackedSequences,
        *,
        has_silu: bool,
    ) -> Tensor:
        state = SlotState(states, sequences.slots)
        output = self._steps.convolution(x, weight, bias, state, has_silu=has_silu, sequences=sequences)
        if output is not None:
            return output
        return twin.convolve(x, weight, bias, states, sequences, has_silu=has_silu)

    def delta_rule(self, heads: DeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        output = self._steps.packed_delta_rule(heads, states, sequences)
        return twin.delta_rule(heads, states, sequences) if output is None else output

    def channel_delta_rule(self, heads: ChannelDeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        return twin.channel_delta_rule(heads, states, sequences)

    def lightning(self, heads: LightningHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        return twin.lightning(heads, states, sequences)

    def state_space(self, heads: StateSpaceHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        return twin.state_space(heads, states, sequences)

    def selective_scan(self, channels: ScanChannels, states: Tensor, sequences: PackedSequences) -> Tensor:
        return twin.selective_scan(channels, states, sequences)

    def gated_norm(self, x: Tensor, gate: Tensor, norm: Norm) -> Tensor:
        output = self._gates.gated_norm(x, gate, norm)
        return twin.gated_norm(x, gate, norm) if output is None else output

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        output = self._gates(gate, x, SIGMOID)
        return twin.sigmoid_gate(x, gate) if output is None else output

    def latent_rows(self, rows: LatentRows, query: Tensor) -> Tensor:
        output = self._stored_rows(rows, query)
        return twin.latent_rows(rows, query) if output is None else output

    def pack_heads(self, weights: Tensor) -> Tensor | PackedWeight:
        packed = self._heads.pack(weights)
        return weights if packed is None else packed

    def multiply_heads(self, x: Tensor, weights: Tensor | PackedWeight, output: Tensor) -> None:
        if isinstance(weights, Matrix):
            self._heads(x, weights, output)
        else:
            twin.multiply_heads(x, weights, output)

    def _stored_rows(self, rows: LatentRows, query: Tensor) -> Tensor | None:
        """Compute `latent_rows` in C++. Return None, with nothing done, if the library does not support these
        tensors.
        """
        latents, (cos, sin) = rows.latents, rows.rotation
        dtype, size = DTYPE_CODES.get(latents.dtype), cos.shape[1]
        given = (latents, rows.query, rows.norm.weight, query)
        if dtype is None or norm_kind(rows.norm) != 0 or {cos.dtype, sin.dtype} != {torch.float32}:
            return None
        if any(part.dtype != latents.dtype or part.stride(-1) != 1 for part in given) or cos.stride() != sin.stride():
            return None
        output = torch.empty((len(latents), 1, latents.shape[1]), dtype=latents.dtype)
        asked, attending = rows.query[..., -size:], query[..., -size:]
        arguments = _LatentRowsArguments(
            latents=latents.data_ptr(),
            weight=rows.norm.weight.data_ptr(),
            query=asked.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            output=output.data_ptr(),
            attending=attending.data_ptr(),
            latent_stride=latents.stride(0),
            query_token_stride=asked.stride(0),
            query_head_stride=asked.stride(1),
            attending_token_stride=attending.stride(0),
            attending_head_stride=attending.stride(1),
            num_tokens=len(latents),
            rotary_stride=cos.stride(0),
            num_heads=asked.shape[1],
            rank=latents.shape[1] - size,
            rotary_dim=size,
            dtype=dtype,
            num_threads=torch.get_num_threads(),
            is_interleaved=rows.is_interleaved,
            keeps_order=rows.keeps_order,
            epsilon=rows.norm.eps,
        )
        return output if self._latent_rows(arguments) == 0 else None
