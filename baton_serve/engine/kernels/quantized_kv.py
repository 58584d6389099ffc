"""Quantizes K and V to one byte (fp8, int8 KV cache), with a scale of each token and head. This is the twin of all
kernels that read or write such caches.

The scale belongs to a token and head, not to a block, so that the bytes of a block depend on its tokens only. A block
grows token by token; with a scale of its own it would be rounded again whenever a larger value comes, and its content
would depend on chunks and batches. The scales of a head's tokens follow their codes in memory, in bfloat16
(`contracts.block_layout`).
"""

import torch
from torch import Tensor

MAX_CODE_VALUE = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 448.0, torch.int8: 127.0}
"""The value that the largest element of a row is scaled to. E5M2 has larger values, but its precision would not gain
from them.
"""


def is_coded(cache: Tensor) -> bool:
    """Return whether a KV cache is quantized to one byte for each element (float8 or int8 codes with scales)."""
    return cache.dtype in MAX_CODE_VALUE


def scales_of(cache: Tensor) -> Tensor:
    """Return the scales of a quantized KV cache as a view of the same memory, bfloat16 [num_blocks, 2, num_kv_heads,
    block_tokens]. `cache` is one layer's view.
    """
    words = cache.view(torch.bfloat16)
    shape, strides = cache.shape[:4], words.stride()
    start = (cache.storage_offset() + cache.shape[3] * cache.shape[4]) // 2
    return words.as_strided(shape, (*strides[:3], 1), start)


def encode(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize rows [..., head_dim] with one scale for each row. Return (codes in `dtype`, scales in bfloat16
    [...]).
    """
    wide, largest = rows.float(), MAX_CODE_VALUE[dtype]
    scales = (wide.abs().amax(dim=-1) * (1.0 / largest)).to(torch.bfloat16)
    # Divide by the scale as it is stored: the reader multiplies with the rounded one.
    divisor = scales.float()
    inverse = torch.where(divisor > 0, 1.0 / divisor, 0.0)
    scaled = (wide * inverse[..., None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def write(cache: Tensor, plane: int, blocks: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """Write rows [num_tokens, num_kv_heads, head_dim] to K (`plane` 0) or V (`plane` 1) of one layer's cache view, at
    the given block and offset of each token. They are quantized if the cache is.
    """
    # One plane at a time: with latent attention both planes are the same memory, which torch cannot index as a whole.
    if not is_coded(cache):
        cache.select(1, plane)[blocks, :, offsets] = rows.to(cache.dtype)
        return
    codes, scales = encode(rows, cache.dtype)
    cache.view(torch.uint8).select(1, plane)[blocks, :, offsets] = codes.view(torch.uint8)
    scales_of(cache).select(1, plane)[blocks, :, offsets] = scales


def read(cache: Tensor, tables: Tensor) -> Tensor:
    """Return the content of whole KV blocks as float32 [*tables.shape, 2, num_kv_heads, block_tokens, head_dim],
    dequantized if the cache is quantized. `tables` holds block numbers.
    """
    if not is_coded(cache):
        return cache[tables].float()
    codes = cache.view(torch.uint8)[tables].view(cache.dtype).float()
    return codes * scales_of(cache)[tables].float()[..., None]
