"""The stacked weights of a mixture's experts in few bits, for grouped products (engine.model.mixture_of_experts).

Only mixtures that those know are taken: transformers' own module would find no weights.
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
from baton_serve.engine.model.quantized.online import QuantizationPlan

logger = logging.getLogger(__name__)

WEIGHTS = ("gate_up_proj", "down_proj")
TRANSPOSED = {"GptOssExperts"}
"""Whose parameters are [num_experts, inputs, outputs]."""


class QuantizedExperts(nn.Module):
    """In the place of transformers' module. It yields zeros, which is enough to see which shapes a model passes on."""

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
    """Of the modules that hold stacked experts, of kinds that the grouped products know."""
    return [name for name in _stacked_names(module) if _router_of(module, name) in ROUTERS]


def check_experts(module: nn.Module) -> None:
    """Raises `UnsupportedModelError` for experts of another kind: most of such a model would stay as it is."""
    for name in _stacked_names(module):
        if (kind := _router_of(module, name)) not in ROUTERS:
            raise UnsupportedModelError(
                f"{type(module).__name__} is a mixture of experts of a kind ({kind}) that is not served in few bits;"
                " leave --quantization out"
            )


def quantize_experts(module: nn.Module, name: str, read: Callable[[str], Tensor], plan: QuantizationPlan) -> bool:
    """Puts quantized experts in the place of `name`. `read` gives a parameter by its full name, where it is to stay.
    False: they were left alone, since their rows cannot be cut into groups or the plan skips them."""
    old = module.get_submodule(name)
    made = QuantizedExperts(old)
    for leaf in WEIGHTS:
        scheme = plan.scheme_of(f"{name}.{leaf}")
        stacked = None if scheme is None else read(f"{name}.{leaf}")
        if stacked is not None and made.is_transposed:
            stacked = stacked.transpose(1, 2).contiguous()
        weight = None if stacked is None or scheme is None else quantize(stacked.flatten(0, 1), scheme)
        if stacked is None or weight is None:
            logger.info("%s keeps its experts as they are", name)
            return False
        made.weights[leaf] = StackedWeight(weight, stacked.shape[0])
        del stacked
    module.set_submodule(name, made)
    return True


def place_experts(module: nn.Module, layer: str, weight: StackedWeight) -> None:
    """One stored weight, by its parameter's name."""
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
    parameter = cast(Any, getattr(part, WEIGHTS[0], None))
    return isinstance(parameter, nn.Parameter) and parameter.dim() == 3
