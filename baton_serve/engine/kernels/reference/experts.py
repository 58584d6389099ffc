"""The plain-torch twins of triton_experts: specification and oracle, and what the CPU runs."""

import torch
from torch import Tensor
from torch.nn import functional

from baton_serve.engine.kernels.metadata import Experts
from baton_serve.engine.kernels.quantized import StackedWeight, dequantize


def route(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """See triton_experts.route."""
    weights, chosen = logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen.int()


def mix(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """See triton_experts.mix. Rows are sorted by expert once; only experts that somebody chose are visited."""
    top_k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=experts.num_experts).tolist()
    rows, factors = x[order // top_k], weights.flatten()[order, None]
    outputs = x.new_empty(rows.shape)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            outputs[part] = _one(rows[part], experts, expert) * factors[part]
            start += count
    placed = torch.empty_like(outputs)
    placed[order] = outputs
    return placed.view(*chosen.shape, -1).float().sum(dim=1).to(x.dtype)


def activated(gate_up: Tensor, experts: Experts) -> Tensor:
    """gate_up [rows, 2 * width] -> [rows, width]."""
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
    return dequantize(weight.one(number), dtype) if isinstance(weight, StackedWeight) else weight[number]
