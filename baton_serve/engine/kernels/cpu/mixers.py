"""The kernels of token mixers on CPUs, in C++. Plain torch computes what the library does not support."""

import ctypes

from torch import Tensor

from baton_serve.engine.kernels.cpu.layers import SIGMOID, GateKernel
from baton_serve.engine.kernels.cpu.recurrent import CpuRecurrentSteps, SlotState
from baton_serve.engine.kernels.metadata import Norm
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


class CpuMixers:
    """Implements `MixerKernels` by C++ kernels. `library` is the result of `load_kernels`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._steps = CpuRecurrentSteps(library)
        self._gates = GateKernel(library)

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
        return twin.latent_rows(rows, query)
