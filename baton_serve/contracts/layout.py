"""The memory layout of a KV block. Code that only moves blocks needs `block_bytes` alone."""

from typing import Annotated

import msgspec
from msgspec import Meta

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
"""Bytes per element of each data type of a KV cache."""
SCALE_BYTES = 2
"""Bytes of one scale (bfloat16) of the one-byte data types."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Describes a block: `[num_layers, num_planes, num_kv_heads, block_tokens + scale_rows, head_dim]`, contiguous.

    The planes are K and V; latent attention (MLA) has one plane, from which both are computed.

    One-byte elements are multiples of a scale, one bfloat16 per token and head. The scales are stored in `scale_rows`
    rows after the tokens of each head. So the bytes of a block do not depend on which instance filled it, or in which
    order. `fingerprint` identifies the weights that computed the KV. Blocks of equal layouts are interchangeable;
    others are converted during the transfer, unless `obstacle` returns a reason why that is impossible.
    """

    fingerprint: str
    num_layers: Annotated[int, Meta(ge=0)]
    num_kv_heads: Annotated[int, Meta(ge=0)]
    block_tokens: Annotated[int, Meta(ge=1)]
    head_dim: Annotated[int, Meta(ge=0)]
    dtype: str
    num_planes: Annotated[int, Meta(ge=1)] = 2
    state_bytes: Annotated[int, Meta(ge=0)] = 0
    """Size of the recurrent states of one sequence in bytes; 0 for models whose layers all have KV."""

    @property
    def scale_rows(self) -> int:
        """Return how many rows of `head_dim` elements hold the scales of one head; 0 without scales."""
        has_scales = DTYPE_BYTES[self.dtype] == 1 and self.head_dim
        return -(-SCALE_BYTES * self.block_tokens // self.head_dim) if has_scales else 0

    @property
    def block_bytes(self) -> int:
        """Return the size of a block in bytes."""
        rows = self.num_layers * self.num_planes * self.num_kv_heads * (self.block_tokens + self.scale_rows)
        return rows * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def state_blocks(self) -> int:
        """Return how many blocks the recurrent states of one sequence fill, as a checkpoint; 0 without such states."""
        return -(-self.state_bytes // self.block_bytes) if self.state_bytes else 0

    @property
    def token_bytes(self) -> int:
        """Return the size of a block in bytes per token, rounded down."""
        return self.block_bytes // self.block_tokens


def obstacle(source: KVLayout, sink: KVLayout) -> str | None:
    """Return the reason why blocks of the layout `source` cannot be converted to `sink`, or None if they can. Block
    sizes may differ. Data types may differ if values are rounded at most once: one-byte types are not converted to
    other one-byte types.
    """
    if source == sink:
        return None
    if not {source.dtype, sink.dtype} <= DTYPE_BYTES.keys():
        return "unknown data type of the KV cache"
    shapes = [(s.num_layers, s.num_planes, s.num_kv_heads, s.head_dim) for s in (source, sink)]
    if source.fingerprint != sink.fingerprint:
        return "the model weights differ (fingerprints)"
    if shapes[0] != shapes[1]:
        return "the shapes of a token's KV differ"
    if source.state_bytes or sink.state_bytes:
        return "recurrent states are exchanged only between equal layouts (block size, data type)"
    if source.dtype != sink.dtype and DTYPE_BYTES[source.dtype] == DTYPE_BYTES[sink.dtype] == 1:
        return f"converting {source.dtype} to {sink.dtype} would round the values a second time"
    return None
