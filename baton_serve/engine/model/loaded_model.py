"""A loaded model as the rest of the engine sees it. Does not import transformers, which takes seconds."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from baton_serve.engine.kernels import AttentionSpec

LoadProgress = Callable[[str, float], None]
"""Told what is being done and how far it is, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    module: nn.Module
    name: str
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    num_kv_heads: int
    """Of this rank."""
    head_dim: int
    num_planes: int
    """Of the KV cache: K and V, or the latent alone."""
    specs: list[AttentionSpec]
    """One per layer."""
    eos_token_ids: frozenset[int]
    fingerprint: str
    is_whole: bool = True
    """False: a rank's part of it, whose layers' outputs are to be summed over the ranks."""
