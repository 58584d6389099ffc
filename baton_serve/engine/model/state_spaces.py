"""Computes transformers' layers of state spaces (Mamba-1 and Mamba-2) for all tokens of a step at once, by the kernels
of token mixers.

The kernels find the sequences of a step by themselves and change the states in their slots. So a step needs neither a
call for each chunk of a prompt nor copies of states. Projections and norms stay the module's own. Each function
replaces the forward of some classes, and was compared with it.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton_serve.engine.kernels import MixerKernels, PackedSequences, ScanChannels, StateSpaceHeads, StateSpaceShapes
from baton_serve.engine.kv.state_memory import StateKind, StateViews

Module: TypeAlias = Any  # transformers' modules are untyped bags of attributes
LayerStates: TypeAlias = Mapping[tuple[StateKind, int], Tensor]
ACTIVATIONS = frozenset({"silu", "swish"})
"""The activations of convolutions that the kernels have."""


class PackedForward(Protocol):
    """Computes a layer for the tokens of a step, which lie one after another."""

    def __call__(self, hidden_states: Tensor, views: StateViews, sequences: PackedSequences) -> Tensor:
        """Return the layer's output, [1, num_tokens, hidden], of the same shape as `hidden_states`. The states of the
        step's sequences are updated in `views`, the states of all layers and slots.
        """
        ...


def packed_forward(part: Module, kernels: MixerKernels) -> PackedForward | None:
    """Return a forward of a transformers module of a state space for all tokens of a step at once; None for modules
    that this file does not support.
    """
    make = _FORWARDS.get(type(part).__name__)
    # A model's own code may have other classes with these names.
    is_known = inspect.unwrap(type(part).forward).__module__.startswith("transformers.models.")
    if make is None or not is_known or part.activation not in ACTIVATIONS:
        return None

    def forward(hidden_states: Tensor, views: StateViews, sequences: PackedSequences) -> Tensor:
        return make(part, kernels, hidden_states, views[part.layer_idx], sequences)

    return forward


def space_shapes(module: nn.Module) -> tuple[StateSpaceShapes, ...]:
    """Return the different shapes of the layers of a model that `packed_forward` supports."""
    found: dict[StateSpaceShapes, None] = {}
    for part in module.modules():
        made = _FORWARDS.get(type(part).__name__)
        if made is not None:
            found[_shapes(part, is_mamba_1=made is _mamba_1)] = None
    return tuple(found)


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


def _convolved(
    module: Module, kernels: MixerKernels, x: Tensor, states: LayerStates, sequences: PackedSequences
) -> Tensor:
    """Return the layer's convolution of `x` [num_tokens, channels] with its activation, and update its state."""
    conv = module.conv1d
    return kernels.convolve(x, conv.weight[:, 0], conv.bias, states["conv", 0], sequences, has_silu=True)


_FORWARDS: dict[str, Callable[..., Tensor]] = {
    "BambaMixer": _mamba_2,
    "FalconH1Mixer": _falcon_h1,
    "FalconMambaMixer": _mamba_1,
    "GraniteMoeHybridMambaLayer": _mamba_2,
    "JambaMambaMixer": _mamba_1,
    "Mamba2Mixer": _mamba_2,
    "MambaMixer": _mamba_1,
    "NemotronHMamba2Mixer": _mamba_2,
    "Zamba2MambaMixer": _mamba_2,
}
"""Computes the modules of these classes in the place of their own forward."""
