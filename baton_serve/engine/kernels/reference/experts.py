"""The plain-torch twins of `kernels.triton.experts`: specification and test oracle, and the implementation for CPUs."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from baton_serve.engine.kernels.interfaces import Experts
from baton_serve.engine.kernels.quantized_weights import StackedWeight, dequantize


def route(
    logits: Tensor, top_k: int, *, renormalize: bool, num_shared: int = 0, has_gate: bool = False
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token in plain torch, as `LayerKernels.route` specifies."""
    num_experts = logits.shape[1] - has_gate
    weights, chosen = logits[:, :num_experts].float().softmax(dim=-1).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return with_shared(weights, chosen.int(), logits, num_shared, has_gate=has_gate)


def with_shared(
    weights: Tensor, chosen: Tensor, logits: Tensor, num_shared: int, *, has_gate: bool
) -> tuple[Tensor, Tensor]:
    """Append the `num_shared` experts that all tokens use to the chosen experts, with their weights, as
    `LayerKernels.route` specifies. Return (weights, chosen).
    """
    if not num_shared:
        return weights, chosen
    num_experts = logits.shape[1] - has_gate
    factor = logits[:, num_experts:].sigmoid().float() if has_gate else torch.ones_like(weights[:, :1])
    numbers = torch.arange(num_experts, num_experts + num_shared, dtype=chosen.dtype, device=chosen.device)
    shape = (len(weights), num_shared)
    return torch.cat([weights, factor.expand(shape)], dim=1), torch.cat([chosen, numbers.expand(shape)], dim=1)


def mix(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: Experts,
    compute: Callable[[Tensor, Experts, int], Tensor] | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, as `LayerKernels.mix` specifies. Tokens are sorted by expert
    once, and only experts that some token has chosen are computed: by `compute`, from rows, the experts and a number;
    None: in plain torch.
    """
    compute = compute or _one
    top_k, count_of_all = chosen.shape[1], experts.num_experts
    numbers = chosen.flatten()
    # Experts of other ranks come last, and are not computed.
    if experts.is_part:
        numbers = torch.where((numbers >= 0) & (numbers < count_of_all), numbers, count_of_all)
    order = numbers.argsort(stable=True)
    counts = numbers.bincount(minlength=count_of_all)[:count_of_all].tolist()
    rows, factors = x[order // top_k], weights.flatten()[order, None]
    outputs = x.new_zeros(rows.shape)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            outputs[part] = compute(rows[part], experts, expert) * factors[part]
            start += count
    # Restore the order of the pairs, so that each token's experts are summed in the order in which it chose them.
    placed = torch.empty_like(outputs)
    placed[order] = outputs
    return placed.view(*chosen.shape, -1).float().sum(dim=1).to(x.dtype)


def activated(gate_up: Tensor, experts: Experts) -> Tensor:
    """Return the activation of `gate_up` [rows, 2 * width] by the rules of these experts, such as silu(gate) * up:
    [rows, width].
    """
    gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if experts.is_interleaved else gate_up.chunk(2, dim=-1)
    if experts.limit is None:
        return functional.silu(gate) * up
    gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * experts.alpha))


def _one(x: Tensor, experts: Experts, number: int) -> Tensor:
    biases = (experts.gate_up_bias, experts.down_bias)
    gate_up_bias, down_bias = (None if bias is None else bias[number] for bias in biases)
    gate_up = functional.linear(x, _matrix(experts.gate_up, number, x.dtype), gate_up_bias)
    return functional.linear(activated(gate_up, experts), _matrix(experts.down, number, x.dtype), down_bias)


def _matrix(weight: Tensor | StackedWeight, number: int, dtype: torch.dtype) -> Tensor:
    return dequantize(weight.expert_view(number), dtype) if isinstance(weight, StackedWeight) else weight[number]
