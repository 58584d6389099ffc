"""Rotary frequencies and angles: those of dense decoders, fixed frequencies, and positions with three rows.

transformers would choose some frequencies in each forward pass by the longest position in it. In a batch of unrelated
requests, one request's KV would then depend on another's length. So the choice is made once, from `max_model_len`, as
vLLM does.

Dense decoders that are loaded without transformers have their frequencies from here.

With M-RoPE each frequency reads one of the three rows of the positions. transformers' classes of such models do it
themselves. Models that are built as another family get it here.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from baton_serve.engine.errors import UnsupportedModelError

FIXED = "fixed"
"""Rope type of modules whose frequencies are fixed; transformers changes none of this name."""


_ALTERNATING = frozenset(
    {"qwen3_5_moe_text", "qwen3_5_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text"}
)
"""Model types in which one frequency after the other reads another row. In other models sections of them do."""


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


def set_axes(twin: Any, config: Any) -> None:
    """Set in `twin`, the config of the plain text model as which a model with M-RoPE is built, from which of the three
    rows of positions each rotary frequency reads. `config` is the model's own config.
    """
    stated = (getattr(config, "rope_parameters", None) or {}).get("mrope_section")
    sections = stated or ([24, 20, 20] if config.model_type in _ALTERNATING else [16, 24, 24])  # as in transformers
    half = (getattr(twin, "head_dim", None) or twin.hidden_size // twin.num_attention_heads) // 2
    twin.position_axes = _axes(config.model_type, sections, half)


def _axes(model_type: str, sections: list[int], half: int) -> list[int]:
    """Return the row of M-RoPE positions (0, 1 or 2) from which each of `half` rotary frequencies reads. `sections` are
    the numbers of frequencies for each row.
    """
    if model_type in _ALTERNATING:
        return [turn if turn and at < 3 * sections[turn] else 0 for at, turn in ((i, i % 3) for i in range(half))]
    return [number % 3 for number, length in enumerate(sections) for _ in range(length)]


def position_axes(module: Any) -> list[int] | None:
    """Return the row of M-RoPE positions (0, 1 or 2) from which each rotary frequency of a model reads; None for models
    without M-RoPE.
    """
    stated: list[int] | None = getattr(module.config, "position_axes", None)
    sections = getattr(module.model.rotary_emb, "mrope_section", None)
    if stated is not None or sections is None:
        return stated
    return _axes(module.config.model_type, sections, len(module.model.rotary_emb.inv_freq))


def adapt_positions(module: nn.Module) -> bool:
    """Make a loaded model accept M-RoPE positions with three rows. Return False if it is not a model with M-RoPE, which
    stays as it is.
    """
    axes: list[int] | None = getattr(module.config, "position_axes", None)
    # transformers' own classes of such models accept them already.
    if axes is None:
        return any(hasattr(part, "mrope_section") for part in module.modules())
    model: Any = module.model
    rotary = model.rotary_emb
    plain = rotary.forward
    # A buffer goes with the module if its weights are moved to the device later.
    rotary.register_buffer("axes", torch.tensor(axes, device=rotary.inv_freq.device), persistent=False)

    def forward(hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if position_ids.dim() == 2:
            rotated: tuple[Tensor, Tensor] = plain(hidden, position_ids)
            return rotated
        angles = row_angles(position_ids[:, 0], rotary.axes, rotary.inv_freq)[None]
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
        return cos.to(hidden.dtype), sin.to(hidden.dtype)

    rotary.forward = forward
    return True


def row_angles(positions: Tensor, axes: Tensor, frequencies: Tensor) -> Tensor:
    """Return the rotary angles [num_tokens, half] for M-RoPE positions [3, num_tokens]. `axes`, int64 [half] on the
    device, says from which row each frequency reads.
    """
    # A list of numbers would be copied to the device in each step, which a graph cannot capture.
    return positions.index_select(0, axes).T.float() * frequencies.float()


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
