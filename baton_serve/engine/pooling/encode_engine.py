"""The engine of an encode instance: decides whether an embedding is reused from its cache, or its image or audio is
encoded. The outputs of an audio encoder for cross-attention count as embeddings too.

Embeddings lie in blocks of host memory, from which other processes fetch them like KV blocks. A block pool names them,
shares them between requests and evicts the least recently used ones. The owner calls the engine from one thread.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from mmap import PAGESIZE
from typing import Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from baton_serve.contracts.block_hash import embedding_hashes
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.model_path import model_folder
from baton_serve.contracts.vision import UnfitImageError
from baton_serve.contracts.vision.media_text import EmbeddingShape
from baton_serve.engine import device
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.core.block_pool import BlockPool
from baton_serve.engine.core.outputs import (
    BatchSize,
    EncodedFile,
    EngineStats,
    FailedRequest,
    NamedBlock,
    StepResult,
)
from baton_serve.engine.errors import ConfigError, RequestError
from baton_serve.engine.model.context_length import max_model_len_of
from baton_serve.engine.model.loaded_model import LoadProgress
from baton_serve.engine.model.speech import load_window_encoder
from baton_serve.engine.model.vision.image_types import DecodedImage, ImageReader, Pixels
from baton_serve.engine.model.vision.text_part import decoder_config
from baton_serve.engine.model.vision.tower import load_tower
from baton_serve.engine.model_folder import read_config

logger = logging.getLogger(__name__)

EMA_WEIGHT = 0.1
"""Weight of the newest image in the moving average of the speed."""


class SharedBlocks(Protocol):
    """Host memory of blocks that other processes may map: `kvtransfer.block_memory.HostMemory`. Its bytes are zero at
    first, and take no memory until they are written."""

    num_blocks: int
    block_bytes: int
    shared_fd: int | None
    host_view: memoryview | None

    def close(self) -> None: ...


class MakeBlocks(Protocol):
    """Allocates the memory of the cache when the size of a block is known."""

    def __call__(self, layout: KVLayout, /) -> SharedBlocks: ...


class EncodeObserver(Protocol):
    """Counts what an image encoder does. Called from the engine thread."""

    def computed(self, seconds: float) -> None: ...
    def found(self, num_images: int) -> None: ...
    def damaged(self) -> None: ...


class FileEncoder(Protocol):
    """A part of a model that encodes files, such as `VisionTower`, loaded on the device. Engine thread only."""

    @property
    def reader(self) -> ImageReader: ...
    @property
    def max_batch(self) -> int: ...
    def num_rows(self, picture: DecodedImage, /) -> int: ...
    def encode_all(self, pictures: Sequence[DecodedImage], /) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class _Embedding:
    """The embeddings of one image, in the blocks of these hashes. `checksum` is that of their rows."""

    shape: EmbeddingShape
    names: list[BlockHash]
    checksum: int


@dataclass(slots=True)
class _EncodeRequest:
    """The images of one request: embeddings with the blocks that it owns, and images, by digest, to be encoded.
    `lacking` are the digests of images that are not encoded yet, whether they were added or not."""

    root: BlockHash
    owned: list[tuple[_Embedding, list[int]]] = field(default_factory=list)
    waiting: dict[bytes, DecodedImage] = field(default_factory=dict)
    lacking: set[bytes] = field(default_factory=set)
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class _BatchImage:
    """An image that the next step encodes, and the blocks of these hashes that its request owns for it."""

    request_id: RequestId
    request: _EncodeRequest
    digest: bytes
    image: DecodedImage
    names: list[BlockHash]
    blocks: list[int]


class ImageEncoder:
    """A loaded vision tower or audio encoder with its cache. Has the methods of `Engine` that all instances need.

    A request first claims the embeddings that are cached, then adds the other images, and owns all their blocks until
    `release`.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_blocks: MakeBlocks,
        *,
        observer: EncodeObserver,
        progress: LoadProgress | None = None,
    ) -> None:
        """Load the encoder and allocate the cache. Raises `ConfigError` or `ModelError`."""
        config.check()
        report = progress or (lambda what, fraction: None)
        self.device = device.select_device(config.device)
        report("loading weights", 0.0)
        self._encoder, self.layout, self.max_model_len = _load(config, self.device)
        self.memory = make_blocks(self.layout)
        self._pool = BlockPool(self.memory.num_blocks)
        self._observer = observer
        self._known: OrderedDict[BlockHash, _Embedding] = OrderedDict()
        """Embeddings that were computed, by the hash of their first block; some may have been evicted."""
        self._requests: dict[RequestId, _EncodeRequest] = {}
        self._is_blocked = False
        """The next image needs more blocks than are free: nothing can be done before a `release`."""
        self.last_batch = BatchSize()
        """Size of the last image, as one sequence; any thread may read it."""
        self._rows_per_s = 0.0
        self._num_images = self._num_rows = self._num_asked_rows = self._num_found_rows = 0
        report("ready", 1.0)

    @property
    def reader(self) -> ImageReader:
        """Decodes image files; usable from any thread."""
        return self._encoder.reader

    def claim(self, request_id: RequestId, root: BlockHash, digests: Sequence[bytes]) -> list[bytes]:
        """Begin a request: own the cached embeddings of these images. Return the digests of the others, for `add`."""
        request = self._requests[request_id] = _EncodeRequest(root)
        lacking = [digest for digest in digests if not self._take_cached(request, digest)]
        request.lacking.update(lacking)
        return lacking

    def add(self, request_id: RequestId, images: Pixels) -> None:
        """Queue images of a claimed request, by digest: all that it lacks, or some as soon as they are decoded. Steps
        report each as `encoded`, and the request as `held` after the last image that it lacked.

        Raises `RequestError` for an image that the model cannot read, or that is larger than the cache.
        """
        waiting = {digest: image for digest, image in images.items() if isinstance(image, DecodedImage)}
        if len(waiting) < len(images):
            raise RequestError("invalid", "embeddings are not encoded again: send them to a prefill instance")
        for image in waiting.values():
            if -(-self._rows_of(image) // self.layout.block_tokens) > self._pool.num_total:
                raise RequestError("too_long", "an image is larger than the cache of embeddings (--embedding-cache-gb)")
        request = self._requests[request_id]
        if not request.has_begun:
            # A long video is decoded for long: requests behind it whose images are there go first.
            self._requests[request_id] = self._requests.pop(request_id)
            request.has_begun = True
        request.waiting |= waiting

    def blocks_of(self, request_id: RequestId) -> list[tuple[EmbeddingShape, list[NamedBlock]]]:
        """Return the embeddings that exist for a request: their shapes, and the blocks that hold their rows."""
        return [(known.shape, _named(known, blocks)) for known, blocks in self._requests[request_id].owned]

    def release(self, request_id: RequestId) -> None:
        """End a request: its blocks stay cached until others need them. Ignore unknown requests."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for _, blocks in request.owned:
            # The pool evicts what was released first. The router looks for the first block only, so that one goes
            # first: while it is cached, all are.
            self._pool.release(blocks[::-1])
        self._is_blocked = False

    def has_work(self) -> bool:
        """Return whether an image can be encoded now."""
        return not self._is_blocked and any(request.waiting for request in self._requests.values())

    def step(self) -> StepResult:
        """Encode the next image, or several windows of audio; requests are served in the order of their first `add`."""
        result = StepResult()
        batch = self._next_batch(result)
        if batch:
            self._encode(batch, result)
        result.events = self._pool.take_events()
        return result

    def cached_block_hashes(self) -> list[BlockHash]:
        """Return the hashes of all cached blocks."""
        return self._pool.cached_block_hashes()

    def stats(self) -> EngineStats:
        """Return the load and counters. Tokens are rows of embeddings; fields about decoding are 0."""
        waiting = [image for request in self._requests.values() for image in request.waiting.values()]
        held = [request for request in self._requests.values() if request.owned and not request.lacking]
        return EngineStats(
            free_blocks=self._pool.num_free,
            total_blocks=self._pool.num_total,
            cached_blocks=self._pool.num_cached,
            held_blocks=self._pool.num_total - self._pool.num_free,
            running=0,
            waiting=len(waiting),
            held=len(held),
            reserved=0,
            queued_tokens=sum(map(self._rows_of, waiting)),
            prefill_tokens_per_s=self._rows_per_s,
            decode_step_s=0.0,
            preemptions=0,
            prompt_tokens=self._num_rows,
            generated_tokens=0,
            prefix_query_tokens=self._num_asked_rows,
            prefix_hit_tokens=self._num_found_rows,
            steps=self._num_images,
        )

    def check_invariants(self) -> None:
        """Assert that requests and pool agree about the owned blocks. For tests."""
        owned = [pair for request in self._requests.values() for pair in request.owned]
        self._pool.check_invariants([block for _, blocks in owned for block in blocks])

    def close(self) -> None:
        """Free the memory of the cache. No transfer may use it any more."""
        self.memory.close()

    def _rows_of(self, image: DecodedImage) -> int:
        """Return the number of embeddings of an image. Raises `RequestError` if the model cannot read it."""
        try:
            return self._encoder.num_rows(image)
        except UnfitImageError as exc:
            raise RequestError("invalid", str(exc)) from exc

    def _take_cached(self, request: _EncodeRequest, digest: bytes) -> bool:
        """Own the embeddings of an image if they are cached and intact; return whether they are."""
        known = self._known.get(_name(request, digest))
        blocks = self._pool.match(known.names) if known is not None else []
        if known is None or len(blocks) < len(known.names):
            return False
        # They may have been in memory for days. A damaged embedding would change answers without any error.
        if self._checksum(blocks, known.shape.num_rows) != known.checksum:
            logger.error("a cached embedding has changed in host memory: it is computed again")
            self._observer.damaged()
            # Its blocks keep their hashes, and are written again.
            del self._known[known.names[0]]
            return False
        self._pool.share(blocks)
        request.owned.append((known, blocks))
        self._num_asked_rows += known.shape.num_rows
        self._num_found_rows += known.shape.num_rows
        self._observer.found(1)
        return True

    def _next_batch(self, result: StepResult) -> list[_BatchImage]:
        """Return the images that are encoded together now, with owned blocks. Images on the way to them that are cached
        by now are taken from the cache."""
        batch: list[_BatchImage] = []
        for request_id, request in self._requests.items():
            for digest, image in tuple(request.waiting.items()):
                names = embedding_hashes(request.root, digest, -(-self._rows_of(image) // self.layout.block_tokens))
                # An earlier request may have the same image: after this step it is cached.
                if len(batch) == self._encoder.max_batch or any(one.names == names for one in batch):
                    return batch
                if self._take_cached(request, digest):
                    _finish(request_id, request, digest, result)
                    continue
                blocks = self._own_blocks(names)
                if blocks is None:
                    self._is_blocked = not batch
                    return batch
                batch.append(_BatchImage(request_id, request, digest, image, names, blocks))
        return batch

    def _encode(self, batch: Sequence[_BatchImage], result: StepResult) -> None:
        """Compute the embeddings of images into their blocks, and add the requests that are complete or have failed to
        `result`."""
        self.last_batch = BatchSize(len(batch), sum(self._rows_of(one.image) for one in batch))
        started, features = time.monotonic(), None
        try:
            computed = self._encoder.encode_all([one.image for one in batch])
            # While the device computes: the pages of memory take longer to make than to write.
            for one in batch:
                self._make_pages(one.blocks)
            for one, rows in zip(batch, computed, strict=True):
                self._write(one.blocks, rows)
            features = computed
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                self._fail(batch[0], result)
        if features is None:
            # Outside the handler, whose traceback keeps memory. One by one they need less.
            for one in batch if len(batch) > 1 else ():
                self._encode([one], result)
            return
        seconds = (time.monotonic() - started) / len(batch)
        for one, rows in zip(batch, features, strict=True):
            self._keep(one, len(rows))
            self._count(len(rows), seconds)
            _finish(one.request_id, one.request, one.digest, result)

    def _fail(self, one: _BatchImage, result: StepResult) -> None:
        """Give back the blocks of an image for which the device has no memory, and fail its request."""
        logger.exception("encoding an image of %d x %d pixels ran out of memory", one.image.width, one.image.height)
        self._pool.release(one.blocks)
        if one.request.waiting:
            one.request.waiting.clear()
            one.request.lacking.clear()
            result.failed.append(FailedRequest(one.request_id, "the device ran out of memory"))

    def _keep(self, one: _BatchImage, num_rows: int) -> None:
        """Make the embeddings of an image known for later requests. Its blocks hold their rows."""
        image, first = one.image, one.names[0]
        shape = EmbeddingShape(one.digest, num_rows, image.width, image.height, image.text)
        known = self._known[first] = _Embedding(shape, one.names, self._checksum(one.blocks, num_rows))
        one.request.owned.append((known, one.blocks))
        self._known.move_to_end(first)
        # Every cached embedding has a block, so that more entries than blocks are of evicted ones.
        while len(self._known) > self._pool.num_total:
            self._known.popitem(last=False)
        self._pool.register(one.names, one.blocks)

    def _own_blocks(self, names: Sequence[BlockHash]) -> list[int] | None:
        """Own blocks for these hashes, which may be cached in part; None if too few are free."""
        cached = {name: block for name in names if (block := self._pool.block_of(name)) is not None}
        missing = len(names) - len(cached)
        if missing + self._pool.num_unowned(cached.values()) > self._pool.num_free:
            return None
        self._pool.share(cached.values())
        fresh = iter(self._pool.allocate(missing) or ())
        return [cached[name] if name in cached else next(fresh) for name in names]

    def _count(self, num_rows: int, seconds: float) -> None:
        """Count one computed image."""
        self._num_images += 1
        self._num_rows += num_rows
        self._num_asked_rows += num_rows
        speed = num_rows / max(seconds, 1e-9)
        # The first image sets the average, later ones move it.
        self._rows_per_s += (speed - self._rows_per_s) * (EMA_WEIGHT if self._rows_per_s else 1.0)
        self._observer.computed(seconds)

    def _make_pages(self, blocks: Sequence[int]) -> None:
        """Make the operating system allocate the memory of blocks, which may have content."""
        for block in blocks:
            np.frombuffer(self._bytes_of(block), dtype=np.uint8)[::PAGESIZE].max()

    def _write(self, blocks: Sequence[int], features: Tensor) -> None:
        """Copy rows [num_rows, width] from the device into blocks, when they are computed."""
        for block, rows in zip(blocks, torch.split(features, self.layout.block_tokens), strict=True):
            place = torch.frombuffer(self._bytes_of(block), dtype=rows.dtype, count=rows.numel())
            place.view(rows.shape).copy_(rows)

    def _checksum(self, blocks: Sequence[int], num_rows: int) -> int:
        """Return the checksum of the rows in these blocks."""
        row_bytes = self.layout.block_bytes // self.layout.block_tokens
        digest, left = xxhash.xxh3_64(), num_rows * row_bytes
        for block in blocks:
            digest.update(self._bytes_of(block)[:left])
            left -= self.layout.block_bytes
        return digest.intdigest()

    def _bytes_of(self, block: int) -> memoryview:
        view = self.memory.host_view
        assert view is not None, "the encoder is closed"
        return view[block * self.layout.block_bytes : (block + 1) * self.layout.block_bytes]


def _finish(request_id: RequestId, request: _EncodeRequest, digest: bytes, result: StepResult) -> None:
    """Record in `result` that the embeddings of an image, which the request owns last, exist, and whether they were all
    that it lacked."""
    if request.waiting.pop(digest, None) is not None:
        request.lacking.discard(digest)
        known, blocks = request.owned[-1]
        result.encoded.append(EncodedFile(request_id, known.shape, _named(known, blocks)))
        if not request.lacking:
            result.held.append(request_id)


def _named(known: _Embedding, blocks: Sequence[int]) -> list[NamedBlock]:
    return [NamedBlock(*pair) for pair in zip(known.names, blocks, strict=True)]


def _name(request: _EncodeRequest, digest: bytes) -> BlockHash:
    """Return the hash of the first block of an image's embeddings."""
    return embedding_hashes(request.root, digest, 1)[0]


def _load(config: EngineConfig, target: torch.device) -> tuple[FileEncoder, KVLayout, int]:
    """Load the vision tower or audio encoder of a model. Return it with the layout of its embeddings, and the model's
    longest prompt.

    Raises `ConfigError` or `ModelError`.
    """
    if config.num_ranks > 1:
        raise ConfigError(
            "an encode instance runs on one device: remove tensor_parallel_size and pipeline_parallel_size, and start"
            " more instances instead"
        )
    # The dtype must be that of the instances that compute prompts, which follows from their decoder's config.
    text = decoder_config(read_config(model_folder(config.model), config))
    dtype = device.select_dtype(target, config.dtype, getattr(text, "dtype", None))
    tower: FileEncoder | None = load_tower(config, target, dtype) or load_window_encoder(config, target, dtype)
    if tower is None or tower.reader.embedding_layout is None:
        raise ConfigError(
            f"{config.model} has no vision tower or audio encoder that is supported: an encode instance has no use"
        )
    return tower, tower.reader.embedding_layout, max_model_len_of(config, text)
