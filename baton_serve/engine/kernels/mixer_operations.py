"""Compares kernels of token mixers (linear attention, state spaces) with their twins, and joins the right ones."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_serve.engine.kernels.interfaces import Norm, PackedWeight
from baton_serve.engine.kernels.mixers import (
    ChannelDeltaHeads,
    DeltaHeads,
    InnerCheckpoints,
    LatentRows,
    LightningHeads,
    MixerKernels,
    MixerShapes,
    PackedSequences,
    ScanChannels,
    StateSpaceHeads,
    StateSpaceShapes,
)
from baton_serve.engine.kernels.operations import EPS, ROWS, Draw, ProofShapes
from baton_serve.engine.kernels.prover import Operation

MIXER_OPERATIONS = (
    "short convolution",
    "delta rule",
    "delta rule by channel",
    "lightning attention",
    "gated norm",
    "output gate",
    "latent rows",
    "state space",
    "selective scan",
)
"""Names of the operations, in the order of `ComposedMixers`."""
STEPS = (((1, 1, 1, 1), (4, -1, 0, 3)), ((70, 1, 3, 130), (2, 5, 0, 1)))
"""Lengths and slots of sequences: with one token each, one of them padding, and with prompts."""
INNER_ROWS, INNER_TOKENS = (4, -1, -1, 3), (64, 0, 0, 128)
"""The inner checkpoints of the prompts."""
KINDS = ("one token each", "prompts")
NUM_SLOTS = 6
LOG_RATE = -2.0
"""Mean logarithm of the rates of decay. They are so slow that a chunk depends on the one before it."""


@dataclass(frozen=True, slots=True)
class ComposedMixers:
    """Implements `MixerKernels` by several other implementations, one for each operation."""

    convolutions: MixerKernels
    delta_rules: MixerKernels
    channel_delta_rules: MixerKernels
    lightnings: MixerKernels
    gated_norms: MixerKernels
    output_gates: MixerKernels
    latents: MixerKernels
    state_spaces: MixerKernels
    selective_scans: MixerKernels

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
        return self.convolutions.convolve(x, weight, bias, states, sequences, has_silu=has_silu)

    def delta_rule(self, heads: DeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        return self.delta_rules.delta_rule(heads, states, sequences)

    def channel_delta_rule(self, heads: ChannelDeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        return self.channel_delta_rules.channel_delta_rule(heads, states, sequences)

    def lightning(self, heads: LightningHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        return self.lightnings.lightning(heads, states, sequences)

    def state_space(self, heads: StateSpaceHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
        return self.state_spaces.state_space(heads, states, sequences)

    def selective_scan(self, channels: ScanChannels, states: Tensor, sequences: PackedSequences) -> Tensor:
        return self.selective_scans.selective_scan(channels, states, sequences)

    def gated_norm(self, x: Tensor, gate: Tensor, norm: Norm) -> Tensor:
        return self.gated_norms.gated_norm(x, gate, norm)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.output_gates.sigmoid_gate(x, gate)

    def latent_rows(self, rows: LatentRows, query: Tensor) -> Tensor:
        return self.latents.latent_rows(rows, query)

    def pack_heads(self, weights: Tensor) -> Tensor | PackedWeight:
        return self.latents.pack_heads(weights)

    def multiply_heads(self, x: Tensor, weights: Tensor | PackedWeight, output: Tensor) -> None:
        self.latents.multiply_heads(x, weights, output)


_Run = Callable[[MixerKernels], tuple[Tensor, ...]]


def mixer_operations(shapes: ProofShapes, device: torch.device) -> list[Operation[MixerKernels]]:
    """Return the comparisons with plain torch for the operations of linear attention, state spaces and latent attention
    that a model with these shapes needs.
    """
    draw, own, tolerance = Draw(device, shapes.dtype), shapes.mixers, shapes.tolerance
    found: list[Operation[MixerKernels]] = []
    if own.num_heads:
        heads = f"{own.num_heads} heads, {own.num_key_heads} key heads of {own.key_size}"
        channels = 2 * own.num_key_heads * own.key_size + own.num_heads * own.value_size
        for kind, step in zip(KINDS, STEPS, strict=True):
            sequences, count = _sequences(step, device), sum(step[0])
            convolved = _convolution(channels, own.taps, sequences, count, draw, has_bias=False)
            found.append(Operation("short convolution", f"{channels} channels, {kind}", convolved, tolerance))
            if own.has_channel_decay:
                ruled = _channel_delta_rule(own, sequences, count, draw)
                found.append(Operation("delta rule by channel", f"{heads}, {kind}", ruled, 2 * tolerance))
            else:
                ruled = _delta_rule(own, sequences, count, draw)
                found.append(Operation("delta rule", f"{heads}, {kind}", ruled, 2 * tolerance))
    if own.num_heads and not own.has_channel_decay:
        found.append(Operation("gated norm", heads, _gated_norm(own, draw), tolerance))
        found.append(Operation("output gate", heads, _output_gate(own, draw), tolerance))
    if own.num_lightning_heads:
        for kind, step in zip(KINDS, STEPS, strict=True):
            shape = f"{own.num_lightning_heads} heads of {own.lightning_size}, {kind}"
            attended = _lightning(own, _sequences(step, device), sum(step[0]), draw)
            found.append(Operation("lightning attention", shape, attended, 2 * tolerance))
    for space in own.spaces:
        found += _space_operations(space, draw, tolerance)
    if own.rank:
        # All orders of pairs, although a model has one: they are one kernel with other constants.
        for is_interleaved, keeps_order in ((True, True), (True, False), (False, False)):
            shape = f"latents of {own.rank} + {own.rotary_size}{', neighbours' if is_interleaved else ''}"
            latents = _latent_rows(own, draw, is_interleaved=is_interleaved, keeps_order=keeps_order)
            found.append(Operation("latent rows", f"{shape}{' kept' if keeps_order else ''}", latents, tolerance))
    return found


def _sequences(step: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device) -> PackedSequences:
    lengths, slots = step
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    inner: InnerCheckpoints | None = None
    if max(lengths) > 1:
        tokens = torch.tensor(INNER_TOKENS, dtype=torch.int32, device=device)
        inner = InnerCheckpoints(torch.tensor(INNER_ROWS, device=device), tokens)
    return PackedSequences(starts, torch.tensor(slots, device=device), max(lengths), inner)


def _space_operations(own: StateSpaceShapes, draw: Draw, tolerance: float) -> list[Operation[MixerKernels]]:
    """Return the comparisons for layers of a state space of these shapes."""
    found: list[Operation[MixerKernels]] = []
    channels = own.num_heads * max(own.head_dim, 1) + 2 * own.num_groups * own.state_size * bool(own.head_dim)
    for kind, step in zip(KINDS, STEPS, strict=True):
        sequences, count = _sequences(step, draw.device), sum(step[0])
        convolved = _convolution(channels, own.taps, sequences, count, draw, has_bias=True)
        found.append(Operation("short convolution", f"{channels} channels, {kind}", convolved, tolerance))
        shape = f"{own.num_heads} heads of {own.head_dim}" if own.head_dim else f"{own.num_heads} channels"
        shape = f"{shape}, states of {own.state_size}, {kind}"
        if own.head_dim:
            found.append(Operation("state space", shape, _state_space(own, sequences, count, draw), 2 * tolerance))
        else:
            scanned = _selective_scan(own, sequences, count, draw)
            found.append(Operation("selective scan", shape, scanned, 2 * tolerance))
    return found


def _state_space(own: StateSpaceShapes, sequences: PackedSequences, count: int, draw: Draw) -> _Run:
    width = own.num_heads * own.head_dim + 2 * own.num_groups * own.state_size
    heads = StateSpaceHeads(
        xbc=draw.values(count, width),
        step=draw.values(count, own.num_heads),
        log_rate=draw.normal(own.num_heads) + LOG_RATE,
        step_bias=draw.normal(own.num_heads),
        skip=draw.normal(own.num_heads),
        num_groups=own.num_groups,
        state_size=own.state_size,
        step_limits=own.step_limits,
    )
    states = draw.normal(NUM_SLOTS, own.num_heads, own.head_dim, own.state_size)

    def run(kernels: MixerKernels) -> tuple[Tensor, ...]:
        stored = states.clone()
        return kernels.state_space(heads, stored, sequences), stored

    return run


def _selective_scan(own: StateSpaceShapes, sequences: PackedSequences, count: int, draw: Draw) -> _Run:
    channels = ScanChannels(
        x=draw.values(count, own.num_heads),
        gate=draw.values(count, own.num_heads),
        step=draw.values(count, own.num_heads),
        b=draw.values(count, own.state_size),
        c=draw.values(count, own.state_size),
        log_rate=draw.normal(own.num_heads, own.state_size) + LOG_RATE,
        skip=draw.normal(own.num_heads),
    )
    states = draw.normal(NUM_SLOTS, own.num_heads, own.state_size)

    def run(kernels: MixerKernels) -> tuple[Tensor, ...]:
        stored = states.clone()
        return kernels.selective_scan(channels, stored, sequences), stored

    return run


def _convolution(
    channels: int, taps: int, sequences: PackedSequences, count: int, draw: Draw, *, has_bias: bool
) -> _Run:
    x, weight, states = (
        draw.values(count, channels),
        draw.values(channels, taps),
        draw.values(NUM_SLOTS, channels, taps),
    )
    bias = draw.values(channels) if has_bias else None

    def run(kernels: MixerKernels) -> tuple[Tensor, ...]:
        # All slots are compared: those of other sequences must stay as they were.
        stored = states.clone()
        return kernels.convolve(x, weight, bias, stored, sequences, has_silu=True), stored

    return run


def _delta_rule(own: MixerShapes, sequences: PackedSequences, count: int, draw: Draw) -> _Run:
    width = 2 * own.num_key_heads * own.key_size + own.num_heads * own.value_size
    heads = DeltaHeads(
        qkv=draw.values(count, width),
        beta=draw.values(count, own.num_heads),
        step=draw.values(count, own.num_heads),
        log_rate=draw.normal(own.num_heads) + LOG_RATE,
        step_bias=draw.normal(own.num_heads),
        num_key_heads=own.num_key_heads,
        key_size=own.key_size,
    )
    states = draw.normal(NUM_SLOTS, own.num_heads, own.key_size, own.value_size)

    def run(kernels: MixerKernels) -> tuple[Tensor, ...]:
        stored = states.clone()
        return kernels.delta_rule(heads, stored, sequences), stored

    return run


def _channel_delta_rule(own: MixerShapes, sequences: PackedSequences, count: int, draw: Draw) -> _Run:
    heads = ChannelDeltaHeads(
        qkv=draw.values(count, own.num_heads * (2 * own.key_size + own.value_size)),
        beta=draw.values(count, own.num_heads),
        # Some channels forget within a few tokens, others hardly.
        decay=-(2.0 * draw.normal(count, own.num_heads, own.key_size) + LOG_RATE).exp(),
    )
    states = draw.normal(NUM_SLOTS, own.num_heads, own.key_size, own.value_size)

    def run(kernels: MixerKernels) -> tuple[Tensor, ...]:
        stored = states.clone()
        return kernels.channel_delta_rule(heads, stored, sequences), stored

    return run


def _lightning(own: MixerShapes, sequences: PackedSequences, count: int, draw: Draw) -> _Run:
    num_heads, size = own.num_lightning_heads, own.lightning_size
    # The heads of a model forget at rates from almost 1 to 1/256 and less.
    rate = torch.linspace(0.0, -8.0, num_heads, device=draw.device).exp2()
    heads = LightningHeads(draw.values(count, num_heads * 3 * size), rate)
    states = draw.normal(NUM_SLOTS, num_heads, size, size)

    def run(kernels: MixerKernels) -> tuple[Tensor, ...]:
        stored = states.clone()
        return kernels.lightning(heads, stored, sequences), stored

    return run


def _gated_norm(own: MixerShapes, draw: Draw) -> _Run:
    x, gate = draw.values(ROWS, own.num_heads, own.value_size), draw.values(ROWS, own.num_heads, own.value_size)
    norm = Norm(draw.values(own.value_size), EPS)
    return lambda kernels: (kernels.gated_norm(x, gate, norm),)


def _output_gate(own: MixerShapes, draw: Draw) -> _Run:
    # Gates are columns of a wider product.
    x, gate = draw.values(ROWS, own.value_size), draw.values(ROWS, own.value_size + 8)[:, 8:]
    return lambda kernels: (kernels.sigmoid_gate(x, gate),)


def _latent_rows(own: MixerShapes, draw: Draw, *, is_interleaved: bool, keeps_order: bool) -> _Run:
    width, heads = own.rank + own.rotary_size, own.num_latent_heads
    angles = draw.normal(ROWS, own.rotary_size // 2).repeat(1, 2)
    rows = LatentRows(
        draw.values(ROWS, width),
        # The kernel skips the part that does not rotate, so its size (16) does not have to be the model's.
        draw.values(ROWS, heads, 16 + own.rotary_size),
        Norm(draw.values(own.rank), EPS),
        (angles.cos(), angles.sin()),
        is_interleaved,
        keeps_order,
    )

    keys = draw.values(heads, 16, own.rank)

    def run(kernels: MixerKernels) -> tuple[Tensor, ...]:
        query = torch.zeros(ROWS, heads, width, dtype=draw.dtype, device=draw.device)
        kernels.multiply_heads(rows.query[..., :16], kernels.pack_heads(keys), query[..., : own.rank])
        return kernels.latent_rows(rows, query), query

    return run
