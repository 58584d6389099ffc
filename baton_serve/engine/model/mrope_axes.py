"""Decides which of the three rows of M-RoPE positions each rotary frequency reads.

transformers' classes of such models read them themselves. Models that are built as another family get it here.
"""

from typing import Any

import torch
from torch import Tensor, nn

_ALTERNATING = frozenset(
    {"qwen3_5_moe_text", "qwen3_5_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text"}
)
"""Model types in which one frequency after the other reads another row. In other models sections of them do."""


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
