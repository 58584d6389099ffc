"""The kernels of token mixers on CPUs: one token of each sequence in C++, everything else in plain torch."""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from baton_serve.engine.kernels.cpu.recurrent import CpuRecurrentSteps, SlotState
from baton_serve.engine.kernels.metadata import Norm
from baton_serve.engine.kernels.mixers import DeltaHeads, LatentRows, PackedSequences, ScanChannels, StateSpaceHeads
from baton_serve.engine.kernels.reference import mixers as twin


class CpuMixers:
    """Implements `MixerKernels` by C++ kernels for steps of one token, and by plain torch for all others. `library` is
    the result of `load_kernels`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._steps = CpuRecurrentSteps(library)

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
        if sequences.max_len == 1 and not _has_padding(sequences):
            state = SlotState(states, sequences.slots)
            output = self._steps.convolution(x, weight, bias, state, has_silu=has_silu)
            if output is not None:
                return output
        return twin.convolve(x, weight, bias, states, sequences, has_silu=has_silu)

    def delta_rule(self, heads: DeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        if sequences.max_len == 1 and not _has_padding(sequences):
            keys = heads.num_key_heads * heads.key_size
            query, key, value = torch.split(heads.qkv, [keys, keys, heads.qkv.shape[1] - 2 * keys], dim=1)
            query, key = (part.reshape(len(part), heads.num_key_heads, -1) for part in (query, key))
            step = functional.softplus(heads.step.float() + heads.step_bias)
            decay, beta = -torch.exp(heads.log_rate) * step, torch.sigmoid(heads.beta)
            value, state = value.reshape(len(value), heads.num_heads, -1), SlotState(states, sequences.slots)
            output = self._steps.delta_rule(query, key, value, decay, beta, state, True)
            if output is not None:
                return output
        return twin.delta_rule(heads, states, sequences)

    def state_space(self, heads: StateSpaceHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        return twin.state_space(heads, states, sequences)

    def selective_scan(self, channels: ScanChannels, states: Tensor, sequences: PackedSequences) -> Tensor:
        return twin.selective_scan(channels, states, sequences)

    def gated_norm(self, x: Tensor, gate: Tensor, norm: Norm) -> Tensor:
        return twin.gated_norm(x, gate, norm)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return twin.sigmoid_gate(x, gate)

    def latent_rows(self, rows: LatentRows, query: Tensor) -> Tensor:
        return twin.latent_rows(rows, query)


def _has_padding(sequences: PackedSequences) -> bool:
    return bool((sequences.slots < 0).any())
