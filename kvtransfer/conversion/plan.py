"""Compute which tokens of a producer's blocks become which tokens of the consumer's, and in which dtype they travel.
This module is pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.layout import DTYPE_BYTES, KVLayout


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Copy `count` tokens of block `source`, from `source_token` on, to block `sink`, from `sink_token` on.

    Both ends count blocks along the sequence of tokens, each in its own block size.
    """

    source: int
    sink: int
    source_token: int
    sink_token: int
    count: int


@dataclass(frozen=True, slots=True)
class Translation:
    """Describes the tokens of a fetch in the producer's terms, if the producer's layout differs. `names` are the
    producer's hashes of all blocks of the first `num_tokens` tokens. The fetch wants this node's blocks from number
    `first_block` of the sequence to its end.
    """

    layout: KVLayout
    names: Sequence[BlockHash]
    first_block: int
    num_tokens: int


def plan(source: KVLayout, sink: KVLayout, *, first_block: int, num_tokens: int) -> list[TokenRun]:
    """Return which tokens to copy from which block of `source` to which block of `sink`, so that all blocks of `sink`
    from `first_block` on are filled, in token order. Each run lies within one block of either end.
    """
    pieces: list[TokenRun] = []
    token = first_block * sink.block_tokens
    while token < num_tokens:
        # A run ends where a block ends on either side: each run is one copy within one block of both.
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
    """Return the layout in which blocks travel: the producer's block size, and the consumer's dtype if it is smaller
    and the transport `narrows`.

    Both ends compute it. The producer converts from its own layout to this one, and the consumer from this one to its
    own.
    """
    if narrows and DTYPE_BYTES[sink.dtype] < DTYPE_BYTES[source.dtype]:
        return msgspec.structs.replace(source, dtype=sink.dtype)
    return source
