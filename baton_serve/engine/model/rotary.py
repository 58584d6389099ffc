"""Computes rotary frequencies (RoPE) of dense decoders, stretches them (`rope_scaling` of Llama 3), and fixes those
that depend on length.

transformers would choose some frequencies in each forward pass by the longest position in it. In a batch of unrelated
requests, one request's KV would then depend on another's length. So the choice is made once, from `max_model_len`, as
vLLM does.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from baton_serve.engine.errors import UnsupportedModelError

FIXED = "fixed"
"""Rope type of modules whose frequencies are fixed; transformers changes none of this name."""


class Rotary(nn.Module):
    """Computes the cosines and sines that rotary embeddings need, in models that are loaded without transformers."""

    inv_freq: Tensor

    def __init__(self, frequencies: Tensor) -> None:
        """`frequencies` are in radians per position, float32 [head_dim / 2], on the device of the model."""
        super().__init__()
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the rotary angles at `positions` [1, num_tokens], each [1, num_tokens,
        head_dim]; both halves of head_dim are equal. They have the dtype of `like`."""
        halves = positions[..., None].float() * self.inv_freq
        angles = torch.cat((halves, halves), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotary_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return rotary frequencies in radians per position, float32 [head_dim / 2], on the host. `theta` is their base.

    The operations are those of transformers in the same order: other rounding would change the model's results.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    return 1.0 / (theta**exponents)


def stretched(
    frequencies: Tensor, *, factor: float, low_freq_factor: float, high_freq_factor: float, original_length: int
) -> Tensor:
    """Return rotary frequencies scaled for longer contexts, as Llama 3.1 does: low frequencies are divided by a factor,
    high ones kept, and those in between blended.

    See https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py, apply_scaling.
    """
    longest, shortest = original_length / low_freq_factor, original_length / high_freq_factor
    waves = 2 * math.pi / frequencies
    scaled = torch.where(waves > longest, frequencies / factor, frequencies)
    kept = (original_length / waves - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - kept) * scaled / factor + kept * scaled
    return torch.where((waves >= shortest) & (waves <= longest), blended, scaled)


def freeze(module: nn.Module, max_model_len: int) -> str:
    """Fix the rotary frequencies of a model in which they depend on the length of the text, so that cached KV stays
    valid. Return a text for the fingerprint that says how they were fixed; "" if no frequency depends on the length.
    Raises `UnsupportedModelError` if layer types depend on it in different ways.
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
    """Fix the frequencies of one rotary module of the type `kind` for texts of up to `max_model_len` tokens. Return a
    text for the fingerprint that says how they were fixed.
    """
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
    # Takes seconds: fused layers import this module for models that are loaded without transformers.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, old.device, seq_len=seq_len)
    part.register_buffer("inv_freq", frequencies.to(old.dtype), persistent=False)
    return f"{kind}:{seq_len}"
