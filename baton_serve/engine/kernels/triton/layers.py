"""The steps between matrix products, one kernel each: RMSNorm (+ residual), SiLU * mul, rotary + KV store.

Their twins are in `reference.layers`. They round where the modules of transformers round, except that the rotation
rounds once. Each kernel reads its input once and writes its output once; none waits for the device.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.interfaces import Activations, Linear, Norm, Weight, no_work
from baton_serve.engine.kernels.quantized_kv import MAX_CODE_VALUE, is_coded
from baton_serve.engine.kernels.quantized_weights import QuantizedWeight
from baton_serve.engine.kernels.reference import layers as twin
from baton_serve.engine.kernels.reference.layers import embed
from baton_serve.engine.kernels.triton import split_k as triton_split
from baton_serve.engine.kernels.triton.activation_digits import norm_split, silu_split
from baton_serve.engine.kernels.triton.experts import route
from baton_serve.engine.kernels.triton.experts_codes import mix
from baton_serve.engine.kernels.triton.gemv import gated_row, is_row, linear, pack
from baton_serve.engine.kernels.triton.kv_store import coded, largest_of, scale_of
from baton_serve.engine.kernels.triton.overlap import overlapping, start_early
from baton_serve.engine.kernels.triton.quant import linear as triton_quant
from baton_serve.engine.kernels.triton.quant.digit_products import has_nibbles, takes_digits
from baton_serve.engine.kernels.triton.quant.gemv import row_product
from baton_serve.engine.kernels.triton.tiles import padded


def rotation(positions: Tensor, frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) for rotary embeddings by a Triton kernel, as `LayerKernels.rotation` specifies."""
    half = frequencies.shape[0]
    both = torch.empty((2, positions.shape[0], 2 * half), dtype=torch.float32, device=positions.device)
    _rotation_kernel[(positions.shape[0],)](
        both[0],
        both[1],
        positions,
        frequencies,
        scaling,
        half=half,
        dims=padded(2 * half),
        num_warps=1,
        **overlapping(positions.device),
    )
    return both[0], both[1]


@triton.jit
def _rotation_kernel(  # noqa: PLR0913
    cos, sin, positions, frequencies, scaling, half: tl.constexpr, dims: tl.constexpr, overlaps: tl.constexpr
):
    start_early(overlaps)
    token, dim = tl.program_id(0).to(tl.int64), tl.arange(0, dims)
    live = dim < 2 * half
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + dim % half, live, other=0.0)
    tl.store(cos + token * (2 * half) + dim, tl.cos(angle) * scaling, live)
    tl.store(sin + token * (2 * half) + dim, tl.sin(angle) * scaling, live)


__all__ = [
    "embed",
    "gated_linear",
    "gelu_mul",
    "linear",
    "linear_norm",
    "mix",
    "norm",
    "norm_for",
    "pack",
    "rms_norm",
    "rotary_store",
    "rotation",
    "route",
    "silu_mul",
]

