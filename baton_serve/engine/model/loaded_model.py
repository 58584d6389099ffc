"""A loaded model as the rest of the engine sees it. This module does not import transformers, which takes seconds."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from baton_serve.engine.kernels import AttentionSpec
from baton_serve.engine.kv.state_memory import StatePart

LoadProgress = Callable[[str, float], None]
"""Called with the current phase of loading and its finished fraction, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights on the device, and what the scheduler and the KV cache need to know about it."""

    module: nn.Module
    name: str
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    num_kv_heads: int
    """Number of KV heads of this rank."""
    head_dim: int
    num_planes: int
    """Planes of the KV cache: 2 for K and V, 1 for latents (MLA)."""
    specs: list[AttentionSpec]
    """Attention parameters of each layer."""
    eos_token_ids: frozenset[int]
    """Tokens that end a sequence."""
    fingerprint: str
    """Hash of everything that changes the KV: config, weights, rounding.

    Equal fingerprints mean exchangeable blocks.
    """
    is_whole: bool = True
    """False if this is one rank's part, whose outputs have to be summed over the ranks."""
    kv_layers: tuple[int, ...] | None = None
    """The model's number of each layer that has KV, in the order of the cache and of `specs`; None: all layers."""
    states: tuple[StatePart, ...] = ()
    """The recurrent states of layers of linear attention and state spaces."""
