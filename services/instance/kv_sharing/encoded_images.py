"""Fetches embeddings of images from encode instances into memory of this process.

Embeddings arrive in memory of their own, through a transfer node of their own, since their blocks have another size
than those of the KV cache. Both exist from the first fetch on. A failure is not an error: the image files are there.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
import numpy as np
import torch

from baton_serve.contracts.block_hash import embedding_hashes
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.media import MediaSpan
from baton_serve.contracts.messages import FetchEmbeddings, Work
from baton_serve.contracts.vision.media_text import EmbeddingShape, MediaText, num_embeddings
from baton_serve.engine.device import DTYPES
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.vision.image_types import EncodedImage
from baton_serve.kvtransfer import (
    Corrupt,
    HostMemory,
    LocalTransferError,
    PeerLost,
    TransferError,
    TransferNode,
    TransferTimeout,
)
from baton_serve.services.instance.attempt_table import AttemptEntry

logger = logging.getLogger(__name__)


PEER_FAULTS = (PeerLost, TransferTimeout, Corrupt, TimeoutError)
"""Errors that mean that the encode instance is dead, frozen or broken. One that refuses a single file works."""


class FetchCounter(Protocol):
    """Counts the images whose embeddings were asked for, for metrics."""

    def fetched_embeddings(self, num_images: int, seconds: float) -> None: ...
    def missed_embeddings(self, num_images: int) -> None: ...


OnImage = Callable[[bytes, EncodedImage], None]
"""Called with the digest and the embeddings of an image that has arrived."""


class ArrivingBlocks:
    """Divides the memory in which embeddings arrive among the fetches that run. Event loop only."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[list[int]]:
        """Own `count` blocks for the duration of a `with` block; wait until they are free. Raises `LocalTransferError`
        if there are not so many.
        """
        if count > self._num_blocks:
            raise LocalTransferError(f"{count} blocks of embeddings are more than {self._num_blocks}")
        while len(self._free) < count:
            self._changed.clear()
            await self._changed.wait()
        taken = [self._free.pop() for _ in range(count)]
        try:
            yield taken
        finally:
            # The last ones are taken again first: their memory exists already.
            self._free += taken
            self._changed.set()


