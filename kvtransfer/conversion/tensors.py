"""Copies and converts tokens of blocks from one layout and dtype to another, on the device of the target.

One-byte codes and their scales equal those of the engine's own kernels, bit by bit (`engine.kernels.quantized_kv`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_serve.contracts.block_layout import DTYPE_BYTES, SCALE_BYTES, KVLayout, KVShape
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


@dataclass(frozen=True, slots=True)
class _Heads:
    """The KV of consecutive layers of one shape, as a view of blocks: uint8 [..., heads of all these layers, bytes of a
    head]. The keys or values of a head's tokens lie together; if the dtype has scales, those of these tokens follow.
    """

    data: Tensor
    shape: KVShape
    layout: KVLayout

    def tokens(self, first: int, count: int) -> Tensor:
        """Return a view of the keys and values of `count` tokens, from token `first` of the block on, without scales:
        uint8 [..., num_heads, count * head_dim * bytes of an element].
        """
        row = self.shape.head_dim * DTYPE_BYTES[self.layout.dtype]
        return self.data[..., first * row : (first + count) * row]

    def scales(self, first: int, count: int) -> Tensor | None:
        """Return a view of the scales of `count` tokens, from token `first` of the block on: uint8 [..., num_heads,
        count * bytes of a scale]. Return None if the dtype has no scales.
        """
        if not self.shape.scale_rows(self.layout):
            return None
        # A code has one byte.
        start = self.layout.block_tokens * self.shape.head_dim + first * SCALE_BYTES
        return self.data[..., start : start + count * SCALE_BYTES]


def place(block: Tensor, wire: KVLayout, targets: Sequence[TokenTarget], memory: Tensor, layout: KVLayout) -> None:
    """Copy tokens of one arrived `block`, uint8 [wire.block_bytes], to this node's `memory`, uint8 [num_blocks,
    layout.block_bytes]. `targets` lists which tokens go to which block and position there. The dtype is converted from
    that of `wire` to that of `layout`.
    """
    for target in targets:
        if target.is_state:
            part = block[target.source_token : target.source_token + target.count]
            memory[target.block, target.sink_token : target.sink_token + target.count] = part
            continue
        for here, there in zip(_heads(block, wire), _heads(memory[target.block], layout), strict=True):
            _convert(here, target.source_token, there, target.sink_token, target.count)


def recoded(blocks: Tensor, source: KVLayout, wire: KVLayout) -> Tensor:
    """Return blocks with the same tokens in another dtype: uint8 [n, source.block_bytes] becomes uint8 [n,
    wire.block_bytes].
    """
    made = torch.zeros((len(blocks), wire.block_bytes), dtype=torch.uint8, device=blocks.device)
    for here, there in zip(_heads(blocks, source), _heads(made, wire), strict=True):
        _convert(here, 0, there, 0, source.block_tokens)
    return made


def _heads(blocks: Tensor, layout: KVLayout) -> Iterator[_Heads]:
    """Divide `blocks`, uint8 [..., block_bytes], into views of consecutive layers of equal shape, and yield one
    `_Heads` for each view.
    """
    start = 0
    for num_layers, shape in layout.runs:
        size = num_layers * shape.num_elements(layout) * DTYPE_BYTES[layout.dtype]
        part = blocks[..., start : start + size]
        yield _Heads(part.view(*part.shape[:-1], num_layers * shape.num_heads, -1), shape, layout)
        start += size


def _convert(here: _Heads, first: int, there: _Heads, start: int, count: int) -> None:
    """Copy `count` tokens of the source `here`, from its token `first` on, to the target `there`, from its token
    `start` on. Both have equal head shapes; if their KV dtypes differ, the values are converted.
    """
    source, sink = here.layout, there.layout
    codes, scales = here.tokens(first, count), here.scales(first, count)
    new_codes, new_scales = there.tokens(start, count), there.scales(start, count)
    # Equal dtypes: copy the bytes, so that nothing is rounded again.
    if source.dtype == sink.dtype:
        new_codes.copy_(codes)
        if scales is not None and new_scales is not None:
            new_scales.copy_(scales)
        return
    # The dtypes differ: decode to real numbers, then encode again.
    rows = codes.view(DTYPES[source.dtype]).reshape(*codes.shape[:-1], count, here.shape.head_dim)
    if scales is not None:
        rows = rows.float() * scales.view(torch.bfloat16).float()[..., None]
    if new_scales is None:
        new_codes.view(DTYPES[sink.dtype]).copy_(rows.flatten(-2))
        return
    made, factors = _encoded(rows, DTYPES[sink.dtype])
    new_codes.copy_(made.view(torch.uint8).flatten(-2))
    new_scales.view(torch.bfloat16).copy_(factors)


def _encoded(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize `rows` [..., head_dim], one row for each token and head, to `dtype`. Return the codes, of the same
    shape, and the bfloat16 scale of each row.
    """
    wide, largest = rows.float(), MAX_CODE_VALUE[dtype]
    scales = (wide.abs().amax(dim=-1) * (1.0 / largest)).to(torch.bfloat16)
    # Divide by the rounded scale, since this is the one that the consumer multiplies with.
    divisor = scales.float()
    inverse = torch.where(divisor > 0, 1.0 / divisor, 0.0)
    scaled = (wide * inverse[..., None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales
