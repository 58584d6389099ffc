"""Which tokens of a producer's blocks become which of a consumer's, and in which dtype they travel. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.layout import DTYPE_BYTES, KVLayout


@dataclass(frozen=True, slots=True)
class TokenRun:
    """`count` tokens of block `source` from `source_token` on, to block `sink` from `sink_token` on.

    Blocks are counted along the sequence of tokens, at each end in its own size.
    """

    source: int
    sink: int
    source_token: int
    sink_token: int
    count: int


@dataclass(frozen=True, slots=True)
class Translation:
    """What a producer of another layout calls the tokens of a fetch.

    `names` are those of all its blocks of these `num_tokens` tokens, from the first on. The fetch wants this node's
    blocks from `first_block` to the end.
    """

    layout: KVLayout
    names: Sequence[BlockHash]
    first_block: int
    num_tokens: int


def plan(source: KVLayout, sink: KVLayout, *, first_block: int, num_tokens: int) -> list[TokenRun]:
    """All of the sink's blocks from `first_block` on, in the order of their tokens; each piece within one of both."""
    pieces: list[TokenRun] = []
    token = first_block * sink.block_tokens
    while token < num_tokens:
        ends = [(token // size + 1) * size for size in (source.block_tokens, sink.block_tokens)]
        end = min(*ends, num_tokens)
        pieces.append(
            TokenRun(
                source=token // source.block_tokens,
                sink=token // sink.block_tokens,
                source_token=token % source.block_tokens,
                sink_token=token % sink.block_tokens,
                count=end - token,
            )
        )
        token = end
    return pieces


def wire_layout(source: KVLayout, sink: KVLayout, *, narrows: bool) -> KVLayout:
    """How blocks travel: in the producer's size; in the consumer's dtype if it is smaller and the transport `narrows`.

    Both ends compute it. The producer converts what differs from its own layout, the consumer the rest.
    """
    if narrows and DTYPE_BYTES[sink.dtype] < DTYPE_BYTES[source.dtype]:
        return msgspec.structs.replace(source, dtype=sink.dtype)
    return source
