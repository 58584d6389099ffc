"""The plain-torch twins of `kernels.triton.layers`: specification and test oracle, on any device and dtype."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from baton_serve.engine.kernels import quantized_kv, quantized_weights
from baton_serve.engine.kernels.interfaces import Activations, Linear, Norm, SlotRows, SlotWeights, Weight, no_work
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kernels.reference.experts import mix, route

__all__ = [
    "argmax",
    "embed",
    "expand",
    "gated_linear",
    "gelu_mul",
    "linear",
    "linear_norm",
    "low_rank",
    "mix",
    "norm",
    "norm_for",
    "pack",
    "rms_norm",
    "rotary_store",
    "rotation",
    "route",
    "shrink",
    "silu_mul",
]


def pack(weight: Tensor | QuantizedWeight) -> Weight:
    """Return a weight unchanged: plain torch reads numbers and codes in their own order."""
    return weight


def embed(token_ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return rows of a quantized embedding table as numbers in plain torch, as `LayerKernels.embed` specifies."""
    assert isinstance(weight, QuantizedWeight)
    return quantized_weights.dequantize_rows(weight, token_ids.reshape(-1), dtype).view(*token_ids.shape, weight.inputs)


def linear(x: Activations, weight: Weight, bias: Tensor | None) -> Tensor:
    """Return x [num_tokens, inputs] times the weight, plus the bias, in plain torch: [num_tokens, outputs]."""
    assert isinstance(x, Tensor)
    if isinstance(weight, QuantizedWeight):
        return quantized_weights.linear(x, weight, bias)
    assert isinstance(weight, Tensor)
    return functional.linear(x, weight, bias)


def low_rank(x: Tensor, weights: SlotWeights) -> Tensor:
    """Return uninitialized memory for the result of `shrink`, as `AdapterKernels.low_rank` specifies."""
    return x.new_empty((x.shape[0], weights.down.shape[1]), dtype=torch.float32)


def shrink(low: Tensor, x: Tensor, weights: SlotWeights, rows: SlotRows) -> None:
    """Multiply each token by the `down` matrices of its adapter slot in plain torch, as `AdapterKernels.shrink`
    specifies. All tokens are multiplied by all slots, and the others' products are dropped.
    """
    for slot, down in enumerate(weights.down):
        multiplied = functional.linear(x.to(down.dtype).float(), down.float())
        low.copy_(torch.where((rows.slots == slot)[:, None], multiplied, low))


def expand(output: Tensor, low: Tensor, weights: SlotWeights, rows: SlotRows) -> None:
    """Add the product of each token's row of `low` with the `up` matrices of its adapter slot to `output` in plain
    torch, as `AdapterKernels.expand` specifies. The product is rounded once.
    """
    wide, rank, starts = output.float(), weights.up.shape[2], (0, *weights.ends[:-1])
    rounded = low.to(weights.up.dtype).float()
    for slot, up in enumerate(weights.up):
        added = [
            functional.linear(rounded[:, part * rank : (part + 1) * rank], up[start:end].float())
            for part, (start, end) in enumerate(zip(starts, weights.ends, strict=True))
        ]
        wide = torch.where((rows.slots == slot)[:, None], wide + torch.cat(added, dim=1), wide)
    output.copy_(wide)


def argmax(logits: Tensor, out: Tensor) -> Tensor:
    """Write the column of each row's largest logit to `out`, int64 [rows], and return `out`. A row with NaN gets the
    number of columns.
    """
    found = logits.max(dim=-1)
    return out.copy_(found.indices.masked_fill(found.values.isnan(), logits.shape[-1]))


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, unit_offset: bool = False
) -> Tensor:
    """Return the RMSNorm of x in plain torch, as `LayerKernels.rms_norm` specifies. `residual` is updated in place."""
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return (weight.float() * normed.to(x.dtype).float()).to(x.dtype)


def norm(x: Tensor, norm: Norm) -> Tensor:
    """Return an RMSNorm or LayerNorm of x in plain torch, as `LayerKernels.norm` specifies."""
    if not norm.is_centered:
        return rms_norm(x, norm.weight, norm.eps, unit_offset=norm.has_offset)
    centered = functional.layer_norm(x.float(), x.shape[-1:], eps=norm.eps) * norm.weight.float()
    return (centered if norm.bias is None else centered + norm.bias.float()).to(x.dtype)


def norm_for(x: Tensor, norm: Norm, then: Weight, *, residual: Tensor | None = None) -> Activations:
    """Return the RMSNorm of x in plain torch, as `LayerKernels.norm_for` specifies. `residual` is updated in place;
    `then` is ignored.
    """
    return rms_norm(x, norm.weight, norm.eps, residual=residual)


def linear_norm(
    x: Activations,
    product: Linear,
    residual: Tensor,
    norm: Norm,
    then: Weight | None = None,
    *,
    before_norm: Callable[[], None] = no_work,
) -> Activations:
    """Return the RMSNorm of a product plus `residual`, which is updated in place, in plain torch; see
    `LayerKernels.linear_norm`.
    """
    output = linear(x, product.weight, product.bias)
    before_norm()
    return rms_norm(output, norm.weight, norm.eps, residual=residual)


def gated_linear(x: Activations, gate_up: Linear, then: Weight) -> Activations:
    """Return silu(gate) * up of a product that computes both, in plain torch; see `LayerKernels.gated_linear`."""
    return silu_mul(linear(x, gate_up.weight, gate_up.bias))


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up in plain torch, as `LayerKernels.silu_mul` specifies."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up in plain torch, as `LayerKernels.gelu_mul` specifies."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def rotation(positions: Tensor, frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) for rotary embeddings in plain torch, as `LayerKernels.rotation` specifies."""
    halves = positions[:, None].float() * frequencies
    angles = torch.cat((halves, halves), dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def rotary_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: tuple[Tensor, Tensor],
    cache: Tensor,
    slots: Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Rotate `query` in place, and write the rotated K, and V, to the KV cache in plain torch; see
    `LayerKernels.rotary_store`.
    """
    query.copy_(_rotated(query, rotation, interleaved=interleaved))
    kept = slots >= 0
    blocks, offsets = slots[kept] // cache.shape[3], slots[kept] % cache.shape[3]
    quantized_kv.write(cache, 0, blocks, offsets, _rotated(key, rotation, interleaved=interleaved)[kept])
    quantized_kv.write(cache, 1, blocks, offsets, value[kept])


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor], *, interleaved: bool) -> Tensor:
    """Return x [num_tokens, heads, head_dim] after rotary embedding, computed in float32. Dimensions beyond the rotary
    ones stay unchanged.
    """
    half = rotation[0].shape[-1] // 2
    cos, sin = (part[:, None, :half].float() for part in rotation)
    result = x.float()
    rotary = result[..., : 2 * half]
    first, second = (rotary[..., ::2], rotary[..., 1::2]) if interleaved else rotary.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    both = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([both, result[..., 2 * half :]], dim=-1).to(x.dtype)
