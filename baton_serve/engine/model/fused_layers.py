"""Decides which models fused layers support, and packs their weights (one product for QKV, one for gate and up)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton_serve.engine.kernels import (
    LayerKernels,
    Linear,
    Norm,
)
from baton_serve.engine.kernels.cpu.layers import CpuLayers
from baton_serve.engine.model.families import GELU_TANH, FamilyDescription, describe, scales_of
from baton_serve.engine.model.fused_mixers import (
    MixerTools,
    TokenMixer,
    can_pack_mixer,
    in_kernel_order,
    is_mixer,
    pack_mixer,
    packed_parts,
)
from baton_serve.engine.model.mixture_of_experts import Mixture, SharedExpert, pack_mixture, shared_expert
from baton_serve.engine.model.pipeline_stage import own_layers
from baton_serve.engine.model.quantized.modules import QuantizedLinear, ReorderedLinear, can_merge, install, merge
from baton_serve.engine.model.weight_offload import WeightOffload


@dataclass(frozen=True, slots=True)
class ResidualSum:
    """How the output of attention or of an MLP is added to the residual, and which norm the sum then gets."""

    output_norm: Norm | None
    """The norm of the output before it is added."""
    next_norm: Norm | None
    """The norm of the sum; None: the next product reads the sum itself."""
    scale: float = 1.0
    """The factor of the output."""

    @property
    def is_plain(self) -> bool:
        """Return whether the output is only added and then gets a plain RMSNorm, as in Llama, without a norm or factor
        before.
        """
        has_plain_norm = self.next_norm is not None and self.next_norm.is_plain
        return self.output_norm is None and self.scale == 1.0 and has_plain_norm

    @property
    def is_rms(self) -> bool:
        """Return whether the output is only added and then gets an RMSNorm of any kind, without a norm or factor
        before.
        """
        has_rms = self.next_norm is not None and not self.next_norm.is_centered
        return self.output_norm is None and self.scale == 1.0 and has_rms


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer in the form that the fused kernels read."""

    input_norm: Norm | None
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    after_attention: ResidualSum
    after_mlp: ResidualSum
    gate_up: Linear | None
    down: Linear | None
    mixture: Mixture | None
    mlp: Callable[[Tensor], Tensor | tuple[Tensor, ...]]
    """The module of transformers, used if `gate_up` and `mixture` are None."""
    mixer: TokenMixer | None = None
    """The mixer that takes the outputs of `qkv`; None: attention as in Llama."""

    @property
    def mlp_norm(self) -> Norm | None:
        return self.after_attention.next_norm

    @property
    def is_plain(self) -> bool:
        has_plain_norm = self.input_norm is not None and self.input_norm.is_plain and self.mixer is None
        return has_plain_norm and self.after_attention.is_plain and self.after_mlp.is_plain


def fits(module: nn.Module) -> bool:
    """Return whether `FusedForward` supports a transformers model: its family is known, and the weights that fused
    kernels join are quantized in the same way.
    """
    family = describe(module)
    if family is None:
        return False
    layers = own_layers(cast(Any, module).model.layers)
    mixers = [found for layer in layers if is_mixer(found := family.attention_of(layer))]
    if not all(can_pack_mixer(mixer) for mixer in mixers):
        return False
    if not all(can_merge(parts) for layer in layers for parts in packed_parts(layer, family)):
        return False
    return not any(isinstance(part, ReorderedLinear) for part in module.modules())


def pack_layers(
    module: Any,
    family: FamilyDescription,
    tools: MixerTools,
    final_norm: Norm | None,
    offload: WeightOffload | None = None,
) -> list[Layer]:
    """Join and pack the weights of the decoder layers of a transformers model that this pipeline stage holds.

    `final_norm` is the norm after the last layer; None if another stage follows. The layers of `offload` are packed on
    the device, and then moved to host memory one by one.
    """
    layers = own_layers(module.model.layers)
    following = [*(family.norm_at(layer, family.input_norm) for layer in layers[1:]), final_norm]
    residual_scale = scales_of(family, module.config).residual
    has_silu = getattr(module.config, family.activation) != GELU_TANH  # the only activation of grouped products
    packed: list[Layer] = []
    for number, (layer, after) in enumerate(zip(layers, following, strict=True)):
        is_held = offload is not None and number in offload
        if offload is not None and is_held:
            offload.to_device(layer)
        attention = ResidualSum(
            family.norm_at(layer, family.attention_norm), family.norm_at(layer, family.mlp_norm), residual_scale
        )
        mlp = ResidualSum(family.norm_at(layer, family.mlp_output_norm), after, residual_scale)
        packed.append(_pack_layer(layer, family, tools, attention, mlp, can_mix=has_silu))
        if offload is None:
            packed[-1] = _with_packed_experts(packed[-1], tools.layers)
        if offload is not None and is_held:
            offload.hold(number, (layer, packed[-1]), (tools.layers, tools.mixers, tools.attention))
    return packed


