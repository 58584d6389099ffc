"""Computes layers of Mamba-1, Mamba-2, lightning attention and Kimi Delta Attention for all tokens of a step at once.

The kernels find the sequences of a step by themselves and change the states in their slots. So a step needs neither a
call for each chunk of a prompt nor copies of states. Projections and norms stay the module's own. Each function
replaces the forward of some classes, and was compared with it.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton_serve.engine.kernels import (
    ChannelDeltaHeads,
    LightningHeads,
    MixerKernels,
    PackedSequences,
    ScanChannels,
    StateSpaceHeads,
    StateSpaceShapes,
)
from baton_serve.engine.kernels.mixers import MixerShapes
from baton_serve.engine.kv.state_memory import StateKind, StateViews

Module: TypeAlias = Any  # transformers' modules are untyped bags of attributes
LayerStates: TypeAlias = Mapping[tuple[StateKind, int], Tensor]
ACTIVATIONS = frozenset({"silu", "swish"})
"""The activations of convolutions that the kernels have."""


class PackedForward(Protocol):
    """Computes a layer for the tokens of a step, which lie one after another."""

    def __call__(self, hidden_states: Tensor, views: StateViews, sequences: PackedSequences) -> Any:
        """Return what the module's own forward returns: the layer's output, [1, num_tokens, hidden], of the same shape
        as `hidden_states`, or a tuple that begins with it. The states of the step's sequences are updated in `views`,
        the states of all layers and slots.
        """
        ...


def packed_forward(part: Module, kernels: MixerKernels) -> PackedForward | None:
    """Return a forward of a transformers module with recurrent states for all tokens of a step at once; None for
    modules that this file does not support.
    """
    make = _FORWARDS.get(type(part).__name__)
    # A model's own code may have other classes with these names.
    is_known = inspect.unwrap(type(part).forward).__module__.startswith("transformers.models.")
    # Lightning attention has no convolution.
    if make is None or not is_known or getattr(part, "activation", "silu") not in ACTIVATIONS:
        return None

    def forward(hidden_states: Tensor, views: StateViews, sequences: PackedSequences) -> Any:
        return make(part, kernels, hidden_states, views[part.layer_idx], sequences)

    return forward


def packed_shapes(module: Any, others: MixerShapes) -> MixerShapes:
    """Return `others`, the shapes of a model's other mixers, with those of the layers that `packed_forward`
    supports.
    """
    spaces: dict[StateSpaceShapes, None] = {}
    for part in module.modules():
        made = _FORWARDS.get(type(part).__name__)
        if made is _lightning:
            others = replace(others, num_lightning_heads=part.num_attention_heads, lightning_size=part.head_dim)
        elif made is _channel_delta:
            heads, size = part.num_heads, part.head_dim
            taps = part.conv1d.kernel_size[0]
            own = {"num_key_heads": heads, "num_heads": heads, "key_size": size, "value_size": size, "taps": taps}
            others = replace(others, **own, has_channel_decay=True)
        elif made is not None:
            spaces[_shapes(part, is_mamba_1=made is _mamba_1)] = None
    return replace(others, spaces=tuple(spaces))


def _shapes(part: Module, *, is_mamba_1: bool) -> StateSpaceShapes:
    taps, size = part.conv1d.kernel_size[0], part.ssm_state_size
    if is_mamba_1:
        return StateSpaceShapes(part.intermediate_size, 0, 0, size, taps, (0.0, float("inf")))
    return StateSpaceShapes(part.num_heads, part.head_dim, part.n_groups, size, taps, _limits(part))


def _limits(part: Module) -> tuple[float, float]:
    shortest, longest = part.time_step_limit
    return float(shortest), float(longest)


def _mamba_2(
    module: Module, kernels: MixerKernels, hidden_states: Tensor, states: LayerStates, sequences: PackedSequences
) -> Tensor:
    return _from_product(module, kernels, module.in_proj(hidden_states), states, sequences)


def _falcon_h1(
    module: Module, kernels: MixerKernels, hidden_states: Tensor, states: LayerStates, sequences: PackedSequences
) -> Tensor:
    product = module.in_proj(hidden_states * module.ssm_in_multiplier) * module.mup_vector
    return _from_product(module, kernels, product, states, sequences)


def _from_product(
    module: Module, kernels: MixerKernels, product: Tensor, states: LayerStates, sequences: PackedSequences
) -> Tensor:
    """Compute a Mamba-2 layer from the output of its input projection, [1, num_tokens, outputs]."""
    sizes = [module.intermediate_size, module.conv_dim, module.num_heads]
    gate, xbc, step = torch.split(product[0], sizes, dim=-1)
    heads = StateSpaceHeads(
        _convolved(module, kernels, xbc, states, sequences),
        step,
        module.A_log,
        module.dt_bias,
        module.D,
        module.n_groups,
        module.ssm_state_size,
        _limits(module),
    )
    output = kernels.state_space(heads, states["recurrent", 0], sequences).flatten(1)
    # Falcon-H1 has models without the norm, which contains the gate.
    if isinstance(module.norm, nn.Identity):
        output = output * functional.silu(gate)
    else:
        output = module.norm(output[None], gate[None])[0]
    projected: Tensor = module.out_proj(output[None].to(product.dtype))
    return projected


def _mamba_1(
    module: Module, kernels: MixerKernels, hidden_states: Tensor, states: LayerStates, sequences: PackedSequences
) -> Tensor:
    # Jamba and FalconMamba normalize the step, B and C; Mamba does not.
    norms = [getattr(module, name, nn.Identity()) for name in ("dt_layernorm", "b_layernorm", "c_layernorm")]
    x, gate = module.in_proj(hidden_states)[0].chunk(2, dim=-1)
    x = _convolved(module, kernels, x, states, sequences)
    sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
    step, b, c = (norm(part) for norm, part in zip(norms, module.x_proj(x).split(sizes, dim=-1), strict=True))
    channels = ScanChannels(x, gate, module.dt_proj(step), b, c, module.A_log, module.D)
    output = kernels.selective_scan(channels, states["recurrent", 0], sequences)
    projected: Tensor = module.out_proj(output[None])
    return projected


def _channel_delta(
    module: Module, kernels: MixerKernels, hidden_states: Tensor, states: LayerStates, sequences: PackedSequences
) -> Tensor:
    qkv = torch.cat([part(hidden_states) for part in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
    qkv = _convolved(module, kernels, qkv[0], states, sequences)
    heads = ChannelDeltaHeads(qkv, module.b_proj(hidden_states)[0], module.forget_gate(hidden_states)[0])
    output = kernels.channel_delta_rule(heads, states["recurrent", 0], sequences)
    # Kimi computes the gate by two products, Bailing by one.
    products = [module.g_proj] if hasattr(module, "g_proj") else [module.g_a_proj, module.g_b_proj]
    gate = hidden_states
    for product in products:
        gate = product(gate)
    normed = module.o_norm(output, gate[0].view(output.shape)).flatten(1)
    projected: Tensor = module.o_proj(normed[None])
    return projected


def _lightning(
    module: Module, kernels: MixerKernels, hidden_states: Tensor, states: LayerStates, sequences: PackedSequences
) -> tuple[Tensor, None]:
    qkv = module.act_fn(module.qkv_proj(hidden_states))[0]
    heads = LightningHeads(qkv, module.slope_rate.flatten().float())
    output = kernels.lightning(heads, states["recurrent", 0], sequences).flatten(1)
    gate = functional.sigmoid(module.output_gate(hidden_states))
    return module.out_proj(gate * module.norm(output[None])), None


def _convolved(
    module: Module, kernels: MixerKernels, x: Tensor, states: LayerStates, sequences: PackedSequences
) -> Tensor:
    """Return the layer's convolution of `x` [num_tokens, channels] with its activation, and update its state."""
    conv = module.conv1d
    # Bailing keeps these weights in float32.
    weight = conv.weight[:, 0].to(x.dtype)
    return kernels.convolve(x, weight, conv.bias, states["conv", 0], sequences, has_silu=True)


_FORWARDS: dict[str, Callable[..., Any]] = {
    "BailingHybridDeltaAttention": _channel_delta,
    "BambaMixer": _mamba_2,
    "FalconH1Mixer": _falcon_h1,
    "FalconMambaMixer": _mamba_1,
    "GraniteMoeHybridMambaLayer": _mamba_2,
    "JambaMambaMixer": _mamba_1,
    "KimiLinearDeltaAttention": _channel_delta,
    "Mamba2Mixer": _mamba_2,
    "MambaMixer": _mamba_1,
    "MiniMaxLightningAttention": _lightning,
    "NemotronHMamba2Mixer": _mamba_2,
    "Zamba2MambaMixer": _mamba_2,
}
"""Computes the modules of these classes in the place of their own forward."""
