"""The kernels of token mixers in Triton: convolutions, the gated delta rule, lightning attention, state spaces, gates,
and the rows of latent attention.

Twins: `reference.mixers`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.interfaces import Norm
from baton_serve.engine.kernels.mixers import ChannelDeltaHeads, DeltaHeads, LatentRows, PackedSequences
from baton_serve.engine.kernels.reference.mixers import multiply_heads, pack_heads
from baton_serve.engine.kernels.triton.channel_delta import channel_delta_chunks
from baton_serve.engine.kernels.triton.convolution import convolve
from baton_serve.engine.kernels.triton.delta_chunks import delta_chunks
from baton_serve.engine.kernels.triton.delta_step import channel_delta_step, delta_step
from baton_serve.engine.kernels.triton.overlap import overlapping, start_early
from baton_serve.engine.kernels.triton.selective_scan import selective_scan
from baton_serve.engine.kernels.triton.state_space import lightning, state_space
from baton_serve.engine.kernels.triton.tiles import padded

# torch's products of heads call the GPU's own library.
__all__ = [
    "channel_delta_rule",
    "convolve",
    "delta_rule",
    "gated_norm",
    "latent_rows",
    "lightning",
    "multiply_heads",
    "pack_heads",
    "selective_scan",
    "sigmoid_gate",
    "state_space",
]

_HEADS_PER_PROGRAM = 8
_TILE_COLUMNS = 1024


def delta_rule(heads: DeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute the gated delta rule by Triton kernels, as `MixerKernels.delta_rule` specifies. `states` are updated."""
    compute = delta_step if sequences.max_len == 1 else delta_chunks
    return compute(heads, states, sequences)


def channel_delta_rule(heads: ChannelDeltaHeads, states: Tensor, sequences: PackedSequences) -> Tensor:
    """Compute the gated delta rule with a decay for each channel by Triton kernels, as
    `MixerKernels.channel_delta_rule` specifies. `states` are updated.
    """
    compute = channel_delta_step if sequences.max_len == 1 else channel_delta_chunks
    return compute(heads, states, sequences)


