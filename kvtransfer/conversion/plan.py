"""Decides which tokens of a producer's blocks become which of the consumer's (other block size), and in which dtype
they travel. This module is pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from baton_serve.contracts.block_layout import DTYPE_BYTES, KVLayout
from baton_serve.contracts.identity import BlockHash


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Describes one copy: `count` tokens of the producer's block `source`, from its token `source_token` on, go to the
    consumer's block `sink`, from its token `sink_token` on.

    Both ends number their blocks along the sequence of tokens, each in its own block size; the blocks of the recurrent
    states follow after those of KV. With `is_state`, the last three fields count bytes of these states, not tokens.
    """

    source: int
    sink: int
    source_token: int
    sink_token: int
    count: int
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class Translation:
    """Describes what a fetch asks of a producer whose `layout` differs. `names` are the producer's hashes of all its
    blocks of the first `num_tokens` tokens of the sequence, and of the recurrent states after these tokens. The fetch
    wants this node's blocks from number `first_block` of the sequence to the end of these tokens.
    """

    layout: KVLayout
    names: Sequence[BlockHash]
    first_block: int
    num_tokens: int


def plan(source: KVLayout, sink: KVLayout, *, first_block: int, num_tokens: int) -> list[TokenRun]:
    """Return the copies that fill all blocks of the consumer (`sink`), from block `first_block` of the sequence on,
    with the first `num_tokens` tokens of the producer (`source`). The copies are in token order, and each lies within
    one block of the producer and one block of the consumer.
    """
    first = first_block * sink.block_tokens
    return list(_runs(source.block_tokens, sink.block_tokens, first, num_tokens))


def plan_states(source: KVLayout, sink: KVLayout, *, num_tokens: int) -> list[TokenRun]:
    """Return the copies of the recurrent states after `num_tokens` tokens, from blocks of the producer (`source`) to
    blocks of the consumer (`sink`). Both ends have the same bytes of states, but divide them into blocks of different
    sizes.
    """
    before = [-(-num_tokens // layout.block_tokens) for layout in (source, sink)]
    return [
        TokenRun(before[0] + run.source, before[1] + run.sink, run.source_token, run.sink_token, run.count, True)
        for run in _runs(source.block_bytes, sink.block_bytes, 0, source.state_bytes)
    ]


def _runs(source_size: int, sink_size: int, start: int, end: int) -> Iterator[TokenRun]:
    """Divide the range of tokens (or bytes) from `start` to `end` at each place where a block of the producer or of the
    consumer ends. `source_size` and `sink_size` are the tokens (or bytes) of one block of each.
    """
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
    """Return the layout in which blocks travel from a producer with the layout `source` to a consumer with the layout
    `sink`. It has the producer's block size. It has the consumer's dtype if that is smaller and the transport can send
    it (`narrows`), otherwise the producer's.

    Both ends compute it. The producer converts from its own layout to this one, and the consumer from this one to its
    own.
    """
    if narrows and DTYPE_BYTES[sink.dtype] < DTYPE_BYTES[source.dtype]:
        return msgspec.structs.replace(source, dtype=sink.dtype)
    return source
