"""Copy tokens of blocks from one layout to another, on the device of the target.

One-byte codes and their scales equal those of the engine's own kernels, bit by bit (`engine.kernels.kv_codes`).
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
"""Largest value of each one-byte dtype that a row is scaled to."""


def place(block: Tensor, wire: KVLayout, targets: Sequence[TokenTarget], memory: Tensor, layout: KVLayout) -> None:
    """Copy the tokens of one arrived `block`, uint8 [wire.block_bytes], to the blocks and positions that `targets` name
    in `memory`, uint8 [num_blocks, layout.block_bytes].
    """
    heads = block.view(_num_heads(wire), -1)
    for target in targets:
        there = memory[target.block].view(_num_heads(layout), -1)
        _convert(heads, wire, target.source_token, there, layout, target.sink_token, target.count)


def recoded(blocks: Tensor, source: KVLayout, wire: KVLayout) -> Tensor:
    """Convert blocks to another dtype: uint8 [n, source.block_bytes] to uint8 [n, wire.block_bytes], with the same
    tokens.
    """
    made = torch.zeros((len(blocks), wire.block_bytes), dtype=torch.uint8, device=blocks.device)
    heads, there = blocks.view(len(blocks) * _num_heads(source), -1), made.view(len(blocks) * _num_heads(wire), -1)
    _convert(heads, source, 0, there, wire, 0, source.block_tokens)
    return made


def _num_heads(layout: KVLayout) -> int:
    return layout.num_layers * layout.num_planes * layout.num_kv_heads


def _convert(here: Tensor, source: KVLayout, first: int, there: Tensor, sink: KVLayout, start: int, count: int) -> None:
    """Copy tokens between two tensors, both uint8 [num_heads, bytes_per_head].

    The tokens of a head lie together, followed by their scales if the dtype has any.
    """
    codes, scales = _tokens(here, source, first, count), _scales(here, source, first, count)
    new_codes, new_scales = _tokens(there, sink, start, count), _scales(there, sink, start, count)
    # Equal dtypes: copy the bytes, so that nothing is rounded again.
    if source.dtype == sink.dtype:
        new_codes.copy_(codes)
        if scales is not None and new_scales is not None:
            new_scales.copy_(scales)
        return
    # The dtypes differ: decode to real numbers, then encode again.
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
    """Quantize rows [..., head_dim]. Return the codes, and a bfloat16 scale for each row."""
    wide, largest = rows.float(), MAX_CODE_VALUE[dtype]
    scales = (wide.abs().amax(dim=-1) * (1.0 / largest)).to(torch.bfloat16)
    # Divide by the rounded scale, since this is the one that the consumer multiplies with.
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
    # The scales of a head follow the codes of all its tokens; a code has one byte.
    start = layout.block_tokens * layout.head_dim + first * SCALE_BYTES
    return heads[:, start : start + count * SCALE_BYTES]