def gated_norm(x: Tensor, gate: Tensor, norm: Norm) -> Tensor:
    """Return the RMSNorm of x times silu(gate) by a Triton kernel, as `MixerKernels.gated_norm` specifies."""
    num_tokens, num_heads, size = x.shape
    assert x.is_contiguous() and gate.stride(2) == 1
    output = torch.empty_like(x)
    # With one token, small programs, so that many processors have work.
    tile = min(_HEADS_PER_PROGRAM, padded(num_heads)) if num_tokens > 1 else 1
    _gated_norm_kernel[(num_tokens, triton.cdiv(num_heads, tile))](
        output,
        x,
        gate,
        norm.weight,
        norm.eps,
        gate.stride(0),
        gate.stride(1),
        num_heads=num_heads,
        size=size,
        dims=padded(size),
        tile=tile,
        num_warps=max(1, min(4, tile * padded(size) // 256)),
        **overlapping(x.device),
    )
    return output


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return x times sigmoid(gate) by a Triton kernel, as `MixerKernels.sigmoid_gate` specifies."""
    assert x.is_contiguous() and gate.stride(1) == 1
    output, width = torch.empty_like(x), x.shape[1]
    tile = min(_TILE_COLUMNS, padded(width))
    _sigmoid_gate_kernel[(len(x), triton.cdiv(width, tile))](
        output, x, gate, gate.stride(0), width=width, tile=tile, num_warps=4, **overlapping(x.device)
    )
    return output


def latent_rows(rows: LatentRows, query: Tensor) -> Tensor:
    """Return what the KV cache of latent attention (MLA) stores for each token, and store the rotated end of each query
    head in `query`, by a Triton kernel, as `MixerKernels.latent_rows` specifies.
    """
    (num_tokens, num_heads, head_size), (cos, sin) = rows.query.shape, rows.rotation
    half, width = cos.shape[1] // 2, rows.latents.shape[1]
    assert rows.latents.stride(1) == rows.query.stride(2) == query.stride(2) == 1
    output = torch.empty((num_tokens, 1, width), dtype=rows.latents.dtype, device=rows.latents.device)
    _latent_kernel[(num_tokens, 1 + triton.cdiv(num_heads, _HEADS_PER_PROGRAM))](
        output,
        query,
        rows.latents,
        rows.query,
        rows.norm.weight,
        cos,
        sin,
        rows.norm.eps,
        rows.latents.stride(0),
        rows.query.stride(0),
        rows.query.stride(1),
        query.stride(0),
        query.stride(1),
        cos.stride(0),
        num_heads=num_heads,
        size=head_size - 2 * half,
        rank=width - 2 * half,
        dims=padded(width - 2 * half),
        half=half,
        half_dims=padded(half),
        # Pair i is read at i * step and `gap` behind it, and stored at i * step_to and `gap_to` behind it.
        step=2 if rows.is_interleaved else 1,
        gap=1 if rows.is_interleaved else half,
        step_to=2 if rows.keeps_order and rows.is_interleaved else 1,
        gap_to=1 if rows.keeps_order and rows.is_interleaved else half,
        tile=_HEADS_PER_PROGRAM,
        num_warps=4,
    )
    return output


@triton.jit
def _gated_norm_kernel(  # noqa: PLR0913
    output,
    x,
    gate,
    weight,
    eps,
    gate_stride,
    gate_head_stride,
    num_heads: tl.constexpr,
    size: tl.constexpr,
    dims: tl.constexpr,
    tile: tl.constexpr,
    overlaps: tl.constexpr,
):
    start_early(overlaps)
    token, dim = tl.program_id(0).to(tl.int64), tl.arange(0, dims)
    head = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = (head < num_heads)[:, None] & (dim < size)[None, :]
    at = (token * num_heads + head)[:, None] * size + dim[None, :]
    values = tl.load(x + at, mask, other=0.0)
    dtype = values.dtype
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / size + eps)[:, None]
    factor = tl.load(weight + dim, dim < size, other=0.0).to(tl.float32)
    # Round where the modules of transformers round.
    normed = (normed.to(dtype).to(tl.float32) * factor[None, :]).to(dtype).to(tl.float32)
    gates = tl.load(gate + token * gate_stride + head[:, None] * gate_head_stride + dim[None, :], mask, other=0.0)
    gates = gates.to(tl.float32)
    activated = gates / (1.0 + tl.exp(tl.minimum(-gates, 80.0)))
    tl.store(output + at, (normed * activated).to(dtype), mask)


@triton.jit
def _sigmoid_gate_kernel(output, x, gate, gate_stride, width: tl.constexpr, tile: tl.constexpr, overlaps: tl.constexpr):
    start_early(overlaps)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * tile + tl.arange(0, tile)
    mask = column < width
    values = tl.load(x + row * width + column, mask, other=0.0)
    factor = 1.0 / (1.0 + tl.exp(-tl.load(gate + row * gate_stride + column, mask, other=0.0).to(tl.float32)))
    # The factor is rounded as if it had been stored.
    product = values.to(tl.float32) * factor.to(values.dtype).to(tl.float32)
    tl.store(output + row * width + column, product.to(values.dtype), mask)


@triton.jit
def _latent_kernel(  # noqa: PLR0913
    output,
    to,
    latents,
    query,
    weight,
    cos,
    sin,
    eps,
    latent_stride,
    query_stride,
    head_stride,
    to_stride,
    to_head_stride,
    rotation_stride,
    num_heads: tl.constexpr,
    size: tl.constexpr,
    rank: tl.constexpr,
    dims: tl.constexpr,
    half: tl.constexpr,
    half_dims: tl.constexpr,
    step: tl.constexpr,
    gap: tl.constexpr,
    step_to: tl.constexpr,
    gap_to: tl.constexpr,
    tile: tl.constexpr,
):
    token, pair = tl.program_id(0).to(tl.int64), tl.arange(0, half_dims)
    inside = pair < half
    c = tl.load(cos + token * rotation_stride + pair, inside, other=0.0).to(tl.float32)
    s = tl.load(sin + token * rotation_stride + pair, inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = output.dtype.element_ty
    # The first program of a token computes the cache row, the others the heads of the query.
    if tl.program_id(1) == 0:
        dim = tl.arange(0, dims)
        row = latents + token * latent_stride
        values = tl.load(row + dim, dim < rank, other=0.0).to(tl.float32)
        normed = values * tl.rsqrt(tl.sum(values * values, 0) / rank + eps)
        factor = tl.load(weight + dim, dim < rank, other=0.0).to(tl.float32)
        at = output + token * (rank + 2 * half)
        tl.store(at + dim, (normed.to(dtype).to(tl.float32) * factor).to(dtype), dim < rank)
        # The norm covers the latent only: the part that rotates is read as the product left it.
        first = tl.load(row + rank + pair * step, inside, other=0.0).to(tl.float32)
        second = tl.load(row + rank + pair * step + gap, inside, other=0.0).to(tl.float32)
        tl.store(at + rank + pair * step_to, (first * c - second * s).to(dtype), inside)
        tl.store(at + rank + pair * step_to + gap_to, (second * c + first * s).to(dtype), inside)
    else:
        head = ((tl.program_id(1) - 1) * tile + tl.arange(0, tile))[:, None]
        mask = (head < num_heads) & inside[None, :]
        heads = query + token * query_stride + head * head_stride + size + pair[None, :] * step
        low = tl.load(heads, mask, other=0.0).to(tl.float32)
        high = tl.load(heads + gap, mask, other=0.0).to(tl.float32)
        turned = to + token * to_stride + head * to_head_stride + rank + pair[None, :] * step_to
        tl.store(turned, (low * c[None, :] - high * s[None, :]).to(dtype), mask)
        tl.store(turned + gap_to, (high * c[None, :] + low * s[None, :]).to(dtype), mask)
