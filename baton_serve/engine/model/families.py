"""Describes how decoder families differ from Llama (norms, scales, activations, rotary embedding), in one table for
fused layers.

A row names the attributes of transformers' modules and configs that hold a norm, a scale or an activation. Whatever
is not named is as in Llama.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton_serve.engine.kernels import Norm
from baton_serve.engine.model.mrope_axes import position_axes, row_angles
from baton_serve.engine.model.pipeline_stage import own_layers

GELU_TANH = "gelu_pytorch_tanh"
ACTIVATIONS = ("silu", GELU_TANH)
"""Activations of gates that fused layers compute, as configs name them."""


def _always(_: Any) -> bool:
    return True


def _rotates_in_windows(attention: Any) -> bool:
    return attention.sliding_window is not None


def _rotates_unless_global(attention: Any) -> bool:
    return attention.sliding_window is None or attention.is_sliding


def _rotates_by_rule(attention: Any) -> bool:
    return bool(attention.use_rope)


def _is_sequential(config: Any) -> bool:
    return not config.qk_layernorm and not config.use_parallel_residual


def _clips_nothing(config: Any) -> bool:
    return config.clip_qkv is None


def _has_plain_rotation(config: Any) -> bool:
    # The factor of PhiMoE's long rotations depends on the length of a step.
    return bool(config.rope_parameters["rope_type"] == "default")


@dataclass(frozen=True, slots=True)
class FamilyDescription:
    """Describes in which points the decoder layers of a model family differ from Llama's, for the fused layers."""

    input_norm: str | None = "input_layernorm"
    """The norm before attention. None: attention reads the residual."""
    attention_norm: str | None = None
    """The norm of attention's output, before it is added to the residual."""
    mlp_norm: str | None = "post_attention_layernorm"
    """The norm before the MLP. None: it reads the residual, or what attention has read if `is_parallel`."""
    mlp_output_norm: str | None = None
    attentions: tuple[str, ...] = ("self_attn",)
    """The attribute of a layer's attention, or of what takes its place."""
    mlp: str = "mlp"
    up: str | None = None
    """The first product of an MLP that has no gate. None: it has one, and the usual names."""
    down: str = "down_proj"
    is_parallel: bool = False
    """True if attention and MLP read the same input and both outputs are added to the residual."""
    is_centered: bool = False
    """True if all norms are LayerNorm instead of RMSNorm."""
    has_offset: bool = False
    """True if all norms multiply by 1 + weight."""
    has_wide_norms: bool = False
    """True if queries and keys have one norm over all heads instead of one for each head."""
    is_interleaved: bool = False
    """True if the pairs that rotate are neighbours instead of halves."""
    rotates: Callable[[Any], bool] = _always
    """Returns whether an attention module rotates queries and keys."""
    is_supported: Callable[[Any], bool] = _always
    """Returns whether the table describes models with this config."""
    # Names in the config:
    activation: str = "hidden_act"
    embedding_scale: str | None = None
    residual_scale: str | None = None
    logit_scale: str | None = None
    logit_divisor: str | None = None
    logit_softcap: str | None = None

    def norm_names(self) -> list[str]:
        """Return the attribute names of the norms that a decoder layer of this family has."""
        names = (self.input_norm, self.attention_norm, self.mlp_norm, self.mlp_output_norm)
        return [name for name in names if name is not None]

    def attention_of(self, layer: Any) -> Any:
        """Return the attention module of a decoder layer, or the module that takes its place, such as linear attention;
        None if the layer has neither.
        """
        return next((found for name in self.attentions if (found := getattr(layer, name, None)) is not None), None)

    def first_products(self, mlp: Any) -> list[str]:
        """Return the attribute names of the linear layers that read an MLP's input: gate and up, or one layer for both,
        or up alone. Return [] for a mixture of experts.
        """
        for names in ([self.up or "gate_up_proj"], ["gate_proj", "up_proj"]):
            if all(hasattr(mlp, name) for name in [*names, self.down]):
                return names
        return []

    def norm_of(self, module: Any) -> Norm:
        """Return the weight, bias and epsilon of a norm module of this family in the form that the kernels read."""
        eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
        bias = getattr(module, "bias", None)
        return Norm(module.weight, float(eps), bias, is_centered=self.is_centered, has_offset=self.has_offset)

    def norm_at(self, owner: Any, name: str | None) -> Norm | None:
        """Return the norm that is the attribute `name` of the module `owner`, in the form that the kernels read; None
        if `name` is None or `owner` does not have it.
        """
        module = None if name is None else getattr(owner, name, None)
        return None if module is None else self.norm_of(module)


