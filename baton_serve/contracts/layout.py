"""The shape of a block's memory. All who only move blocks see `block_bytes`."""

from typing import Annotated

import msgspec
from msgspec import Meta

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
SCALE_BYTES = 2


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """A block is `[num_layers, num_planes, num_kv_heads, block_tokens + scale_rows, head_dim]`, contiguous.

    The planes are K and V; latent attention (MLA) has one, from which both are computed.

    Elements of one byte are multiples of a scale, one per token and head: `scale_rows` rows after a head's tokens hold
    `block_tokens` of them, each in bfloat16. So whatever fills a block, in whichever order, its bytes are the same.
    `fingerprint` identifies the weights that computed the KV. Blocks of equal layouts are interchangeable; others are
    converted on their way where `obstacle` finds nothing in it.
    """

    fingerprint: str
    num_layers: Annotated[int, Meta(ge=0)]
    num_kv_heads: Annotated[int, Meta(ge=0)]
    block_tokens: Annotated[int, Meta(ge=1)]
    head_dim: Annotated[int, Meta(ge=0)]
    dtype: str
    num_planes: Annotated[int, Meta(ge=1)] = 2

    @property
    def scale_rows(self) -> int:
        has_scales = DTYPE_BYTES[self.dtype] == 1 and self.head_dim
        return -(-SCALE_BYTES * self.block_tokens // self.head_dim) if has_scales else 0

    @property
    def block_bytes(self) -> int:
        rows = self.num_layers * self.num_planes * self.num_kv_heads * (self.block_tokens + self.scale_rows)
        return rows * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_tokens


def obstacle(source: KVLayout, sink: KVLayout) -> str | None:
    """Why blocks of `source` cannot become blocks of `sink`; None: they can.

    Block sizes may differ, and dtypes where at most one rounding is added: codes of one kind never become codes of
    another.
    """
    if source == sink:
        return None
    if not {source.dtype, sink.dtype} <= DTYPE_BYTES.keys():
        return "a dtype is not known here"
    shapes = [(s.num_layers, s.num_planes, s.num_kv_heads, s.head_dim) for s in (source, sink)]
    if source.fingerprint != sink.fingerprint:
        return "other weights computed them"
    if shapes[0] != shapes[1]:
        return "a token's KV has another shape"
    if source.dtype != sink.dtype and DTYPE_BYTES[source.dtype] == DTYPE_BYTES[sink.dtype] == 1:
        return f"{source.dtype} would be rounded again to {sink.dtype}"
    return None
