"""Publishes which KV blocks an instance caches (ZeroMQ PUB), and receives these events in routers (SUB).

Batches are numbered without gaps. A subscriber reports a gap; its caller then requests a snapshot and applies it.
"""

import asyncio
import logging
from collections.abc import Callable

import zmq

from baton_serve.contracts.events import BlockEvent, EventBatch
from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.wire import Decoder, WireError, encode
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.zmq.loop_socket import Frames, ZmqLoopSocket, bind, connect, new_socket

logger = logging.getLogger(__name__)

_QUEUE_LENGTH = 10_000
"""Maximum number of batches that are queued for one subscriber; further ones are dropped."""


class EventPublisher:
    """Publishes to routers which KV blocks one instance caches or drops, on the instance's event loop.

    `sequence` is the number of the last published batch. A `Snapshot` taken now contains all batches up to it.
    """

    def __init__(
        self,
        *,
        instance: InstanceId,
        generation: Generation,
        bind_address: str = "tcp://127.0.0.1:0",
        key: ClusterKey | None = None,
    ) -> None:
        self.address = bind_address
        self.sequence = 0
        self._key = key
        self._instance = instance
        self._generation = generation
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None

    async def start(self) -> None:
        """Listen for subscribers; `address` is then the one at which they connect."""
        self._socket = new_socket(self._context, zmq.PUB, queue_length=_QUEUE_LENGTH)
        self.address = bind(self._socket, self.address, self._key)

    def publish(self, events: list[BlockEvent]) -> None:
        """Send `events` to all subscribers as the next batch, without blocking. A subscriber that is too slow misses
        batches, and notices the gap in their numbers.
        """
        if not events or self._socket is None:
            return
        self.sequence += 1
        batch = EventBatch(instance=self._instance, generation=self._generation, sequence=self.sequence, events=events)
        self._socket.send(encode(batch), zmq.NOBLOCK)

    async def close(self) -> None:
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None
        await asyncio.to_thread(self._context.term)


class EventSubscriber:
    """Receives the block events (which KV blocks are cached or dropped) of one generation of one instance, on a
    router's event loop.

    `on_batch` gets the batches in order and without repeats. `on_gap` is called once before a batch if batches before
    it are missing. After `start` it is also called for the first batch, unless that is number 1.
    """

    def __init__(
        self,
        address: str,
        *,
        generation: Generation,
        on_batch: Callable[[EventBatch], None],
        on_gap: Callable[[], None],
        key: ClusterKey | None = None,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        """Connect only in `start`. `address` is that of the instance's `EventPublisher`. `context` is the ZeroMQ
        context to use, which the caller owns and closes; None makes one of its own.
        """
        self._address = address
        self._generation = generation
        self._on_batch = on_batch
        self._on_gap = on_gap
        self._key = key
        self._decoder = Decoder[EventBatch](EventBatch)
        self._context: zmq.Context[zmq.Socket[bytes]] = context or zmq.Context()
        self._owns_context = context is None
        self._socket: ZmqLoopSocket | None = None
        self._sequence = 0

    async def start(self) -> None:
        """Connect to the instance's `EventPublisher`. Events arrive from then on; earlier ones are not repeated."""
        socket = new_socket(self._context, zmq.SUB, queue_length=_QUEUE_LENGTH)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        connect(socket, self._address, self._key)
        self._socket = ZmqLoopSocket(socket, self._receive)
        self._socket.start()

    def rebase(self, sequence: int) -> None:
        """Record that the caller has applied a snapshot of the instance's cache, which contains all batches up to and
        including `sequence`.

        `on_batch` is not called for these batches any more.
        """
        self._sequence = max(self._sequence, sequence)

    async def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._owns_context:
            await asyncio.to_thread(self._context.term)

    def _receive(self, frames: Frames) -> None:
        try:
            batch = self._decoder.decode(frames[-1])
        except WireError as exc:
            logger.warning("a batch of block events from %s is ignored, it cannot be decoded: %s", self._address, exc)
            return
        # An address may be used by the next generation of the instance before this subscriber is closed.
        if batch.generation != self._generation or batch.sequence <= self._sequence:
            return
        if batch.sequence != self._sequence + 1:
            self._on_gap()
        self._sequence = batch.sequence
        self._on_batch(batch)
