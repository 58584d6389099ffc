"""Decides how each mixture of experts (MoE) routes tokens to experts, and stacks its weights for grouped kernels."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton_serve.engine import device as devices
from baton_serve.engine.kernels import Experts, LayerKernels, Linear, StackedWeight
from baton_serve.engine.kernels.reference.experts import with_shared

Routed = tuple[Tensor, Tensor]
"""The weights, float32, and the numbers, int32, of each token's experts, both [num_tokens, top_k]."""


@dataclass(frozen=True, slots=True)
class Appended:
    """The shared expert of a mixture (which all tokens use), cut into `count` experts that are stacked behind the
    routed ones.
    """

    count: int = 0
    has_gate: bool = False
    """True if the last of the router's logits is that of the gate."""

    def append(self, routed: Routed, logits: Tensor) -> Routed:
        """Append the experts of the shared expert to each token's chosen ones. `routed` are weights and numbers of the
        chosen experts; `logits` are the router's, which may include the gate's.
        """
        return with_shared(*routed, logits, self.count, has_gate=self.has_gate)


NONE_APPENDED = Appended()

Choose = Callable[[Tensor, LayerKernels, Appended], Routed]
"""Chooses the experts from the logits [num_tokens, num_experts], and appends those of all tokens."""


def _softmax(router: Any, *, renormalize: bool | None = None) -> Choose:
    """Return the routing rule that chooses the experts with the largest softmax. `renormalize` scales the chosen
    weights to a sum of 1; None: as the transformers router says.
    """
    top_k, scaled = int(router.top_k), bool(router.norm_topk_prob) if renormalize is None else renormalize
    return lambda logits, kernels, appended: kernels.route(
        logits, top_k, renormalize=scaled, num_shared=appended.count, has_gate=appended.has_gate
    )


def _own_rule(choose: Callable[[Tensor], Routed]) -> Choose:
    """Return a routing rule from `choose`, which maps the logits of the routed experts to weights and numbers. The rule
    leaves out the logit of a shared expert's gate, and appends the shared expert.
    """

    def choose_all(logits: Tensor, _: LayerKernels, appended: Appended) -> Routed:
        own = logits[:, : logits.shape[1] - appended.has_gate]
        return appended.append(choose(own), logits)

    return choose_all


def _scaled_softmax(router: Any) -> Choose:
    """Return DeepSeek V2's routing rule: the experts with the largest softmax among the best groups of experts, with
    weights times a constant factor.
    """
    top_k, factor = int(router.top_k), float(router.routed_scaling_factor)
    groups, kept = int(router.num_group or 1), int(router.topk_group or 1)
    if router.topk_method == "greedy" and factor == 1.0:
        return _softmax(router, renormalize=False)

    def choose(logits: Tensor) -> Routed:
        scores = logits.float().softmax(dim=-1)
        if router.topk_method != "greedy":
            # A group counts as its best expert.
            grouped = scores.view(len(scores), groups, -1)
            best = grouped.amax(dim=-1).topk(kept, dim=-1).indices
            is_out = torch.ones_like(grouped, dtype=torch.bool).scatter(
                1, best[..., None].expand(-1, -1, grouped.shape[2]), value=False
            )
            scores = grouped.masked_fill(is_out, 0.0).flatten(1)
        weights, chosen = scores.topk(top_k, dim=-1)
        return weights * factor, chosen.int()

    return _own_rule(choose)