def _pack_layer(
    layer: Any,
    family: FamilyDescription,
    tools: MixerTools,
    after_attention: ResidualSum,
    after_mlp: ResidualSum,
    *,
    can_mix: bool,
) -> Layer:
    """Join the weights of a transformers decoder layer into few matrices, such as one for query, key and value, and
    return them. `after_attention` and `after_mlp` say how outputs are added to the residual; `can_mix` allows fused
    mixtures of experts.
    """
    attention, mlp, kernels = family.attention_of(layer), getattr(layer, family.mlp), tools.layers
    packed = pack_mixer(attention, tools)
    if packed is not None:
        qkv = packed.first  # in the order of the kernels already
    elif hasattr(attention, "qkv_proj"):
        qkv = packed_linear(attention.qkv_proj, kernels)
    else:
        qkv = _packed([attention.q_proj, attention.k_proj, attention.v_proj], kernels)
    if family.up is None:
        gated = _pack_gated(mlp, kernels)
    else:
        gated = packed_linear(getattr(mlp, family.up), kernels), packed_linear(getattr(mlp, family.down), kernels)
    gate_up, down = (None, None) if gated is None else gated
    return Layer(
        input_norm=family.norm_at(layer, family.input_norm),
        qkv=qkv,
        query_norm=family.norm_at(attention, "q_norm"),
        key_norm=family.norm_at(attention, "k_norm"),
        output=packed_linear(attention.o_proj if packed is None else packed.output, kernels),
        after_attention=after_attention,
        after_mlp=after_mlp,
        gate_up=gate_up,
        down=down,
        mixture=pack_mixture(mlp, partial(_pack_shared, mlp, kernels)) if gate_up is None and can_mix else None,
        mlp=mlp,
        mixer=None if packed is None else packed.mixer,
    )


def _with_packed_experts(layer: Layer, kernels: LayerKernels) -> Layer:
    """Return the layer with packed experts, if it has experts and the kernels of this CPU multiply by packed ones. The
    stacked weights in transformers' module are freed.
    """
    if layer.mixture is None or not isinstance(kernels, CpuLayers):
        return layer
    experts = kernels.pack_experts(layer.mixture.experts)
    if experts is layer.mixture.experts:
        return layer
    stacks: Any = cast(Any, layer.mlp).experts
    for weight in (stacks.gate_up_proj, stacks.down_proj):
        weight.data = weight.data.new_empty(0)
    return replace(layer, mixture=replace(layer.mixture, experts=experts))


def _pack_gated(mlp: Any, kernels: LayerKernels) -> tuple[Linear, Linear] | None:
    """Return the two linear layers of a gated MLP: gate and up joined, and down. Return None for another kind of
    MLP.
    """
    if hasattr(mlp, "gate_up_proj") and hasattr(mlp, "down_proj"):
        return packed_linear(mlp.gate_up_proj, kernels), packed_linear(mlp.down_proj, kernels)
    if hasattr(mlp, "gate_proj") and hasattr(mlp, "up_proj"):
        return _packed([mlp.gate_proj, mlp.up_proj], kernels), packed_linear(mlp.down_proj, kernels)
    return None


def _pack_shared(mlp: Any, kernels: LayerKernels) -> SharedExpert | None:
    """Return the shared expert of a mixture of experts, which all tokens use, in packed form; None if it has none."""
    module, gate = shared_expert(mlp), getattr(mlp, "shared_expert_gate", None)
    products = None if module is None else _pack_gated(module, kernels)
    return None if products is None else SharedExpert(*products, None if gate is None else packed_linear(gate, kernels))


def _packed(parts: list[nn.Linear], kernels: LayerKernels) -> Linear:
    """Join the weights of several linear layers along their outputs. The layers' own weights become views of the
    result, so that nothing is stored twice, or are freed if `kernels` read the result in an order of their own.
    """
    quantized = [part for part in cast(list[nn.Module], parts) if isinstance(part, QuantizedLinear)]
    if quantized:
        return packed_linear(merge(quantized), kernels)
    weight = torch.cat([part.weight.data for part in parts])
    biases = [part.bias.data for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None
    sizes = [part.weight.shape[0] for part in parts]
    for part, rows in zip(parts, torch.split(weight, sizes), strict=True):
        part.weight.data = rows
    return in_kernel_order(Linear(weight, bias), parts, kernels)


def packed_head(module: Any, kernels: LayerKernels) -> Linear:
    """Return the output head of a transformers model in the form that `kernels` read."""
    # A tied weight is also the embedding's table, which is still needed.
    is_tied = module.lm_head.weight is getattr(module.model.embed_tokens, "weight", None)
    return packed_linear(module.lm_head, kernels, is_shared=is_tied)


def packed_linear(module: nn.Linear | QuantizedLinear, kernels: LayerKernels, *, is_shared: bool = False) -> Linear:
    """Return the weight and bias of a module in the form that `kernels` read. If that is another one than the module's,
    the module loses its weight, unless another module shares it.
    """
    if isinstance(module, QuantizedLinear):
        install(module, kernels)
        return Linear(module.weight, module.bias)
    return in_kernel_order(Linear(module.weight.data, module.bias), () if is_shared else (module,), kernels)
