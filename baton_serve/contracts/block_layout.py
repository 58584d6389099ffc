"""Describes the memory layout of a KV block, and decides whether blocks of two instances are compatible. Code that only
moves blocks needs `block_bytes` alone.
"""

from itertools import groupby
from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
"""Bytes per element of each data type of a KV cache."""
SCALE_BYTES = 2
"""Bytes of one scale (bfloat16) of the one-byte data types."""


class KVShape(msgspec.Struct, frozen=True, array_like=True):
    """Describes one layer's part of a KV block: `[num_planes, num_kv_heads, block_tokens + scale_rows, head_dim]`,
    contiguous.

    The planes are K and V; latent attention (MLA) has one plane, from which both are computed. If keys and values have
    different sizes, `head_dim` is the larger one, and the rest of the other's rows is zero.
    """

    num_kv_heads: Annotated[int, Meta(ge=0)]
    head_dim: Annotated[int, Meta(ge=0)]
    num_planes: Annotated[int, Meta(ge=1)] = 2

    @property
    def num_heads(self) -> int:
        """Return how many heads one layer stores: its KV heads, counted separately for K and V."""
        return self.num_planes * self.num_kv_heads

    def scale_rows(self, layout: "KVLayout") -> int:
        """Return how many rows of `head_dim` elements hold the scales of one head's one-byte elements in a block; 0 if
        the dtype has no scales."""
        has_scales = DTYPE_BYTES[layout.dtype] == 1 and self.head_dim
        return -(-SCALE_BYTES * layout.block_tokens // self.head_dim) if has_scales else 0

    def num_elements(self, layout: "KVLayout") -> int:
        """Return how many elements one layer of this shape has in a block of this layout."""
        return self.num_heads * (layout.block_tokens + self.scale_rows(layout)) * self.head_dim


class KVRun(NamedTuple):
    """Layers with equal shapes that follow each other in a KV block, and their number."""

    num_layers: int
    shape: KVShape


class KVWindow(NamedTuple):
    """Describes the layers with a sliding window of a model whose layers are divided into cache groups."""

    num_groups: Annotated[int, Meta(ge=1)]
    """Number of groups of layers with a window, beside the one group of layers with full attention."""
    tokens: Annotated[int, Meta(ge=1)]
    """The longest window: a token sees itself and at most `tokens` - 1 tokens before it."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Describes a KV block: the parts of all layers (`KVShape`), one after the other. With `window`, a block has the
    layers of one cache group.

    One-byte elements are multiples of a scale, one bfloat16 per token and head. The scales are stored in `scale_rows`
    rows after the tokens of each head. So the bytes of a block do not depend on which instance filled it, or in which
    order. `fingerprint` identifies the weights that computed the KV. Blocks of equal layouts are interchangeable;
    others are converted during the transfer, unless `obstacle` returns a reason why that is impossible.
    """

    fingerprint: str
    num_layers: Annotated[int, Meta(ge=0)]
    """Number of layers with KV of their own in a block; layers that read another layer's KV are not counted."""
    num_kv_heads: Annotated[int, Meta(ge=0)]
    """KV heads of each layer; 0 with `layers`."""
    block_tokens: Annotated[int, Meta(ge=1)]
    head_dim: Annotated[int, Meta(ge=0)]
    """Size of each head; 0 with `layers`."""
    dtype: str
    num_planes: Annotated[int, Meta(ge=1)] = 2
    state_bytes: Annotated[int, Meta(ge=0)] = 0
    """Size of the recurrent states of one sequence in bytes; 0 for models whose layers all have KV."""
    source_tokens: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    """Positions of one source (a window of audio) whose cross-attention KV lies in blocks of its own; unset (0 becomes
    that) for models without cross-attention, so that messages about them are those of older instances."""
    layers: tuple[KVShape, ...] | UnsetType = UNSET
    """The shape of each layer, if they are not all equal. Messages about other models do not contain this field, so
    that older instances read them."""
    window: KVWindow | UnsetType = UNSET
    """Set if the layers are divided into cache groups, each with blocks of its own: one group of the `num_layers`
    layers with full attention, and groups of at most as many layers with a sliding window. Blocks of the latter are
    freed once no token sees them any more."""
    has_bidirectional_prompts: bool | UnsetType = UNSET
    """True if all tokens of a prompt attend to each other in both directions, so that the KV of each depends on the
    whole prompt (`block_hash.prompt_root`). Unset (False becomes that) for all other models."""

    def __post_init__(self) -> None:
        if self.source_tokens == 0:
            msgspec.structs.force_setattr(self, "source_tokens", UNSET)
        if self.has_bidirectional_prompts is False:
            msgspec.structs.force_setattr(self, "has_bidirectional_prompts", UNSET)
        if self.layers is not UNSET and len(self.layers) != self.num_layers:
            raise ValueError(f"{len(self.layers)} shapes for {self.num_layers} layers")

    @property
    def runs(self) -> tuple[KVRun, ...]:
        """Return the layers in their order in a block; neighbouring layers of equal shape are one entry."""
        # Not one entry for each layer: a message may state any number of equal layers.
        if self.layers is UNSET:
            return (KVRun(self.num_layers, KVShape(self.num_kv_heads, self.head_dim, self.num_planes)),)
        return tuple(KVRun(len(list(equal)), shape) for shape, equal in groupby(self.layers))

    @property
    def block_bytes(self) -> int:
        """Return the size of one KV block, with all layers, in bytes."""
        return sum(run.num_layers * run.shape.num_elements(self) for run in self.runs) * DTYPE_BYTES[self.dtype]

    @property
    def state_blocks(self) -> int:
        """Return how many blocks a checkpoint fills: the recurrent states of one sequence; 0 for models without such
        states."""
        return -(-self.state_bytes // self.block_bytes) if self.state_bytes else 0

    @property
    def source_blocks(self) -> int:
        """Return how many blocks the cross-attention KV of one source fills; 0 for models without cross-attention."""
        return 0 if self.source_tokens is UNSET else -(-self.source_tokens // self.block_tokens)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of KV per token, of all layers, rounded down."""
        return self.num_groups * self.block_bytes // self.block_tokens

    @property
    def num_groups(self) -> int:
        """Return the number of cache groups, which is the number of blocks that the KV of a token lies in."""
        return 1 if self.window is UNSET else 1 + self.window.num_groups


def first_seen_block(num_tokens: int, window_tokens: int, block_tokens: int) -> int:
    """Return the index of the first block that the token after `num_tokens` tokens sees through a sliding window."""
    return max(0, num_tokens - window_tokens + 1) // block_tokens


EMBEDDING_BLOCK_ROWS = 64
"""Rows of image embeddings in one block: a block of a model with 3,584 numbers in bfloat16 has 448 KiB."""


def embedding_layout(fingerprint: str, *, width: int, dtype: str) -> KVLayout:
    """Return the layout of blocks with image embeddings: `EMBEDDING_BLOCK_ROWS` rows of `width` numbers each.

    `fingerprint` identifies the weights and the image processor. Such a block is one plane of one head, and each row is
    the embedding of one token, so that the transfer of KV blocks moves it unchanged.
    """
    return KVLayout(
        fingerprint=f"embeddings:{fingerprint}",
        num_layers=1,
        num_kv_heads=1,
        block_tokens=EMBEDDING_BLOCK_ROWS,
        head_dim=width,
        dtype=dtype,
        num_planes=1,
    )


def obstacle(source: KVLayout, sink: KVLayout) -> str | None:
    """Return the reason why blocks of the layout `source` cannot be converted to `sink`, or None if they can. Block
    sizes may differ. Data types may differ if values are rounded at most once: one-byte types are not converted to
    other one-byte types.
    """
    if source == sink:
        return None
    if not {source.dtype, sink.dtype} <= DTYPE_BYTES.keys():
        return "unknown data type of the KV cache"
    if source.fingerprint != sink.fingerprint:
        return "the model weights differ (fingerprints)"
    if source.window is not UNSET or sink.window is not UNSET:
        return (
            "KV of cache groups is exchanged only between equal layouts (block size, data type, groups): start all"
            " instances with --disable-hybrid-kv-cache-manager, or none"
        )
    if source.runs != sink.runs:
        return "the shapes of a token's KV differ"
    if source.state_bytes != sink.state_bytes:
        return "the sizes of the recurrent states differ"
    if source.state_bytes and source.dtype != sink.dtype:
        return "recurrent states are exchanged only between KV caches of equal data types"
    if source.source_blocks or sink.source_blocks:
        return "cross-attention KV is exchanged only between equal layouts (block size, data type)"
    if source.dtype != sink.dtype and DTYPE_BYTES[source.dtype] == DTYPE_BYTES[sink.dtype] == 1:
        return f"converting {source.dtype} to {sink.dtype} would round the values a second time"
    return None