_HEADS_PER_PROGRAM = 8


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, unit_offset: bool = False
) -> Tensor:
    """Return the RMSNorm of x [..., hidden] by a Triton kernel; see `LayerKernels.rms_norm`. `residual` is updated in
    place. `unit_offset` multiplies by 1 + weight (Gemma).
    """
    hidden = x.shape[-1]
    # The heads of one token may be part of a wider row, and need no copy then.
    is_wide = x.dim() == 3 and residual is None and x.stride(2) == 1
    rows = x if is_wide else x.reshape(-1, 1, hidden)
    output = torch.empty((rows.shape[0] * rows.shape[1], hidden), dtype=x.dtype, device=x.device)
    added = rows[:, 0] if residual is None else residual.view(-1, hidden)
    _rms_norm_kernel[(len(output),)](
        output,
        rows,
        added,
        weight,
        eps,
        rows.stride(0),
        rows.stride(1),
        added.stride(0),
        heads=rows.shape[1],
        hidden=hidden,
        dims=padded(hidden),
        has_residual=residual is not None,
        unit_offset=unit_offset,
        num_warps=max(1, min(16, padded(hidden) // 512)),
        **overlapping(x.device),
    )
    return output.view(x.shape)


def norm(x: Tensor, norm: Norm) -> Tensor:
    """Return an RMSNorm or LayerNorm of x, as `LayerKernels.norm` specifies. LayerNorm runs in plain torch."""
    return twin.norm(x, norm) if norm.is_centered else rms_norm(x, norm.weight, norm.eps, unit_offset=norm.has_offset)


def norm_for(x: Tensor, norm: Norm, then: Weight, *, residual: Tensor | None = None) -> Activations:
    """Return the RMSNorm of x [num_tokens, hidden], or of x + `residual`, which is updated in place. It is returned as
    `Digits` (16-bit integers) if the product with the weight `then` is computed with integers.
    """
    if isinstance(then, QuantizedWeight) and takes_digits(then, x.shape[0], x.dtype):
        return norm_split(x, norm.weight, norm.eps, residual=residual, nibbles=has_nibbles(then))
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
    """Add the product of x to `residual` [num_tokens, outputs] in place, and return the RMSNorm of the sum, in the form
    that is fastest for the weight `then`; see `LayerKernels.linear_norm`.

    With few rows, different programs multiply ranges of the inputs, and the kernel of the norm adds their products.
    """
    weight = product.weight
    if isinstance(x, Tensor) and isinstance(weight, Tensor) and _is_split(x, weight, product.bias):
        summands = triton_split.product_parts(x, weight)
        before_norm()
        return triton_split.norm_of_parts(summands, residual, norm.weight, norm.eps)
    if isinstance(weight, QuantizedWeight) and product.bias is None and residual.is_contiguous():
        parts = triton_quant.parts(x, weight)
        if parts is not None:
            before_norm()
            return _norm_of_parts(parts, residual, norm, then)
    output = linear(x, weight, product.bias)
    before_norm()
    if then is not None:
        return norm_for(output, norm, then, residual=residual)
    return rms_norm(output, norm.weight, norm.eps, residual=residual)


def _norm_of_parts(parts: Tensor, residual: Tensor, norm: Norm, then: Weight | None) -> Activations:
    if isinstance(then, QuantizedWeight) and takes_digits(then, parts.shape[1], residual.dtype):
        nibbles = has_nibbles(then)
        return norm_split(parts, norm.weight, norm.eps, residual=residual, nibbles=nibbles, are_parts=True)
    return triton_split.norm_of_parts(parts, residual, norm.weight, norm.eps)


def _is_split(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return bias is None and triton_split.fits(x, weight)


def gated_linear(x: Activations, gate_up: Linear, then: Weight) -> Activations:
    """Return silu(gate) * up of a product that computes both. It is computed within the product if each output belongs
    to one program, and returned as `Digits` (16-bit integers) if the product with `then` is computed with integers.
    """
    weight = gate_up.weight
    if isinstance(x, Tensor) and isinstance(weight, Tensor) and is_row(x, weight):
        return gated_row(x, weight, gate_up.bias)
    if isinstance(x, Tensor) and isinstance(weight, QuantizedWeight) and triton_quant.is_row(x, weight):
        is_split = isinstance(then, QuantizedWeight) and takes_digits(then, 1, x.dtype)
        if not is_split and x.stride(-1) == 1:
            return row_product(x, weight, gate_up.bias, gated=True)
    return _silu_for(linear(x, weight, gate_up.bias), then)


def _silu_for(gate_up: Tensor, then: Weight) -> Activations:
    if isinstance(then, QuantizedWeight) and takes_digits(then, gate_up.shape[0], gate_up.dtype):
        return silu_split(gate_up, nibbles=has_nibbles(then))
    return silu_mul(gate_up)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [..., width] by a Triton kernel, for `gate_up` [..., 2 * width], in which the gate comes
    first.
    """
    return _gated(gate_up, is_gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up by a Triton kernel, as `LayerKernels.gelu_mul` specifies."""
    return _gated(gate_up, is_gelu=True)


def _gated(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width)
    output = torch.empty((rows.shape[0], width), dtype=rows.dtype, device=rows.device)
    tile = min(2048, padded(width))
    _gate_kernel[(rows.shape[0], -(-width // tile))](
        output, rows, rows.stride(0), width=width, tile=tile, is_gelu=is_gelu, num_warps=4
    )
    return output.view(*gate_up.shape[:-1], width)


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
    """Rotate `query` in place, and write the rotated K, and V, to the cache by a Triton kernel; see
    `LayerKernels.rotary_store`. `key` itself is not changed, and a token with a negative slot is not stored.
    """
    num_tokens, num_heads, head_dim = query.shape
    cos, sin = rotation
    num_kv_heads, block_tokens = cache.shape[2:4]
    half = cos.shape[-1] // 2
    query_programs, kv_programs = -(-num_heads // _HEADS_PER_PROGRAM), -(-num_kv_heads // _HEADS_PER_PROGRAM)
    _rotary_store_kernel[(num_tokens, query_programs + kv_programs)](
        query,
        key,
        value,
        cos,
        sin,
        cache,
        cache.view(torch.bfloat16) if is_coded(cache) else cache,
        slots,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cos.stride(0),
        cache.stride(0),
        heads=num_heads,
        kv_heads=num_kv_heads,
        head_dim=head_dim,
        dims=padded(head_dim),
        half=half,
        half_dims=padded(half),
        block_tokens=block_tokens,
        head_rows=cache.stride(2) // head_dim,
        largest=MAX_CODE_VALUE.get(cache.dtype, 0.0),
        step=2 if interleaved else 1,
        gap=1 if interleaved else half,
        tile_heads=_HEADS_PER_PROGRAM,
        num_warps=4,
    )


@triton.jit
def _rms_norm_kernel(  # noqa: PLR0913
    output,
    x,
    residual,
    weight,
    eps,
    x_stride,
    head_stride,
    residual_stride,
    heads: tl.constexpr,
    hidden: tl.constexpr,
    dims: tl.constexpr,
    has_residual: tl.constexpr,
    unit_offset: tl.constexpr,
    overlaps: tl.constexpr,
):
    start_early(overlaps)
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, dims)
    mask = dim < hidden
    values = tl.load(x + row // heads * x_stride + row % heads * head_stride + dim, mask, other=0.0)
    factor = tl.load(weight + dim, mask, other=0.0).to(tl.float32)  # here: loads do not pass the barrier of a sum
    dtype = values.dtype
    values = values.to(tl.float32)
    if has_residual:
        at = residual + row * residual_stride + dim
        total = (values + tl.load(at, mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(at, total, mask)
        values = total.to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / hidden + eps)
    if unit_offset:
        normed *= 1.0 + factor
    else:
        # Llama rounds before it multiplies by the weight; Gemma, above, rounds once at the end.
        normed = normed.to(dtype).to(tl.float32) * factor
    tl.store(output + row * hidden + dim, normed.to(dtype), mask)


@triton.jit
def _gate_kernel(output, gate_up, stride, width: tl.constexpr, tile: tl.constexpr, is_gelu: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = column < width
    gate = tl.load(gate_up + row * stride + column, mask, other=0.0)
    up = tl.load(gate_up + row * stride + width + column, mask, other=0.0)
    wide = gate.to(tl.float32)
    argument = wide
    if is_gelu:  # tanh(y) = 2 * sigmoid(2 * y) - 1
        argument = 1.5957691216057308 * wide * (1.0 + 0.044715 * wide * wide)
    # A gate below -80 has vanished in any dtype; the bound keeps exp finite.
    activated = (wide / (1.0 + tl.exp(tl.minimum(-argument, 80.0)))).to(gate.dtype)
    tl.store(output + row * width + column, (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask)


@triton.jit
def _rotary_store_kernel(  # noqa: PLR0913, PLR0915
    query,
    key,
    value,
    cos,
    sin,
    cache,
    scales,
    slots,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    rotation_stride,
    block_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    half: tl.constexpr,
    half_dims: tl.constexpr,
    block_tokens: tl.constexpr,
    head_rows: tl.constexpr,
    largest: tl.constexpr,
    step: tl.constexpr,
    gap: tl.constexpr,
    tile_heads: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (heads + tile_heads - 1) // tile_heads
    pair = tl.arange(0, half_dims)
    c = tl.load(cos + token * rotation_stride + pair, pair < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * rotation_stride + pair, pair < half, other=0.0).to(tl.float32)[None, :]
    if part < query_parts:
        head = part * tile_heads + tl.arange(0, tile_heads)[:, None]
        mask = (head < heads) & (pair < half)[None, :]
        at = query + token * query_stride + head * query_head_stride + pair[None, :] * step
        first = tl.load(at, mask, other=0.0).to(tl.float32)
        second = tl.load(at + gap, mask, other=0.0).to(tl.float32)
        tl.store(at, (first * c - second * s).to(query.dtype.element_ty), mask)
        tl.store(at + gap, (second * c + first * s).to(query.dtype.element_ty), mask)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            head = (part - query_parts) * tile_heads + tl.arange(0, tile_heads)[:, None]
            row = (slot // block_tokens) * block_stride // head_dim + head * head_rows
            to = cache + (row + slot % block_tokens) * head_dim
            plane: tl.constexpr = kv_heads * head_rows * head_dim
            dtype = cache.dtype.element_ty
            mask = (head < kv_heads) & (pair < half)[None, :]
            at = key + token * key_stride + head * key_head_stride + pair[None, :] * step
            first = tl.load(at, mask, other=0.0).to(tl.float32)
            second = tl.load(at + gap, mask, other=0.0).to(tl.float32)
            low, high = first * c - second * s, second * c + first * s
            dim = tl.arange(0, dims)[None, :]
            whole = (head < kv_heads) & (dim < head_dim)
            rest = whole & (dim >= 2 * half)
            kept = tl.load(key + token * key_stride + head * key_head_stride + dim, rest, other=0.0)
            v = tl.load(value + token * value_stride + head * value_head_stride + dim, whole, other=0.0)
            if largest > 0:
                # Round the rotated key to its own dtype first: every other path does, and the codes must be equal.
                low, high = low.to(kept.dtype).to(tl.float32), high.to(kept.dtype).to(tl.float32)
                top = tl.maximum(largest_of(low), largest_of(high), tl.PropagateNan.ALL)
                top = tl.maximum(top, largest_of(kept), tl.PropagateNan.ALL)
                at = scales + (row + block_tokens) * (head_dim // 2) + slot % block_tokens
                v_top = largest_of(v)
                tl.store(at, scale_of(top, largest), head < kv_heads)
                tl.store(at + plane // 2, scale_of(v_top, largest), head < kv_heads)
                low, high = coded(low, top, cache, largest), coded(high, top, cache, largest)
                kept, v = coded(kept, top, cache, largest), coded(v, v_top, cache, largest)
            tl.store(to + pair[None, :] * step, low.to(dtype), mask)
            tl.store(to + pair[None, :] * step + gap, high.to(dtype), mask)
            if 2 * half < head_dim:
                tl.store(to + dim, kept.to(dtype), rest)
            tl.store(to + plane + dim, v.to(dtype), whole)
