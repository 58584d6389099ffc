"""Decides where a prompt's images come from: embeddings of an encode instance, or decoded files for the engine's own
tower.

Embeddings arrive in memory of their own, through a transfer node of their own, since their blocks have another size
than those of the KV cache. Both exist from the first fetch on. A failure is not an error: the image files are there.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
import numpy as np
import torch

from baton_serve.contracts.block_hash import embedding_hashes
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.media import MediaSpan, digest_of, spans_of_file
from baton_serve.contracts.messages import FetchEmbeddings, Generate, Prefill
from baton_serve.contracts.vision.media_text import EmbeddingShape
from baton_serve.engine.device import DTYPES
from baton_serve.engine.model.vision.decoded_media import KeptPictures
from baton_serve.engine.model.vision.image_types import NO_PIXELS, DecodedImage, EncodedImage, ImageReader, Pixels
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
from baton_serve.services.instance.kv_sharing.file_decoding import FileDecoding

logger = logging.getLogger(__name__)


PEER_FAULTS = (PeerLost, TransferTimeout, Corrupt, TimeoutError)
"""Errors that mean that the encode instance is dead, frozen or broken. One that refuses a single file works."""


class FetchCounter(Protocol):
    """Counts the images whose embeddings were asked for, for metrics."""

    def fetched_embeddings(self, num_images: int, seconds: float) -> None: ...
    def missed_embeddings(self, num_images: int) -> None: ...


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

    async def fetch(self, request: AttemptEntry, asked: Sequence[FetchEmbeddings]) -> dict[bytes, EncodedImage]:
        """Return the embeddings that arrive, by digest. Instances that fail are recorded in `request`. Raises only
        `CancelledError`.
        """
        spans = {span.digest: span for span in request.work.media}
        parts = await asyncio.gather(*(self._try(request, one, spans) for one in asked))
        return {digest: image for part in parts for digest, image in part.items()}

    async def _try(
        self, request: AttemptEntry, asked: FetchEmbeddings, spans: Mapping[bytes, MediaSpan]
    ) -> dict[bytes, EncodedImage]:
        """Fetch from one encode instance; return nothing if it fails."""
        ticket, began = asked.ticket, self._clock()
        found: dict[bytes, EncodedImage] = {}
        try:
            async with asyncio.timeout(ticket.timeout_s):
                with request.span.child("fetch embeddings") as span:
                    span.set({"baton.source": ticket.source})
                    found = await self._fetch(asked, spans)
        # An `OSError` says that the node could not be started.
        except (TransferError, TimeoutError, OSError, msgspec.MsgspecError) as exc:
            if isinstance(exc, PEER_FAULTS):
                request.failed_encoders.append(ticket.source)
            logger.warning(
                "no embeddings of %d images came from %s, so this instance encodes them: %s: %s",
                len(asked.digests),
                ticket.source,
                type(exc).__name__,
                exc,
                extra={"request_id": request.request_id},
            )
        self._counter.missed_embeddings(len(asked.digests) - len(found))
        if found:
            self._counter.fetched_embeddings(len(found), self._clock() - began)
        return found

    async def _fetch(self, asked: FetchEmbeddings, spans: Mapping[bytes, MediaSpan]) -> dict[bytes, EncodedImage]:
        """Fetch the blocks of some images and return their rows. Raises `TransferError` and others."""
        ticket, layout = asked.ticket, self._layout
        if ticket.source_layout != layout:
            raise LocalTransferError(f"the embeddings of {ticket.source} have another layout")
        names: dict[bytes, list[BlockHash]] = {}
        for digest in asked.digests:
            if (span := spans.get(digest)) is not None:
                # At most: other tokens may stand among those of the image. No token stands for a source.
                most = -(-(self._source_tokens or span.length) // layout.block_tokens)
                names[digest] = embedding_hashes(ticket.source_root, digest, most)
        node = await self._started()
        async with self._arriving.take(sum(map(len, names.values()))) as blocks:
            wanted = list(zip((name for one in names.values() for name in one), blocks, strict=True))
            fetched = await node.fetch(ticket, wanted, partial=True)
            shapes = msgspec.msgpack.decode(fetched.payload, type=list[EmbeddingShape])
            arrived = set(fetched.names)
            places = {name: block for name, block in wanted if name in arrived}
            return await asyncio.to_thread(self._images, shapes, names, places)

    def _images(
        self,
        shapes: Sequence[EmbeddingShape],
        names: Mapping[bytes, Sequence[BlockHash]],
        places: Mapping[BlockHash, int],
    ) -> dict[bytes, EncodedImage]:
        """Copy the embeddings out of the arrived blocks; leave out images of which a block is missing."""
        found: dict[bytes, EncodedImage] = {}
        for shape in shapes:
            wanted = names.get(shape.digest, ())[: -(-shape.num_rows // self._layout.block_tokens)]
            blocks = [places[name] for name in wanted if name in places]
            if len(blocks) * self._layout.block_tokens >= shape.num_rows:
                rows = self._rows(blocks, shape.num_rows)
                found[shape.digest] = EncodedImage(rows, shape.width, shape.height, shape.text)
        return found

    def _rows(self, blocks: Sequence[int], num_rows: int) -> torch.Tensor:
        """Return rows [num_rows, width] of these blocks, as a copy."""
        assert self._memory is not None
        data = np.concatenate([np.frombuffer(self._memory.block(block), dtype=np.uint8) for block in blocks])
        rows = torch.from_numpy(data).view(DTYPES[self._layout.dtype])
        return rows.view(-1, self._layout.head_dim)[:num_rows]

    async def _started(self) -> TransferNode:
        """Return the node, which the first fetch starts. Raises `TransferError` or `OSError`."""
        async with self._starting:
            if self._node is None:
                memory = HostMemory(self._num_blocks, self._layout.block_bytes)
                node = self._make_node(self._layout, memory)
                await node.start()
                self._node, self._memory = node, memory
            return self._node


class PromptImageSource:
    """Gets the images of prompts for the engine. Event loop only."""

    def __init__(self, reader: ImageReader | None = None, fetcher: EmbeddingFetcher | None = None) -> None:
        """Without `reader`, this instance computes no prompts with images; without `fetcher` it encodes all itself."""
        self._kept = None if reader is None else KeptPictures(reader)
        self._fetcher = fetcher
        self._decoding = FileDecoding()

    async def images(self, request: AttemptEntry, message: Prefill | Generate) -> Pixels:
        """Return the images of a prompt: fetched embeddings, and the pixels of the other files.

        Return `NO_PIXELS` without images, or if this instance decodes none; the engine then refuses a prompt that has
        images. Raises `engine.errors.RequestError` if a file cannot be decoded.
        """
        kept, files, root = self._kept, message.images, request.work.tenant
        if not files or kept is None:
            return NO_PIXELS
        fetched: dict[bytes, EncodedImage] = {}
        if message.embeddings and self._fetcher is not None:
            fetched = await self._fetcher.fetch(request, message.embeddings)

        spans = {span.digest for span in request.work.media}

        def read(file: bytes) -> Pixels:
            # Hashing again costs less than decoding, and nothing says which file has which digest.
            if fetched and fetched.keys() >= set(spans_of_file(digest_of(file), spans)):
                return NO_PIXELS
            return kept.read(root, [file])

        found: dict[bytes, DecodedImage | EncodedImage] = {}

        async def keep(pixels: Pixels) -> None:
            found.update(pixels)

        # Decoding an image takes up to tens of milliseconds: on the loop it would delay all other requests.
        async with self._decoding.turn(files) as turn:
            await turn.decode(files, read, keep)
        return {**found, **fetched}
