"""Random inputs for the kernels of token mixers."""

import torch
from torch import Tensor

from baton_serve.engine.kernels import (
    ChannelDeltaHeads,
    DeltaHeads,
    LightningHeads,
    PackedSequences,
    ScanChannels,
    StateSpaceHeads,
)
from tests.contract.kernels.triton_batches import DEVICE

NUM_SLOTS = 6
PADDING = -1


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def packed(lengths: list[int], slots: list[int]) -> PackedSequences:
    """Return sequences of these lengths."""
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    return PackedSequences(starts, torch.tensor(slots, device=DEVICE), max(lengths))


def random_states(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return states in rows that are longer than the states, as in `StateMemory`."""
    size = torch.Size(shape).numel()
    return draw(NUM_SLOTS, size + 64, dtype=dtype)[:, :size].view(NUM_SLOTS, *shape)


def delta_heads(
    num_tokens: int, key_heads: int, heads: int, key_size: int, value_size: int, dtype: torch.dtype
) -> DeltaHeads:
    """Return inputs of the delta rule, as columns of one product."""
    width = 2 * key_heads * key_size + heads * value_size
    product = draw(num_tokens, width + 2 * heads + 3, dtype=dtype)
    return DeltaHeads(
        qkv=product[:, :width],
        beta=product[:, width : width + heads],
        step=product[:, width + heads : width + 2 * heads],
        log_rate=draw(heads),
        step_bias=draw(heads),
        num_key_heads=key_heads,
        key_size=key_size,
    )


def channel_delta_heads(
    num_tokens: int, heads: int, key_size: int, value_size: int, dtype: torch.dtype
) -> ChannelDeltaHeads:
    """Return inputs of the delta rule with a decay for each channel, as columns of one product. Some channels forget
    almost everything with one token.
    """
    width = heads * (2 * key_size + value_size)
    product = draw(num_tokens, width + heads + 3, dtype=dtype)
    decay = -(3.0 * draw(num_tokens, heads, key_size) - 2.0).exp()
    return ChannelDeltaHeads(product[:, :width], product[:, width : width + heads], decay)


def lightning_heads(num_tokens: int, heads: int, size: int, dtype: torch.dtype) -> LightningHeads:
    """Return inputs of lightning attention, as columns of a wider product."""
    qkv = draw(num_tokens, 3 * heads * size + 5, dtype=dtype)[:, : 3 * heads * size]
    return LightningHeads(qkv, torch.linspace(0.9, 0.001, heads, device=DEVICE))


def state_space_heads(
    num_tokens: int, heads: int, head_dim: int, groups: int, state_size: int, dtype: torch.dtype
) -> StateSpaceHeads:
    """Return inputs of Mamba-2, as columns of one product. Many time steps are beyond the limits."""
    width = heads * head_dim + 2 * groups * state_size
    product = draw(num_tokens, width + heads + 3, dtype=dtype)
    return StateSpaceHeads(
        xbc=product[:, :width],
        step=product[:, width : width + heads],
        log_rate=draw(heads) - 1.0,
        step_bias=draw(heads, dtype=dtype) - 1.0,
        skip=draw(heads, dtype=dtype),
        num_groups=groups,
        state_size=state_size,
        step_limits=(0.2, 0.6),
    )


def scan_channels(num_tokens: int, channels: int, state_size: int, dtype: torch.dtype) -> ScanChannels:
    """Return inputs of Mamba-1, as columns of two products."""
    first, second = draw(num_tokens, 2 * channels, dtype=dtype), draw(num_tokens, 2 * state_size + 3, dtype=dtype)
    return ScanChannels(
        x=first[:, :channels],
        gate=first[:, channels:],
        step=draw(num_tokens, channels, dtype=dtype),
        b=second[:, 3 : 3 + state_size],
        c=second[:, 3 + state_size :],
        log_rate=draw(channels, state_size) - 1.0,
        skip=draw(channels, dtype=dtype),
    )
