"""Mixtures of experts of transformers' models, in the form that grouped kernels need: a router and stacked weights."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from baton_serve.engine.kernels import Experts, LayerKernels, StackedWeight

ALWAYS_RENORMALIZED = {"MixtralTopKRouter", "GptOssTopKRouter"}
"""Routers whose weights always sum to 1. gpt-oss takes the softmax over the chosen logits, which is the renormalized
softmax over all logits.
"""
ROUTERS = {*ALWAYS_RENORMALIZED, "Qwen3MoeTopKRouter"}
"""Router classes that were compared with transformers.

They are found by name, since a router that looks alike may differ.
"""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture-of-experts layer: its router and its experts' weights."""

    router: Tensor  # [num_experts, hidden]
    router_bias: Tensor | None
    experts: Experts
    top_k: int
    is_renormalized: bool

    def __call__(self, hidden: Tensor, kernels: LayerKernels) -> Tensor:
        """Compute the mixture for `hidden` [num_tokens, hidden]; return the same shape."""
        logits = kernels.linear(hidden, self.router, self.router_bias)
        weights, chosen = kernels.route(logits, self.top_k, renormalize=self.is_renormalized)
        return kernels.mix(hidden, weights, chosen, self.experts)


def pack_mixture(mlp: Any) -> Mixture | None:
    """Return the mixture of a transformers module, or None if it is of an unknown kind. Weights that are stored
    transposed (gpt-oss) are transposed once; transformers' parameters become views of them.
    """
    router: Any = getattr(mlp, "router", None) or getattr(mlp, "gate", None)
    experts: Any = getattr(mlp, "experts", None)
    stacked: dict[str, StackedWeight] = getattr(experts, "weights", {})
    if type(router).__name__ not in ROUTERS or not (stacked or hasattr(experts, "gate_up_proj")):
        return None  # this includes older versions of transformers, which keep each expert in a module of its own
    is_transposed = type(router).__name__ == "GptOssTopKRouter"
    gate_up, down = (stacked.get(name) or _rows(experts, name, is_transposed) for name in ("gate_up_proj", "down_proj"))
    return Mixture(
        router=router.weight,
        router_bias=getattr(router, "bias", None),
        experts=Experts(
            gate_up=gate_up,
            down=down,
            gate_up_bias=getattr(experts, "gate_up_proj_bias", None),
            down_bias=getattr(experts, "down_proj_bias", None),
            is_interleaved=is_transposed,
            limit=float(experts.limit) if is_transposed else None,
            alpha=float(experts.alpha) if is_transposed else 1.0,
        ),
        top_k=router.top_k,
        is_renormalized=type(router).__name__ in ALWAYS_RENORMALIZED or bool(router.norm_topk_prob),
    )


def _rows(experts: Any, name: str, is_transposed: bool) -> Tensor:
    """Return the weights as [num_experts, outputs, inputs], with the weights of an output side by side."""
    parameter = getattr(experts, name)
    if not is_transposed:
        kept: Tensor = parameter.data
        return kept
    # The parameter becomes a view, so that the weights are not in memory twice.
    turned: Tensor = parameter.data.transpose(1, 2).contiguous()
    parameter.data = turned.transpose(1, 2)
    return turned
