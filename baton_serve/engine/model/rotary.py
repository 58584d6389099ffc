"""Fixes rotary frequencies that transformers would choose in each forward pass by the longest position in it.

In a batch of unrelated requests, one request's KV would then depend on another's length. So the choice is made once,
from `max_model_len`, as vLLM does.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton_serve.engine.errors import UnsupportedModelError

FIXED = "fixed"
"""Rope type of modules whose frequencies are fixed; transformers changes none of this name."""


def freeze(module: nn.Module, max_model_len: int) -> str:
    """Fix the rotary frequencies of a model whose frequencies depend on the length of the text, so that cached KV stays
    valid. Return a description for the fingerprint; "" if nothing depends on the length. Raises `UnsupportedModelError`
    for frequencies that depend on the length in different ways per layer type.
    """
    variants: set[str] = set()
    for part in module.modules():
        kind = getattr(part, "rope_type", None)
        if isinstance(kind, dict) and any("dynamic" in k or k == "longrope" for k in kind.values()):
            raise UnsupportedModelError(
                "rotary frequencies that change with the length for each layer type are not supported"
            )
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            variants.add(_freeze_one(part, kind, max_model_len))
    return ",".join(sorted(variants))


def _freeze_one(part: nn.Module, kind: str, max_model_len: int) -> str:
    """Fix the frequencies of one rotary module."""
    config: Any = part.config
    rules = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    native = rules.get("original_max_position_embeddings") or config.max_position_embeddings
    # transformers looks at this name to decide whether to update the frequencies
    object.__setattr__(part, "rope_type", FIXED)
    if max_model_len <= native:
        return f"{kind}:native"
    old = part.inv_freq
    assert isinstance(old, torch.Tensor)
    # Long RoPE only knows short and long: any length above the native one gives the long frequencies.
    seq_len = native + 1 if kind == "longrope" else max_model_len
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, old.device, seq_len=seq_len)
    part.register_buffer("inv_freq", frequencies.to(old.dtype), persistent=False)
    return f"{kind}:{seq_len}"