def _grouped_sigmoid(router: Any) -> Choose:
    """Return the routing rule of DeepSeek V3 and GLM-4.5: the experts with the largest sigmoid plus a learned bias,
    among the best groups of experts. The weights are the sigmoids without the bias.
    """
    top_k, groups, kept = int(router.top_k), int(router.num_group), int(router.topk_group)
    bias, factor = router.e_score_correction_bias, float(router.routed_scaling_factor)
    renormalizes = bool(router.norm_topk_prob)

    def choose(logits: Tensor) -> Routed:
        scores = logits.float().sigmoid()
        corrected = (scores + bias).view(len(scores), groups, -1)
        # A group counts as its two best experts.
        if kept < groups:
            best = corrected.topk(2, dim=-1).values.sum(dim=-1).topk(kept, dim=-1).indices
            is_out = torch.ones_like(corrected[..., 0], dtype=torch.bool).scatter(1, best, value=False)
            corrected = corrected.masked_fill(is_out[..., None], float("-inf"))
        chosen = corrected.flatten(1).topk(top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if renormalizes:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * factor, chosen.int()

    return _own_rule(choose)


def _corrected_softmax(router: Any) -> Choose:
    """Return ERNIE 4.5's routing rule: the experts with the largest softmax plus a learned bias. The weights are the
    softmaxes without the bias, scaled to a sum of 1.
    """
    top_k, least = int(router.top_k), float(router.norm_min)
    bias = router.moe_statics.e_score_correction_bias.flatten()

    def choose(logits: Tensor) -> Routed:
        scores = logits.float().softmax(dim=-1)
        chosen = (scores + bias).topk(top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        return weights / weights.sum(dim=-1, keepdim=True).clamp(min=least), chosen.int()

    return _own_rule(choose)


def _sparse_mixer(router: Any) -> Choose:
    """Return PhiMoE's routing rule (SparseMixer, https://arxiv.org/abs/2409.12136): two experts, each weighted by a
    softmax over the logits that are close to its own.
    """
    limit = 2 * float(router.router_jitter_noise)

    def choose(logits: Tensor) -> Routed:
        scores, rest = logits, logits
        weights, chosen = [], []
        for _choice in range(2):
            top, expert = rest.max(dim=-1, keepdim=True)
            is_far = (top - scores) / scores.abs().clamp(min=top) > limit
            weights.append(rest.masked_fill(is_far, float("-inf")).softmax(dim=-1).gather(1, expert))
            chosen.append(expert)
            # The second expert is chosen, and weighted, without the first one.
            rest = rest.scatter(1, expert, float("-inf"))
        return torch.cat(weights, dim=1).float(), torch.cat(chosen, dim=1).int()

    return _own_rule(choose)


ROW_ALIGNMENT = 8
_RENORMALIZED = partial(_softmax, renormalize=True)
ROUTERS: dict[str, Callable[[Any], Choose]] = {
    "DeepseekV2TopkRouter": _scaled_softmax,
    "DeepseekV3TopkRouter": _grouped_sigmoid,
    "Ernie4_5_MoeTopKRouter": _corrected_softmax,
    "Glm4MoeLiteTopkRouter": _grouped_sigmoid,
    "Glm4MoeTopkRouter": _grouped_sigmoid,
    # gpt-oss and Granite take the softmax over the chosen logits, which is the renormalized softmax over all logits.
    "GptOssTopKRouter": _RENORMALIZED,
    "GraniteMoeTopKRouter": _RENORMALIZED,
    "MixtralTopKRouter": _RENORMALIZED,
    "OlmoeTopKRouter": _softmax,
    "PhimoeTopKRouter": _sparse_mixer,
    "Qwen2MoeTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": _softmax,
    "Qwen3NextTopKRouter": _softmax,
    "Qwen3_5MoeTopKRouter": _RENORMALIZED,
}
"""The rules of router classes, which were compared with transformers.

They are found by name, since a router that looks alike may differ.
"""
WIDE_ROUTERS = {
    "DeepseekV2TopkRouter",
    "DeepseekV3TopkRouter",
    "Ernie4_5_MoeTopKRouter",
    "Glm4MoeLiteTopkRouter",
    "Glm4MoeTopkRouter",
}
"""Routers that compute logits in float32."""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The shared expert of a mixture: the MLP that all tokens use, and the weight of the gate whose sigmoid scales its
    output; None: it has no gate.
    """

    gate_up: Linear
    down: Linear
    gate: Linear | None  # one output

    def __call__(self, hidden: Tensor, kernels: LayerKernels) -> Tensor:
        gated = kernels.gated_linear(hidden, self.gate_up, self.down.weight)
        output = kernels.linear(gated, self.down.weight, self.down.bias)
        if self.gate is None:
            return output
        return output * kernels.linear(hidden, self.gate.weight, self.gate.bias).sigmoid()


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture-of-experts layer in the form that fused kernels read: its router, its routing rule and its stacked
    experts.
    """

    router: Tensor  # [num_experts, hidden]
    router_bias: Tensor | None
    choose: Choose
    experts: Experts
    shared: SharedExpert | None = None
    appended: Appended = NONE_APPENDED
    """The shared expert as some of the `experts`, instead of `shared`."""
    first: int = 0
    """The number of the first expert that this rank holds."""

    def __call__(self, hidden: Tensor, kernels: LayerKernels) -> Tensor:
        """Return the output of the mixture for `hidden` [num_tokens, hidden], of the same shape. With several ranks it
        is this rank's summand.
        """
        logits = kernels.linear(hidden.to(self.router.dtype), self.router, self.router_bias)
        if self.appended.has_gate:
            logits = logits[:, : self.experts.num_experts - self.appended.count + 1]
        weights, chosen = self.choose(logits, kernels, self.appended)
        output = kernels.mix(hidden, weights, self._own_numbers(chosen), self.experts)
        return output if self.shared is None else output + self.shared(hidden, kernels)

    def _own_numbers(self, chosen: Tensor) -> Tensor:
        """Return the chosen experts as numbers among the experts that this rank holds. Experts of other ranks get the
        number of this rank's experts, which no kernel computes.
        """
        if not self.experts.is_part:
            return chosen
        own, count = chosen - self.first, self.experts.num_experts
        return torch.where((own >= 0) & (own < count), own, count)


def shared_expert(mlp: Any) -> Any:
    """Return the shared expert in a transformers mixture of experts, the module that all tokens use; None if it has
    none.
    """
    return getattr(mlp, "shared_expert", None) or getattr(mlp, "shared_experts", None)


def pack_mixture(mlp: Any, pack_shared: Callable[[], SharedExpert | None]) -> Mixture | None:
    """Return a transformers mixture of experts in packed form; None if its router is of an unknown kind. Weights that
    are stored transposed (gpt-oss) are transposed once; transformers' parameters become views of them.

    `pack_shared` packs the shared expert. It is called only if the kind is known, since it takes the weights.
    """
    router: Any = getattr(mlp, "router", None) or getattr(mlp, "gate", None)
    experts: Any = getattr(mlp, "experts", None)
    stacked: dict[str, StackedWeight] = getattr(experts, "weights", {})
    kind = type(router).__name__
    if kind not in ROUTERS or not (stacked or hasattr(experts, "gate_up_proj")):
        return None  # this includes older versions of transformers, which keep each expert in a module of its own
    is_transposed = kind == "GptOssTopKRouter"
    gate_up, down = (stacked.get(name) or _rows(experts, name, is_transposed) for name in ("gate_up_proj", "down_proj"))
    weight = router.weight.float() if kind in WIDE_ROUTERS else router.weight
    appended = NONE_APPENDED
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor) and _can_append(mlp, gate_up):
        gate_up, down = _append_shared(mlp, gate_up, down)
        appended = Appended(len(down) - len(weight), has_gate := getattr(mlp, "shared_expert_gate", None) is not None)
        if has_gate:
            # The weights of the gate are one more row of the router's. Libraries are slow with an odd number of rows.
            weight = torch.cat([weight, mlp.shared_expert_gate.weight.to(weight.dtype)])
            weight = functional.pad(weight, (0, 0, 0, -len(weight) % ROW_ALIGNMENT))
    return Mixture(
        router=weight,
        router_bias=getattr(router, "bias", None),
        choose=ROUTERS[kind](router),
        experts=Experts(
            gate_up=gate_up,
            down=down,
            gate_up_bias=getattr(experts, "gate_up_proj_bias", None),
            down_bias=getattr(experts, "down_proj_bias", None),
            is_interleaved=is_transposed,
            limit=float(experts.limit) if is_transposed else None,
            alpha=float(experts.alpha) if is_transposed else 1.0,
            is_part=hasattr(experts, "baton_first"),
        ),
        shared=None if appended.count else pack_shared(),
        appended=appended,
        first=int(getattr(experts, "baton_first", 0)),
    )


def _can_append(mlp: Any, gate_up: Tensor) -> bool:
    """Return whether the shared expert of a mixture can be cut into experts of the same width as the routed ones, whose
    stacked weights are `gate_up`.
    """
    shared, gate = shared_expert(mlp), getattr(mlp, "shared_expert_gate", None)
    # A rank's own experts have numbers of their own, and those of all tokens would need some too.
    if hasattr(mlp.experts, "baton_first"):
        return False
    if shared is None or not all(hasattr(shared, name) for name in ("gate_proj", "up_proj", "down_proj")):
        return False
    products = [shared.gate_proj, shared.up_proj, shared.down_proj, *([] if gate is None else [gate])]
    is_plain = all(type(part) is nn.Linear and part.bias is None for part in products)
    has_bias = hasattr(mlp.experts, "gate_up_proj_bias")
    return is_plain and not has_bias and shared.gate_proj.out_features % (gate_up.shape[1] // 2) == 0


def _append_shared(mlp: Any, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Cut the shared expert into experts of the routed ones' width, and return both stacked weights, gate and up and
    down, with these appended. The routed experts' parameters become views; the shared expert's weights are freed.
    """
    shared, width = shared_expert(mlp), down.shape[2]
    # An expert's rows are its gate and, behind it, its up: each part of the shared expert gets a slice of both.
    halves = [part.weight.data.unflatten(0, (-1, width)) for part in (shared.gate_proj, shared.up_proj)]
    gate_up = torch.cat([gate_up, torch.cat(halves, dim=1)])
    down = torch.cat([down, shared.down_proj.weight.data.unflatten(1, (-1, width)).transpose(0, 1)])
    mlp.experts.gate_up_proj.data, mlp.experts.down_proj.data = (
        part[: mlp.experts.num_experts] for part in (gate_up, down)
    )
    for product in (shared.gate_proj, shared.up_proj, shared.down_proj):
        product.weight.data = product.weight.data.new_empty(0)
    return gate_up, down


def _rows(experts: Any, name: str, is_transposed: bool) -> Tensor:
    """Return the stacked weights `name` of a transformers module of experts as [num_experts, outputs, inputs]. If the
    module stores [num_experts, inputs, outputs], they are transposed and its parameter becomes a view.
    """
    parameter = getattr(experts, name)
    if not is_transposed:
        kept: Tensor = parameter.data
        return kept
    # The parameter becomes a view, so that the weights are not in memory twice.
    turned: Tensor = parameter.data.transpose(1, 2).contiguous()
    parameter.data = turned.transpose(1, 2)
    return turned


def install_experts(module: nn.Module, kernels: LayerKernels) -> None:
    """Let the experts of a transformers model compute by `kernels` if these support them. The routers stay its own.

    transformers' experts may read back from the device how many tokens each of them has, which graphs cannot capture.
    """
    for part in cast(Iterable[Any], module.modules()):
        if _has_gated_silu(part):
            part.forward = partial(_mixed, kernels, Experts(part.gate_up_proj.data, part.down_proj.data))
            part.baton_experts = True


def stays_on_device(experts: Any) -> bool:
    """Return whether the experts of a transformers model read nothing back from the device: they were replaced, or
    torch's grouped products compute them.
    """
    if hasattr(experts, "baton_experts"):
        return True
    weight = next(experts.parameters())
    is_grouped = getattr(getattr(experts, "config", None), "_experts_implementation", None) == "grouped_mm"
    return is_grouped and devices.has_grouped_products(weight.device, weight.dtype)


def _has_gated_silu(part: Any) -> bool:
    """Return whether a module is stacked experts of transformers with weights [num_experts, outputs, inputs], which
    compute down(silu(gate) * up) like `Experts`.
    """
    rules = ("has_gate", "is_concatenated", "is_transposed", "has_bias", "has_post_expert_norm", "_is_expert_parallel")
    if [getattr(part, name, None) for name in rules] != [True, True, False, False, False, False]:
        return False
    # Most classes have the gating of transformers' decorator for experts.
    has_own_gate = type(part)._apply_gate.__module__ != "transformers.integrations.moe"
    is_silu = isinstance(part.act_fn, nn.SiLU) or type(part.act_fn).__name__ == "SiLUActivation"
    return is_silu and not has_own_gate and not hasattr(part, "baton_first")


def _mixed(
    kernels: LayerKernels, experts: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Take the place of the forward of transformers' experts."""
    return kernels.mix(hidden_states, top_k_weights.float(), top_k_index.int(), experts)
