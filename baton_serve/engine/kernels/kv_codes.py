"""K and V in one byte per element: a float8 or int8 code times a scale of its token and head. Twin of all kernels.

A scale per token and head, and not per block, so that a block's bytes depend on its tokens alone: a block grows token
by token, and rounding it again whenever a larger value comes would make its content depend on chunking and batches.
The scales of a head's tokens follow them in memory, in bfloat16 (`contracts.layout`).
"""

import torch
from torch import Tensor

MAX_CODE_VALUE = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 448.0, torch.int8: 127.0}
"""The code that a row's largest element becomes. E5M2 could go further, but its precision does not depend on it."""


def is_coded(cache: Tensor) -> bool:
    return cache.dtype in MAX_CODE_VALUE


def scales_of(cache: Tensor) -> Tensor:
    """bfloat16 [num_blocks, 2, num_kv_heads, block_tokens], a view of a layer's cache view."""
    words = cache.view(torch.bfloat16)
    shape, strides = cache.shape[:4], words.stride()
    start = (cache.storage_offset() + cache.shape[3] * cache.shape[4]) // 2
    return words.as_strided(shape, (*strides[:3], 1), start)


def encode(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., head_dim] -> codes of `dtype`, and scales in bfloat16 [...]."""
    wide, largest = rows.float(), MAX_CODE_VALUE[dtype]
    scales = (wide.abs().amax(dim=-1) * (1.0 / largest)).to(torch.bfloat16)
    divisor = scales.float()
    inverse = torch.where(divisor > 0, 1.0 / divisor, 0.0)
    scaled = (wide * inverse[..., None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def write(cache: Tensor, plane: int, blocks: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """rows [num_tokens, num_kv_heads, head_dim] -> K (plane 0) or V (1) at these places."""
    # Plane by plane: of latent attention both are one memory, which torch would not index as a whole.
    if not is_coded(cache):
        cache.select(1, plane)[blocks, :, offsets] = rows.to(cache.dtype)
        return
    codes, scales = encode(rows, cache.dtype)
    cache.view(torch.uint8).select(1, plane)[blocks, :, offsets] = codes.view(torch.uint8)
    scales_of(cache).select(1, plane)[blocks, :, offsets] = scales


def read(cache: Tensor, tables: Tensor) -> Tensor:
    """float32 [*tables.shape, 2, num_kv_heads, block_tokens, head_dim]: whole blocks."""
    if not is_coded(cache):
        return cache[tables].float()
    codes = cache.view(torch.uint8)[tables].view(cache.dtype).float()
    return codes * scales_of(cache)[tables].float()[..., None]
