"""Quantizes the experts of a mixture (MoE), stacked for grouped products, and decides which kinds of mixtures can be
quantized.

Only kinds of mixtures that the grouped products support are replaced, since transformers' own module would not find its
weights any more.
"""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels import StackedWeight
from baton_serve.engine.model.mixture_of_experts import ROUTERS
from baton_serve.engine.model.quantized.formats import quantize
from baton_serve.engine.model.quantized.quantization_plan import QuantizationPlan

logger = logging.getLogger(__name__)

WEIGHTS = ("gate_up_proj", "down_proj")
"""Parameters of transformers' module that hold the stacked weights."""
TRANSPOSED = {"GptOssExperts"}
"""Classes whose parameters are [num_experts, inputs, outputs]."""


class QuantizedExperts(nn.Module):
    """Replaces transformers' module of experts, and holds their quantized weights for fused layers.

    Its own forward returns zeros, which is enough for the run at load that finds out a model's shapes.
    """

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.weights: dict[str, StackedWeight] = {}
        self.is_transposed = type(old).__name__ in TRANSPOSED
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            if isinstance(bias := getattr(old, name, None), nn.Parameter):
                self.register_parameter(name, bias)
        self.limit, self.alpha = getattr(old, "limit", None), getattr(old, "alpha", 1.0)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros_like(hidden)


def expert_names(module: nn.Module) -> list[str]:
    """Return the names of a transformers model's modules with stacked experts whose kind can be quantized."""
    return [name for name in _stacked_names(module) if _router_of(module, name) in ROUTERS]


def check_experts(module: nn.Module) -> None:
    """Raise `UnsupportedModelError` if a model has stacked experts of a kind that cannot be quantized, since most of
    such a model would stay unquantized.
    """
    for name in _stacked_names(module):
        if (kind := _router_of(module, name)) not in ROUTERS:
            raise UnsupportedModelError(
                f"{type(module).__name__} has experts of a kind ({kind}) that cannot be quantized;"
                " start without --quantization"
            )


def quantize_experts(module: nn.Module, name: str, read: Callable[[str], Tensor], plan: QuantizationPlan) -> bool:
    """Replace the experts in the module `name` by quantized ones. `read` returns a parameter by its full name, on its
    final device.

    Return False if they stay as they are, because the plan skips them or their rows cannot be divided into groups.
    """
    old = module.get_submodule(name)
    made = QuantizedExperts(old)
    for leaf in WEIGHTS:
        scheme = plan.scheme_of(f"{name}.{leaf}")
        stacked = None if scheme is None else read(f"{name}.{leaf}")
        if stacked is not None and made.is_transposed:
            stacked = stacked.transpose(1, 2).contiguous()
        weight = None if stacked is None or scheme is None else quantize(stacked.flatten(0, 1), scheme)
        if stacked is None or weight is None:
            logger.info("the experts of %s are not quantized", name)
            return False
        made.weights[leaf] = StackedWeight(weight, stacked.shape[0])
        del stacked  # free the unquantized weights before the next are read
    module.set_submodule(name, made)
    return True


def place_experts(module: nn.Module, layer: str, weight: StackedWeight) -> None:
    """Put a weight that a checkpoint stores in quantized form into a module of experts. `layer` is the full name of the
    parameter that it replaces.

    A transformers module of experts is replaced by a `QuantizedExperts` first.
    """
    name, _, leaf = layer.rpartition(".")
    old = module.get_submodule(name)
    made = old if isinstance(old, QuantizedExperts) else QuantizedExperts(old)
    made.weights[leaf] = weight
    module.set_submodule(name, made)


def _stacked_names(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if _is_stacked(part)]


def _router_of(module: nn.Module, name: str) -> str:
    mlp = module.get_submodule(name.rpartition(".")[0])
    return type(getattr(mlp, "router", None) or getattr(mlp, "gate", None)).__name__


def _is_stacked(part: nn.Module) -> bool:
    """Return whether a module holds the weights of all its experts in one parameter, [num_experts, …]."""
    parameter = cast(Any, getattr(part, WEIGHTS[0], None))
    return isinstance(parameter, nn.Parameter) and parameter.dim() == 3
