"""Tokens of blocks copied from one layout to another, on whatever device the target lies.

The codes of one byte and their scales are those of the engine's own kernels, bit by bit (`engine.kernels.kv_codes`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton_serve.contracts.layout import DTYPE_BYTES, SCALE_BYTES, KVLayout
from baton_serve.kvtransfer.conversion.staging_buffers import TokenTarget

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
MAX_CODE_VALUE = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 448.0, torch.int8: 127.0}


def place(block: Tensor, wire: KVLayout, targets: Sequence[TokenTarget], memory: Tensor, layout: KVLayout) -> None:
    """`block`, uint8 [wire.block_bytes], to its targets in `memory`, uint8 [num_blocks, layout.block_bytes]."""
    heads = block.view(_num_heads(wire), -1)
    for target in targets:
        there = memory[target.block].view(_num_heads(layout), -1)
        _convert(heads, wire, target.source_token, there, layout, target.sink_token, target.count)


def recoded(blocks: Tensor, source: KVLayout, wire: KVLayout) -> Tensor:
    """uint8 [n, source.block_bytes] -> uint8 [n, wire.block_bytes]: the same tokens in another dtype."""
    made = torch.zeros((len(blocks), wire.block_bytes), dtype=torch.uint8, device=blocks.device)
    heads, there = blocks.view(len(blocks) * _num_heads(source), -1), made.view(len(blocks) * _num_heads(wire), -1)
    _convert(heads, source, 0, there, wire, 0, source.block_tokens)
    return made


def _num_heads(layout: KVLayout) -> int:
    return layout.num_layers * layout.num_planes * layout.num_kv_heads


def _convert(here: Tensor, source: KVLayout, first: int, there: Tensor, sink: KVLayout, start: int, count: int) -> None:
    """uint8 [heads, bytes] both: a head's tokens lie together, and behind them their scales if it has any."""
    codes, scales = _tokens(here, source, first, count), _scales(here, source, first, count)
    new_codes, new_scales = _tokens(there, sink, start, count), _scales(there, sink, start, count)
    if source.dtype == sink.dtype:
        new_codes.copy_(codes)
        if scales is not None and new_scales is not None:
            new_scales.copy_(scales)
        return
    rows = codes.view(DTYPES[source.dtype]).reshape(len(codes), count, source.head_dim)
    if scales is not None:
        rows = rows.float() * scales.view(torch.bfloat16).float()[..., None]
    if new_scales is None:
        new_codes.view(DTYPES[sink.dtype]).copy_(rows.flatten(1))
        return
    made, factors = _encoded(rows, DTYPES[sink.dtype])
    new_codes.copy_(made.view(torch.uint8).flatten(1))
    new_scales.view(torch.bfloat16).copy_(factors)


def _encoded(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., head_dim] -> codes, and a scale for each row in bfloat16."""
    wide, largest = rows.float(), MAX_CODE_VALUE[dtype]
    scales = (wide.abs().amax(dim=-1) * (1.0 / largest)).to(torch.bfloat16)
    divisor = scales.float()
    inverse = torch.where(divisor > 0, 1.0 / divisor, 0.0)
    scaled = (wide * inverse[..., None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def _tokens(heads: Tensor, layout: KVLayout, first: int, count: int) -> Tensor:
    row = layout.head_dim * DTYPE_BYTES[layout.dtype]
    return heads[:, first * row : (first + count) * row]


def _scales(heads: Tensor, layout: KVLayout, first: int, count: int) -> Tensor | None:
    if not layout.scale_rows:
        return None
    start = layout.block_tokens * layout.head_dim + first * SCALE_BYTES
    return heads[:, start : start + count * SCALE_BYTES]
