"""Hashes, shares and finds the KV blocks of cross-attention, one set for each source, such as a window of audio that an
encoder has read. Pure: no tensor.

The cross-attention keys and values of a source are as many as the model's config says, whatever the source contains.
They lie in blocks of the KV cache of their own, with hashes that follow from the root and the source's digest; for the
block pool, the host tier and transports they are blocks like any other. All sequences with a source share its blocks. A
source whose blocks are cached needs no encoder, so that instances without one can compute its prompts too.

The request's only media span names the source. Models without cross-attention have no sources, and every method returns
at once.
"""

from baton_serve.contracts.block_hash import cross_hashes
from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.media import source_span
from baton_serve.contracts.messages import Work
from baton_serve.engine.core.block_pool import BlockPool, CachedPrefix
from baton_serve.engine.core.outputs import NamedBlock
from baton_serve.engine.core.sequence import Request, Sequence
from baton_serve.engine.errors import RequestError


class SourceBlocks:
    """Hashes, finds and registers the blocks that hold cross-attention KV: each prompt of such a model has one source,
    for example a window of audio that an encoder reads. Only the engine's thread may call it."""

    def __init__(self, pool: BlockPool, num_blocks: int) -> None:
        """`num_blocks` is the number of blocks that hold the cross-attention KV of one source; 0 for models without
        cross-attention."""
        self._pool = pool
        self.num_blocks = num_blocks

    def hashes(self, work: Work) -> list[BlockHash]:
        """Return the hashes of the blocks with the cross-attention KV of a request's source; empty if it has no
        source."""
        if not self.num_blocks or not work.media:
            return []
        return cross_hashes(work.root, work.media[0].digest, self.num_blocks)

    def find(self, work: Work) -> CachedPrefix:
        """Return the cached blocks with the cross-attention KV of a request's source, on the device or in the host
        tier. The result is empty if any of the blocks is not cached."""
        names = self.hashes(work)
        found = self._pool.find(names)
        # The encoder computes all positions together, so that a part of them saves nothing.
        return found if len(found) == len(names) else found.first(0)

    def num_needed(self, request: Request) -> int:
        """Return how many blocks each sequence of this request owns for cross-attention KV; 0 if it has no source."""
        return self.num_blocks if request.work.media else 0

    def give(self, sequence: Sequence, cached: list[int], fresh: list[int]) -> None:
        """Give a sequence the blocks for the cross-attention KV of its source. Either all are `cached`, or all are
        `fresh`, and the encoder runs in the sequence's first step to fill them. They are freed together with the
        sequence's other blocks."""
        assert not (cached and fresh), "a source is cached as a whole or not at all"
        sequence.source_blocks, sequence.must_encode = cached + fresh, bool(fresh)

    def share(self, parent: Sequence, fork: Sequence) -> None:
        """Let `fork`, another sequence of the same request, own the blocks with the cross-attention KV of `parent`
        too."""
        self._pool.share(parent.source_blocks)
        fork.source_blocks, fork.must_encode = list(parent.source_blocks), parent.must_encode

    def finish_encoding(self, sequence: Sequence) -> None:
        """Add the cross-attention blocks of a sequence to the prefix cache, if a step that runs the encoder to fill
        them was just launched."""
        if sequence.must_encode:
            # Steps are computed in the order of their launch, so a later step may read the blocks although they are not
            # filled yet.
            sequence.must_encode = False
            self._pool.register(self.hashes(sequence.request.work), sequence.source_blocks)

    def published(self, sequence: Sequence) -> list[NamedBlock]:
        """Return the blocks with the cross-attention KV of a `prefill` request, which its decode worker fetches; empty
        if an earlier call returned them."""
        if sequence.request.is_source_published or not sequence.source_blocks:
            return []
        # A preempted prompt is computed again, but its blocks are reported once.
        sequence.request.is_source_published = True
        names = self.hashes(sequence.request.work)
        return [NamedBlock(*named) for named in zip(names, sequence.source_blocks, strict=True)]


def check_source(work: Work, source_blocks: int) -> None:
    """Check that a request has exactly one source if the model has cross-attention (`source_blocks` is not 0). Raises
    `RequestError` otherwise."""
    # A span with other bounds or with a grid was made for an image, which this model cannot read.
    if source_blocks and (len(work.media) != 1 or work.media[0] != source_span(work.media[0].digest)):
        raise RequestError("invalid", "the model reads one window of audio with each prompt, but the request has none")
