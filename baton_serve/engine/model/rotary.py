"""Fixes rotary frequencies that transformers would choose per forward pass from the longest position in it.

In a batch of strangers that choice would make one request's KV depend on another's length. So it is made once,
from `max_model_len`, as vLLM does.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton_serve.engine.errors import UnsupportedModelError

FIXED = "fixed"


def freeze(module: nn.Module, max_model_len: int) -> str:
    """Names what was chosen, for the fingerprint; empty where nothing depends on it."""
    variants: set[str] = set()
    for part in module.modules():
        kind = getattr(part, "rope_type", None)
        if isinstance(kind, dict) and any("dynamic" in k or k == "longrope" for k in kind.values()):
            raise UnsupportedModelError("rotary frequencies that change with the length, per layer type")
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            variants.add(_freeze_one(part, kind, max_model_len))
    return ",".join(sorted(variants))


def _freeze_one(part: nn.Module, kind: str, max_model_len: int) -> str:
    config: Any = part.config
    rules = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    native = rules.get("original_max_position_embeddings") or config.max_position_embeddings
    object.__setattr__(part, "rope_type", FIXED)  # the update before each forward looks at this name
    if max_model_len <= native:
        return f"{kind}:native"
    old = part.inv_freq
    assert isinstance(old, torch.Tensor)
    seq_len = native + 1 if kind == "longrope" else max_model_len
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, old.device, seq_len=seq_len)
    part.register_buffer("inv_freq", frequencies.to(old.dtype), persistent=False)
    return f"{kind}:{seq_len}"
