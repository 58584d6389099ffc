"""Counters by which the programs that share a cut row find out which of them is last."""

from functools import lru_cache

import torch
from torch import Tensor

MAX_COUNTERS = 1 << 16


@lru_cache(maxsize=16)
def counters_of(device: torch.device) -> Tensor:
    """int32 zeros, one per tile of a product; each product leaves zeros. A device computes one product after the
    other."""
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
