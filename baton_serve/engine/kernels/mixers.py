"""Defines the interface of the kernels of token mixers: linear attention, state spaces, and projections of latent
attention (MLA).

The tokens of a step's sequences lie one after another. Each sequence has a row in the memory of states, its slot, in
which kernels change its states. Kernels read slots and lengths from the device, so that captured graphs serve any.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton_serve.engine.kernels.interfaces import Norm, PackedWeight

CHECKPOINT_STEP_TOKENS = 64
"""After a multiple of so many tokens of a sequence in a step, kernels of accelerators can also store the states: their
chunks end there."""


@dataclass(frozen=True, slots=True)
class InnerCheckpoints:
    """Places in which a step stores states of some sequences before their last token, beside those after it."""

    slots: Tensor
    """int64 [num_seqs]: the row for the states of each sequence; negative: none are stored."""
    tokens: Tensor
    """int32 [num_seqs]: after how many of the sequence's tokens in the step, at least 1 and not all. On accelerators a
    multiple of `CHECKPOINT_STEP_TOKENS`."""


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """The sequences of a step, whose tokens lie one after another without padding, and the slots of their recurrent
    states.
    """

    starts: Tensor
    """int32 [num_seqs + 1]: prefix sums of tokens. A sequence without tokens is allowed, and its state stays."""
    slots: Tensor
    """int64 [num_seqs]: each sequence's row in the states. Negative: padding, which has no state."""
    max_len: int
    """Largest number of tokens of a sequence. If it is 1, each sequence has exactly one token."""
    checkpoints: InnerCheckpoints | None = None
    """None: the step stores no states but those after each sequence's last token."""

    def batches(self, states: Tensor) -> Iterator[tuple[Tensor | slice, Tensor]]:
        """Iterate over batches of sequences of equal length, each as (tokens of the step, slots of the states): all
        sequences with one token together if no other is longer, or else each sequence by itself. Padding is left out.

        The caller updates `states` [num_slots, ...] before it takes the next batch. A sequence with an inner checkpoint
        comes as two batches, between which its state is copied. The lengths are read on the host, so graphs cannot
        capture what calls it.
        """
        if self.max_len == 1:
            rows = (self.slots >= 0).nonzero()[:, 0]
            # Without padding, as in most steps, no row has to be picked.
            if len(rows):
                yield slice(None) if len(rows) == len(self.slots) else rows, self.slots[rows]
            return
        starts, slots, inner = self.starts.tolist(), self.slots.tolist(), self.checkpoints
        targets = [-1] * len(slots) if inner is None else inner.slots.tolist()
        for number, slot in enumerate(slots):
            start, end, own = starts[number], starts[number + 1], self.slots[number : number + 1]
            if slot < 0 or end == start:
                continue
            if inner is not None and targets[number] >= 0:
                middle = start + int(inner.tokens[number])
                yield slice(start, middle), own
                states[targets[number]] = states[slot]
                start = middle
            yield slice(start, end), own


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The inputs of the gated delta rule (https://arxiv.org/abs/2412.06464) for the tokens of a step.

    Each key head serves n = num_heads / num_key_heads value heads: head i the heads i * n to i * n + n - 1. Queries and
    keys are scaled to length 1 by the kernel.
    """

    qkv: Tensor
    """[num_tokens, 2 * num_key_heads * key_size + num_heads * value_size]: queries, keys and values side by side."""
    beta: Tensor
    """[num_tokens, num_heads]: the step sizes before their sigmoid."""
    step: Tensor
    """[num_tokens, num_heads]: the time steps of the decay before their bias and softplus."""
    log_rate: Tensor
    """float32 [num_heads]: the logarithm of the rate of decay."""
    step_bias: Tensor
    """float32 [num_heads]: added to the time steps."""
    num_key_heads: int
    key_size: int

    @property
    def num_heads(self) -> int:
        return self.beta.shape[1]

    @property
    def value_size(self) -> int:
        return (self.qkv.shape[1] - 2 * self.num_key_heads * self.key_size) // self.num_heads


@dataclass(frozen=True, slots=True)
class ChannelDeltaHeads:
    """The inputs of the gated delta rule with a decay for each channel of the keys, Kimi Delta Attention
    (https://arxiv.org/abs/2510.26692), for the tokens of a step. Queries and keys are scaled to length 1 by the kernel.
    """

    qkv: Tensor
    """[num_tokens, num_heads * (2 * key_size + value_size)]: queries, keys and values side by side."""
    beta: Tensor
    """[num_tokens, num_heads]: the step sizes before their sigmoid."""
    decay: Tensor
    """[num_tokens, num_heads, key_size]: the logarithms of the decays, which are not positive, of any dtype."""

    @property
    def num_heads(self) -> int:
        return self.decay.shape[1]

    @property
    def key_size(self) -> int:
        return self.decay.shape[2]

    @property
    def value_size(self) -> int:
        return self.qkv.shape[1] // self.num_heads - 2 * self.key_size


@dataclass(frozen=True, slots=True)
class LightningHeads:
    """The inputs of lightning attention (https://arxiv.org/abs/2401.04658) for the tokens of a step: linear attention
    in which each head forgets at a constant rate.
    """

    qkv: Tensor
    """[num_tokens, num_heads * 3 * size]: the query, the key and the value of each head side by side."""
    rate: Tensor
    """float32 [num_heads]: a state decays by exp(-rate) with each token."""

    @property
    def num_heads(self) -> int:
        return len(self.rate)

    @property
    def size(self) -> int:
        return self.qkv.shape[1] // (3 * self.num_heads)


@dataclass(frozen=True, slots=True)
class StateSpaceHeads:
    """The inputs of Mamba-2's recurrence (https://arxiv.org/abs/2405.21060) for the tokens of a step.

    Each head has one rate of decay. B and C of a group serve n = num_heads / num_groups heads: those of group i the
    heads i * n to i * n + n - 1.
    """

    xbc: Tensor
    """[num_tokens, num_heads * head_dim + 2 * num_groups * state_size]: the inputs, B and C side by side."""
    step: Tensor
    """[num_tokens, num_heads]: the time steps before their bias and softplus."""
    log_rate: Tensor
    """[num_heads]: the logarithm of the rate of decay, of any dtype, as are the two that follow."""
    step_bias: Tensor
    """[num_heads]: added to the time steps."""
    skip: Tensor
    """[num_heads]: the factor by which an input is added to its output (D)."""
    num_groups: int
    state_size: int
    step_limits: tuple[float, float]
    """The smallest and the largest time step of sequences with several tokens. A single token is not limited, as in
    transformers and in the kernels of the models' authors."""

    @property
    def num_heads(self) -> int:
        return self.step.shape[1]

    @property
    def head_dim(self) -> int:
        return (self.xbc.shape[1] - 2 * self.num_groups * self.state_size) // self.num_heads


@dataclass(frozen=True, slots=True)
class ScanChannels:
    """The inputs of Mamba-1's recurrence, the selective scan (https://arxiv.org/abs/2312.00752), for the tokens of a
    step. Each channel has a state of its own, of `state_size` elements.
    """

    x: Tensor
    """[num_tokens, channels]: the inputs, after their convolution."""
    gate: Tensor
    """[num_tokens, channels]: the outputs are multiplied by its SiLU."""
    step: Tensor
    """[num_tokens, channels]: the time steps before their softplus."""
    b: Tensor
    """[num_tokens, state_size]: what the inputs of all channels are multiplied by, on the way to the state."""
    c: Tensor
    """[num_tokens, state_size]: what the states of all channels are multiplied by, on the way to the output."""
    log_rate: Tensor
    """[channels, state_size]: the logarithms of the rates of decay, of any dtype, as is `skip`."""
    skip: Tensor
    """[channels]: the factor by which an input is added to its output (D)."""


@dataclass(frozen=True, slots=True)
class LatentRows:
    """The inputs of a layer of latent attention (MLA) for the tokens of a step, as its projections have computed
    them.
    """

    latents: Tensor
    """[num_tokens, rank + rotary size]: the latent before its norm, and the part of the key that rotates."""
    query: Tensor
    """[num_tokens, num_heads, size + rotary size]: the part that rotates is at the end."""
    norm: Norm
    rotation: tuple[Tensor, Tensor]
    """cos and sin, float32 [num_tokens, rotary size], of which the first half of the columns is read."""
    is_interleaved: bool
    """True if the pairs that rotate are neighbours in the inputs."""
    keeps_order: bool
    """True if rotated pairs stay neighbours. Else the first elements of all pairs come first."""


@dataclass(frozen=True, slots=True)
class StateSpaceShapes:
    """The sizes of a layer of a state space: Mamba-2, or Mamba-1 if `head_dim` is 0, whose heads are channels."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    taps: int
    """Length of the convolution before it."""
    step_limits: tuple[float, float]


@dataclass(frozen=True, slots=True)
class MixerShapes:
    """The sizes of a model's linear attention, state spaces and latent attention (MLA), as far as kernels depend on
    them; 0 for what the model does not have.
    """

    num_key_heads: int = 0
    num_heads: int = 0
    """Heads of linear attention."""
    key_size: int = 0
    value_size: int = 0
    taps: int = 0
    rank: int = 0
    """Size of a latent."""
    rotary_size: int = 0
    """Size of the part of a key that rotates."""
    num_latent_heads: int = 0
    has_channel_decay: bool = False
    """The delta rule has a decay for each channel of the keys."""
    num_lightning_heads: int = 0
    lightning_size: int = 0
    spaces: tuple[StateSpaceShapes, ...] = ()
    """The different shapes of the model's state spaces."""


NO_MIXERS = MixerShapes()


class MixerKernels(Protocol):
    """The interface of the kernels for linear attention and state spaces, and for the parts of latent attention (MLA)
    besides attention itself. Modules and objects can implement it.

    Kernels that update the states of sequences also store those of `sequences.checkpoints`.
    """

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
        """Return the causal convolution of each channel of x [num_tokens, num_channels], of the same shape, with SiLU
        applied if `has_silu`.

        `weight` is [num_channels, taps]. `states` [num_slots, num_channels, taps] holds the last inputs of each
        sequence in x's dtype; those of the step's sequences are updated.
        """
        ...

    def delta_rule(self, heads: DeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        """Compute the gated delta rule for the tokens of a step, and return [num_tokens, num_heads, value_size]. The
        recurrent states of its sequences are updated in `states`, float32 [num_slots, num_heads, key_size, value_size].
        """
        ...

    def channel_delta_rule(self, heads: ChannelDeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        """Compute the gated delta rule with a decay for each channel for the tokens of a step, and return [num_tokens,
        num_heads, value_size]. The recurrent states of its sequences are updated in `states`, float32 [num_slots,
        num_heads, key_size, value_size].
        """
        ...

    def lightning(self, heads: LightningHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        """Compute lightning attention for the tokens of a step, and return [num_tokens, num_heads, size]. The recurrent
        states of its sequences are updated in `states`, float32 [num_slots, num_heads, size of keys, size of values].
        """
        ...

    def state_space(self, heads: StateSpaceHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        """Compute Mamba-2's recurrence for the tokens of a step, and return [num_tokens, num_heads, head_dim]. The
        recurrent states of its sequences are updated in `states`, float32 [num_slots, num_heads, head_dim, state_size].
        """
        ...

    def selective_scan(self, channels: ScanChannels, states: Tensor, sequences: PackedSequences) -> Tensor:
        """Compute Mamba-1's recurrence for the tokens of a step, and return [num_tokens, channels], times SiLU(gate).
        The recurrent states of its sequences are updated in `states`, float32 [num_slots, channels, state_size].
        """
        ...

    def gated_norm(self, x: Tensor, gate: Tensor, norm: Norm) -> Tensor:
        """Return the RMSNorm of x [num_tokens, num_heads, size] times silu(gate), of the same shape. The product is
        rounded once.
        """
        ...

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x [num_tokens, width] times sigmoid(gate), of the same shape."""
        ...

    def latent_rows(self, rows: LatentRows, query: Tensor) -> Tensor:
        """Return the rows that the KV cache stores, [num_tokens, 1, rank + rotary size]: the norm of each latent, and
        the rotated part of the key. Also store the rotated part of each query head at the end of `query`, [num_tokens,
        num_heads, rank + rotary size].
        """
        ...

    def pack_heads(self, weights: Tensor) -> Tensor | PackedWeight:
        """Return `weights` [num_heads, inputs, outputs] in the form that `multiply_heads` reads fastest; a tensor if it
        is the given one.
        """
        ...

    def multiply_heads(self, x: Tensor, weights: Tensor | PackedWeight, output: Tensor) -> None:
        """Store the products of each head of x [num_tokens, num_heads, inputs] with its own weights, which `pack_heads`
        has returned, in `output` [num_tokens, num_heads, outputs].
        """
        ...
