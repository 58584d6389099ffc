"""Scatters new K and V into the paged KV cache (reshape_and_cache), and quantizes them to its dtype. Twin:
`ReferenceAttention.store`.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_serve.engine.kernels.quantized_kv import MAX_CODE_VALUE, is_coded
from baton_serve.engine.kernels.triton.tiles import padded


def store(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim], whose last stride must be 1, to the cache positions
    `slots`. A token with a negative slot is skipped.
    """
    num_kv_heads, block_tokens, head_dim = cache.shape[2:]
    has_values = cache.stride(1) != 0  # latents have one plane, which is both K and V
    _store_kernel[(key.shape[0],)](
        key,
        value,
        cache,
        cache.view(torch.bfloat16) if is_coded(cache) else cache,
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cache.stride(0),
        kv_heads=num_kv_heads,
        padded_heads=padded(num_kv_heads),
        block_tokens=block_tokens,
        head_rows=cache.stride(2) // head_dim,
        largest=MAX_CODE_VALUE.get(cache.dtype, 0.0),
        head_dim=head_dim,
        dims=padded(head_dim),
        has_values=has_values,
        num_warps=4,
    )


@triton.jit
def _store_kernel(  # noqa: PLR0913
    key,
    value,
    cache,
    scales,
    slots,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    block_stride,
    kv_heads: tl.constexpr,
    padded_heads: tl.constexpr,
    block_tokens: tl.constexpr,
    head_rows: tl.constexpr,
    largest: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    has_values: tl.constexpr,
):
    # 64 bits, because offsets into the cache can exceed an int32.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head, dim = tl.arange(0, padded_heads)[:, None], tl.arange(0, dims)[None, :]
    mask = (head < kv_heads) & (dim < head_dim)
    row = (slot // block_tokens) * block_stride // head_dim + head * head_rows
    to = cache + (row + slot % block_tokens) * head_dim + dim
    at = scales + (row + block_tokens) * (head_dim // 2) + slot % block_tokens
    plane: tl.constexpr = kv_heads * head_rows * head_dim
    _store_rows(key + token * key_stride + head * key_head_stride + dim, to, at, mask, head < kv_heads, largest)
    if has_values:
        rows = value + token * value_stride + head * value_head_stride + dim
        _store_rows(rows, to + plane, at + plane // 2, mask, head < kv_heads, largest)


@triton.jit
def _store_rows(rows, to, scales, mask, live, largest: tl.constexpr):
    """Copy the keys or the values of one token, [heads, dims], from the pointers `rows` to `to`. If `largest` > 0 they
    are quantized, and their scales are stored too.
    """
    x = tl.load(rows, mask, other=0.0)
    if largest > 0:
        top = largest_of(x)
        tl.store(scales, scale_of(top, largest), live)
        x = coded(x, top, to, largest)
    tl.store(to, x.to(to.dtype.element_ty), mask)


@triton.jit
def largest_of(rows):
    """Return the largest absolute value of each row [heads, dims], float32 [heads, 1]; NaN if the row has one. They are
    compared as integers, among which NaN is larger than all numbers.
    """
    bits = rows.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, 1)[:, None].to(tl.float32, bitcast=True)


@triton.jit
def scale_of(largest_element, largest: tl.constexpr):
    """Return the bfloat16 scale for a row whose largest element is `largest_element`, if codes have values up to
    `largest`. It is rounded to nearest here, because devices convert in different ways.
    """
    bits = (largest_element * (1.0 / largest)).to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(largest_element == largest_element, rounded, 0x7FC0)  # NaN stays NaN; a code could not show it
    return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def coded(rows, largest_element, cache, largest: tl.constexpr):
    """Quantize rows to the dtype of the cache. Return the codes, as float32 or as that dtype, before they are stored;
    see `quantized_kv.encode`.
    """
    divisor = scale_of(largest_element, largest).to(tl.float32)
    inverse = tl.where(divisor > 0, 1.0 / tl.where(divisor > 0, divisor, 1.0), 0.0)
    scaled = tl.minimum(tl.maximum(rows.to(tl.float32) * inverse, -largest), largest)
    if cache.dtype.element_ty == tl.int8:
        scaled = (scaled + 12582912.0) - 12582912.0  # rounds to the nearest integer, ties to even
    return scaled
