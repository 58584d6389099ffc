"""The shape of a block's memory. All who only move blocks see `block_bytes`."""

import msgspec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
SCALE_BYTES = 2


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A block is `[num_layers, num_planes, num_kv_heads, block_tokens + scale_rows, head_dim]`, contiguous.

    The planes are K and V; latent attention (MLA) has one, from which both are computed.

    Elements of one byte are multiples of a scale, one per token and head: `scale_rows` rows after a head's tokens hold
    `block_tokens` of them, each in bfloat16. So whatever fills a block, in whichever order, its bytes are the same.
    `fingerprint` identifies the weights that computed the KV: instances whose layouts are not equal never
    exchange blocks.
    """

    fingerprint: str
    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: str
    num_planes: int = 2

    @property
    def scale_rows(self) -> int:
        return -(-SCALE_BYTES * self.block_tokens // self.head_dim) if DTYPE_BYTES[self.dtype] == 1 else 0

    @property
    def block_bytes(self) -> int:
        rows = self.num_layers * self.num_planes * self.num_kv_heads * (self.block_tokens + self.scale_rows)
        return rows * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_tokens
