"""Compute which tokens of a producer's blocks become which tokens of the consumer's, and in which dtype they travel.
This module is pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.layout import DTYPE_BYTES, KVLayout


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Copy `count` tokens of block `source`, from `source_token` on, to block `sink`, from `sink_token` on.

    Both ends count blocks along the sequence of tokens, each in its own block size. After the blocks of KV follow those
    of the recurrent states, of which bytes are counted instead of tokens.
    """

    source: int
    sink: int
    source_token: int
    sink_token: int
    count: int
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class Translation:
    """Describes the tokens of a fetch in the producer's terms, if the producer's layout differs. `names` are the
    producer's hashes of all blocks of the first `num_tokens` tokens, and of the recurrent states after them. The fetch
    wants this node's blocks from number `first_block` of the sequence to its end.
    """

    layout: KVLayout
    names: Sequence[BlockHash]
    first_block: int
    num_tokens: int


def plan(source: KVLayout, sink: KVLayout, *, first_block: int, num_tokens: int) -> list[TokenRun]:
    """Return which tokens to copy from which block of `source` to which block of `sink`, so that all blocks of `sink`
    from `first_block` on are filled, in token order. Each run lies within one block of either end.
    """
    first = first_block * sink.block_tokens
    return list(_runs(source.block_tokens, sink.block_tokens, first, num_tokens))


def plan_states(source: KVLayout, sink: KVLayout, *, num_tokens: int) -> list[TokenRun]:
    """Return which bytes of the recurrent states after `num_tokens` tokens to copy from which block to which. They
    are the same bytes on both ends, which divide them into blocks of other sizes.
    """
    before = [-(-num_tokens // layout.block_tokens) for layout in (source, sink)]
    return [
        TokenRun(before[0] + run.source, before[1] + run.sink, run.source_token, run.sink_token, run.count, True)
        for run in _runs(source.block_bytes, sink.block_bytes, 0, source.state_bytes)
    ]


def _runs(source_size: int, sink_size: int, start: int, end: int) -> Iterator[TokenRun]:
    """Divide a range into runs at the borders of blocks of both sizes."""
    while start < end:
        # A run ends where a block ends on either side: each run is one copy within one block of both.
        stop = min(end, *((start // size + 1) * size for size in (source_size, sink_size)))
        yield TokenRun(
            source=start // source_size,
            sink=start // sink_size,
            source_token=start % source_size,
            sink_token=start % sink_size,
            count=stop - start,
        )
        start = stop


def wire_layout(source: KVLayout, sink: KVLayout, *, narrows: bool) -> KVLayout:
    """Return the layout in which blocks travel: the producer's block size, and the consumer's dtype if it is smaller
    and the transport `narrows`.

    Both ends compute it. The producer converts from its own layout to this one, and the consumer from this one to its
    own.
    """
    if narrows and DTYPE_BYTES[sink.dtype] < DTYPE_BYTES[source.dtype]:
        return msgspec.structs.replace(source, dtype=sink.dtype)
    return source