_LLAMA = FamilyDescription()
# muP: the width is taken into account by factors, not by the weights.
_GRANITE = FamilyDescription(
    embedding_scale="embedding_multiplier", residual_scale="residual_multiplier", logit_divisor="logits_scaling"
)
_GEMMA = FamilyDescription(has_offset=True, activation="hidden_act")
# Norms before and behind attention and the MLP.
_GEMMA_2 = replace(
    _GEMMA,
    attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
    activation="hidden_activation",
    logit_softcap="final_logit_softcapping",
)
# The norms stand behind attention and the MLP only.
_OLMO_2 = FamilyDescription(
    input_norm=None,
    attention_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_output_norm="post_feedforward_layernorm",
    has_wide_norms=True,
)
_GLM = FamilyDescription(is_interleaved=True)
_QWEN3_NEXT = FamilyDescription(has_offset=True, attentions=("self_attn", "linear_attn"))
# The query and key weights of these were trained with neighbouring pairs, and the KV cache holds them so.
_COHERE = FamilyDescription(
    mlp_norm=None, is_parallel=True, is_centered=True, is_interleaved=True, logit_scale="logit_scale"
)

FAMILIES: dict[str, FamilyDescription] = {
    "Cohere2DecoderLayer": replace(_COHERE, rotates=_rotates_in_windows),
    "CohereDecoderLayer": _COHERE,
    "CwmDecoderLayer": _LLAMA,
    "DeepseekV2DecoderLayer": _LLAMA,
    "DeepseekV3DecoderLayer": _LLAMA,
    "DenseLayer": _LLAMA,  # our own
    "Ernie4_5DecoderLayer": _GLM,
    "Ernie4_5_MoeDecoderLayer": _GLM,
    "Exaone4DecoderLayer": replace(_OLMO_2, has_wide_norms=False, rotates=_rotates_unless_global),
    "Gemma2DecoderLayer": _GEMMA_2,
    "Gemma3DecoderLayer": _GEMMA_2,
    "GemmaDecoderLayer": _GEMMA,
    "Glm4DecoderLayer": replace(_GLM, attention_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm"),
    "Glm4MoeDecoderLayer": _LLAMA,
    "Glm4MoeLiteDecoderLayer": _LLAMA,
    "GlmDecoderLayer": _GLM,
    "GptOssDecoderLayer": _LLAMA,
    "GraniteDecoderLayer": _GRANITE,
    "GraniteMoeDecoderLayer": replace(_GRANITE, mlp="block_sparse_moe"),
    "HeliumDecoderLayer": _GLM,
    "LlamaDecoderLayer": _LLAMA,
    "MinistralDecoderLayer": _LLAMA,
    "MistralDecoderLayer": _LLAMA,
    "MixtralDecoderLayer": _LLAMA,
    "Olmo2DecoderLayer": _OLMO_2,
    "Olmo3DecoderLayer": _OLMO_2,
    "OlmoeDecoderLayer": FamilyDescription(has_wide_norms=True, is_supported=_clips_nothing),
    "Phi3DecoderLayer": _LLAMA,
    "PhimoeDecoderLayer": FamilyDescription(is_centered=True, is_supported=_has_plain_rotation),
    "Qwen2DecoderLayer": _LLAMA,
    "Qwen2MoeDecoderLayer": _LLAMA,
    "Qwen3DecoderLayer": _LLAMA,
    "Qwen3MoeDecoderLayer": _LLAMA,
    "Qwen3NextDecoderLayer": _QWEN3_NEXT,
    "Qwen3_5DecoderLayer": _QWEN3_NEXT,
    "Qwen3_5MoeDecoderLayer": _QWEN3_NEXT,
    "SeedOssDecoderLayer": _LLAMA,
    "SmolLM3DecoderLayer": FamilyDescription(rotates=_rotates_by_rule),
    "StableLmDecoderLayer": FamilyDescription(is_centered=True, is_supported=_is_sequential),
    "Starcoder2DecoderLayer": FamilyDescription(is_centered=True, up="c_fc", down="c_proj"),
    "VaultGemmaDecoderLayer": replace(_GEMMA_2, attention_norm=None, mlp_output_norm=None),
    "YoutuDecoderLayer": _LLAMA,
}
"""The families by the class of their layers.

They were compared with transformers, and are found by name, since a layer that looks alike may differ.
"""


def describe(module: nn.Module) -> FamilyDescription | None:
    """Return the description of a transformers model's family; None if fused layers do not support the model."""
    layers, config = own_layers(getattr(getattr(module, "model", None), "layers", ())), cast(Any, module).config
    kinds = {type(layer).__name__ for layer in layers}
    family = FAMILIES.get(kinds.pop()) if len(kinds) == 1 else None
    if family is None or not family.is_supported(config):
        return None
    # Other versions of transformers may have other modules: those run through their own layers.
    if not all(family.attention_of(layer) is not None for layer in layers):
        return None
    owners = [(layer, [*family.norm_names(), family.mlp]) for layer in layers]
    owners.append((cast(Any, module).model, ["rotary_emb", "norm", "embed_tokens"]))
    is_whole = all(getattr(owner, name, None) is not None for owner, names in owners for name in names)
    activations = ACTIVATIONS if family.up is None else (GELU_TANH,)
    return family if is_whole and getattr(config, family.activation, None) in activations else None


@dataclass(frozen=True, slots=True)
class Scales:
    """The factors by which a model multiplies its embeddings, the outputs of attention and MLP before they are added to
    the residual, and its logits.

    `logit_softcap` c replaces a logit x by c * tanh(x / c).
    """

    embedding: float = 1.0
    residual: float = 1.0
    logit: float = 1.0
    logit_softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        return self == Scales()

    def finish(self, logits: Tensor) -> Tensor:
        """Multiply logits by their factor and apply the softcap, in place, and return them."""
        if self.logit != 1.0:
            logits *= self.logit
        if self.logit_softcap is not None:
            logits.div_(self.logit_softcap).tanh_().mul_(self.logit_softcap)
        return logits


def scales_of(family: FamilyDescription, config: Any) -> Scales:
    """Return the factors of a model of this family, whose values are in `config`; 1 for a factor that the family does
    not have.
    """

    def value(name: str | None) -> float:
        return 1.0 if name is None else float(getattr(config, name))

    # Gemma 3's config has the entry, which is null.
    cap = None if family.logit_softcap is None else getattr(config, family.logit_softcap)
    return Scales(
        embedding=value(family.embedding_scale),
        residual=value(family.residual_scale),
        logit=value(family.logit_scale) / value(family.logit_divisor),
        logit_softcap=None if cap is None else float(cap),
    )


@dataclass(frozen=True, slots=True)
class Rotations:
    """The different rotary embeddings (RoPE) of a model's layers. Layers without rotation have the frequencies 0."""

    frequencies: Tensor  # float32 [num_rotations, rotary_dim / 2] in radians per token
    scaling: tuple[float, ...]
    """By rotation: the factor of cos and sin."""
    of_layer: tuple[int, ...]
    """By layer: the number of its rotation."""
    axes: Tensor | None = None
    """int64 [rotary_dim / 2], by frequency: the row of the positions that it reads, for models with M-RoPE."""

    def of_rows(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return, for each of the model's different rotary embeddings, cos and sin [num_tokens, rotary_dim] for M-RoPE
        positions [3, num_tokens].
        """
        assert self.axes is not None  # only models with M-RoPE get such positions
        angles = [row_angles(positions, self.axes, one) for one in self.frequencies]
        wide = [torch.cat((one, one), dim=-1) for one in angles]
        return [(one.cos() * scale, one.sin() * scale) for one, scale in zip(wide, self.scaling, strict=True)]


def rotations_of(family: FamilyDescription, module: Any) -> Rotations:
    """Return the rotary embeddings (RoPE) of a transformers model. Frequencies that would change with the length of a
    step must have been fixed before (engine/model/rotary.py).
    """
    rotary, layers = module.model.rotary_emb, module.model.layers
    # Gemma 3 has frequencies of their own for each type of layer.
    types = [""] * len(layers) if hasattr(rotary, "inv_freq") else [f"{kind}_" for kind in module.config.layer_types]
    own = set(map(id, own_layers(layers)))
    every = zip(types, layers, strict=True)
    kinds = [(kind, family.rotates(family.attention_of(layer))) for kind, layer in every if id(layer) in own]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    frequencies = [getattr(rotary, f"{kind}inv_freq").float() * float(rotates) for kind, rotates in numbers]
    scaling = (float(getattr(rotary, f"{kind}attention_scaling", 1.0)) if rotates else 1.0 for kind, rotates in numbers)
    stacked, axes = torch.stack(frequencies), position_axes(module)
    return Rotations(
        stacked,
        tuple(scaling),
        tuple(numbers[kind] for kind in kinds),
        None if axes is None else torch.tensor(axes, device=stacked.device),
    )