class EmbeddingFetcher:
    """Fetches embeddings of one layout into this process. Event loop only; the owner calls `close`."""

    def __init__(
        self,
        layout: KVLayout,
        make_node: Callable[[KVLayout, HostMemory], TransferNode],
        *,
        max_bytes: int,
        counter: FetchCounter,
        source_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_bytes` bounds the embeddings that arrive at the same time. `source_tokens` is the number of positions
        of a source, which is that of its rows; 0 for a model without cross-attention.
        """
        self._layout = layout
        self._make_node = make_node
        self._num_blocks = max(1, max_bytes // layout.block_bytes)
        self._counter = counter
        self._source_tokens = source_tokens
        self._clock = clock
        self._starting = asyncio.Lock()
        self._node: TransferNode | None = None
        self._memory: HostMemory | None = None
        self._arriving = ArrivingBlocks(self._num_blocks)

    async def close(self) -> None:
        """End all fetches and free the memory."""
        if self._node is not None:
            await self._node.close()
        if self._memory is not None:
            self._memory.close()

    async def fetch(self, request: AttemptEntry, asked: Sequence[FetchEmbeddings], on_image: OnImage) -> None:
        """Fetch embeddings, and call `on_image` with each as it arrives. Instances that fail are recorded in `request`.
        Raises `RequestError` if an instance has computed other embeddings than the prompt has places for.
        """
        await asyncio.gather(*(self._try(request, one, on_image) for one in asked))

    async def _try(self, request: AttemptEntry, asked: FetchEmbeddings, on_image: OnImage) -> None:
        """Fetch from one encode instance; images that do not come are logged and counted."""
        ticket, began = asked.ticket, self._clock()
        fetch = _Fetch(request.work, asked, self._layout, self._source_tokens, on_image)
        try:
            async with asyncio.timeout(ticket.timeout_s):
                with request.span.child("fetch embeddings") as span:
                    span.set({"baton.source": ticket.source})
                    await self._fetch(fetch)
        # An `OSError` says that the node could not be started.
        except (TransferError, TimeoutError, OSError, msgspec.MsgspecError) as exc:
            if isinstance(exc, PEER_FAULTS):
                request.failed_encoders.append(ticket.source)
            logger.warning(
                "no embeddings of %d images came from %s, so this instance encodes them: %s: %s",
                len(asked.digests) - len(fetch.came),
                ticket.source,
                type(exc).__name__,
                exc,
                extra={"request_id": request.request_id},
            )
        self._counter.missed_embeddings(len(asked.digests) - len(fetch.came))
        if fetch.came:
            self._counter.fetched_embeddings(len(fetch.came), self._clock() - began)

    async def _fetch(self, fetch: "_Fetch") -> None:
        """Fetch the blocks of some images. Raises `TransferError` and others."""
        ticket = fetch.asked.ticket
        if ticket.source_layout != self._layout:
            raise LocalTransferError(f"the embeddings of {ticket.source} have another layout")
        node, memory = await self._started()
        async with self._arriving.take(fetch.num_blocks) as blocks:
            wanted = fetch.place(blocks, memory)
            try:
                fetched = await node.fetch(ticket, wanted, on_blocks=fetch.on_blocks, partial=True)
                fetch.on_blocks(fetched.names)
                fetch.on_shapes(msgspec.msgpack.decode(fetched.payload, type=list[EmbeddingShape]))
            finally:
                # Blocks whose checksums were right are used, whatever came of the others.
                await fetch.copied()

    async def _started(self) -> tuple[TransferNode, HostMemory]:
        """Return the node and its memory, which the first fetch makes. Raises `TransferError` or `OSError`."""
        async with self._starting:
            if self._node is None or self._memory is None:
                memory = HostMemory(self._num_blocks, self._layout.block_bytes)
                node = self._make_node(self._layout, memory)
                await node.start()
                self._node, self._memory = node, memory
            return self._node, self._memory


class _Fetch:
    """The embeddings of a prompt's images that one encode instance sends. Event loop only."""

    def __init__(
        self, work: Work, asked: FetchEmbeddings, layout: KVLayout, source_tokens: int, on_image: OnImage
    ) -> None:
        self.asked = asked
        self.came: set[bytes] = set()
        """Digests of the images that have arrived."""
        self._layout = layout
        self._on_image = on_image
        self._texts: dict[bytes, MediaText] = {}
        """The tokens of each image in the prompt, whose number is that of its rows. A source has none."""
        self._names: dict[bytes, list[BlockHash]] = {}
        self._places: dict[BlockHash, int] = {}
        self._arrived: set[BlockHash] = set()
        self._memory: HostMemory | None = None
        self._copies: list[asyncio.Future[None]] = []
        spans = {span.digest: span for span in work.media}
        for digest in asked.digests:
            span = spans.get(digest)
            if span is None or not work.token_ids[span.start : span.end]:
                continue
            num_rows = source_tokens
            if not source_tokens:
                self._texts[digest] = text = _text_of(work, span)
                num_rows = num_embeddings(text.parts)
            self._names[digest] = embedding_hashes(asked.ticket.source_root, digest, self._num_blocks_of(num_rows))

    @property
    def num_blocks(self) -> int:
        """The number of blocks that may arrive."""
        return sum(map(len, self._names.values()))

    def place(self, blocks: Sequence[int], memory: HostMemory) -> list[tuple[BlockHash, int]]:
        """Return the names of the wanted blocks with the blocks of `memory` in which they arrive."""
        wanted = list(zip((name for one in self._names.values() for name in one), blocks, strict=True))
        self._places, self._memory = dict(wanted), memory
        return wanted

    def on_blocks(self, names: Sequence[BlockHash]) -> None:
        """Copy the images whose last blocks have arrived. Some of `names` may have arrived before."""
        self._arrived.update(names)
        for digest, text in self._texts.items():
            self._copy_if_whole(digest, EmbeddingShape(digest, num_embeddings(text.parts), 0, 0, text))

    def on_shapes(self, shapes: Sequence[EmbeddingShape]) -> None:
        """Copy the sources that have arrived, and compare the images with the prompt. Raises `RequestError` if one has
        another number of embeddings than the prompt has places.
        """
        for shape in shapes:
            text = self._texts.get(shape.digest)
            if text is None:
                self._copy_if_whole(shape.digest, shape)
            elif shape.num_rows != (count := num_embeddings(text.parts)):
                raise RequestError("internal", f"an image has {shape.num_rows} embeddings instead of {count}")

    async def copied(self) -> None:
        """Wait until the copies have ended. Then the blocks may be used for other fetches."""
        await asyncio.gather(*self._copies)

    def _copy_if_whole(self, digest: bytes, shape: EmbeddingShape) -> None:
        """Begin to copy an image or source if all of its blocks have arrived, and it is not copied yet."""
        names = self._names.get(digest, [])[: self._num_blocks_of(shape.num_rows)]
        is_whole = len(names) == self._num_blocks_of(shape.num_rows) and self._arrived.issuperset(names)
        if is_whole and digest not in self.came:
            self.came.add(digest)
            self._copies.append(asyncio.ensure_future(self._copy(shape, names)))

    async def _copy(self, shape: EmbeddingShape, names: Sequence[BlockHash]) -> None:
        """Copy rows out of their blocks, which later fetches will use, and hand them on."""
        rows = await asyncio.to_thread(self._rows, names, shape.num_rows)
        self._on_image(shape.digest, EncodedImage(rows, shape.width, shape.height, shape.text))

    def _rows(self, names: Sequence[BlockHash], num_rows: int) -> torch.Tensor:
        """Return rows [num_rows, width] of these blocks, as a copy."""
        assert self._memory is not None
        places = [self._places[name] for name in names]
        data = np.concatenate([np.frombuffer(self._memory.block(block), dtype=np.uint8) for block in places])
        rows = torch.from_numpy(data).view(DTYPES[self._layout.dtype])
        return rows.view(-1, self._layout.head_dim)[:num_rows]

    def _num_blocks_of(self, num_rows: int) -> int:
        return -(-num_rows // self._layout.block_tokens)


def _text_of(work: Work, span: MediaSpan) -> MediaText:
    """Return what stands for an image in a prompt. The first token of its span is one that stands for it; rows of some
    families end with others."""
    own = work.token_ids[span.start : span.end]
    return MediaText(parts=(own.count(own[0]),), token_id=own[0], placeholder=own[0], grids=(span.grid,))
