"""Random inputs for the kernels of token mixers."""

import torch
from torch import Tensor

from baton_serve.engine.kernels import DeltaHeads, PackedSequences
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
