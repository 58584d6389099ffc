"""Scatters new K and V rows into the block-major cache, converting to its dtype. Twin: ReferenceAttention.store."""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton_tiles import padded


def store(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """key/value [num_tokens, num_kv_heads, head_dim], any strides but the last; a negative slot is skipped."""
    num_kv_heads, block_tokens, head_dim = cache.shape[2:]
    _store_kernel[(key.shape[0],)](
        key,
        value,
        cache,
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cache.stride(0),
        kv_heads=num_kv_heads,
        padded_heads=padded(num_kv_heads),
        block_tokens=block_tokens,
        head_dim=head_dim,
        dims=padded(head_dim),
        num_warps=4,
    )


@triton.jit
def _store_kernel(  # noqa: PLR0913
    key,
    value,
    cache,
    slots,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    block_stride,
    kv_heads: tl.constexpr,
    padded_heads: tl.constexpr,
    block_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head, dim = tl.arange(0, padded_heads)[:, None], tl.arange(0, dims)[None, :]
    mask = (head < kv_heads) & (dim < head_dim)
    k = tl.load(key + token * key_stride + head * key_head_stride + dim, mask)
    v = tl.load(value + token * value_stride + head * value_head_stride + dim, mask)
    row = head * block_tokens + slot % block_tokens
    to = cache + (slot // block_tokens) * block_stride + row * head_dim + dim
    tl.store(to, k.to(cache.dtype.element_ty), mask)
    tl.store(to + kv_heads * block_tokens * head_dim, v.to(cache.dtype.element_ty), mask)
