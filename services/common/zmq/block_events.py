"""Which blocks an instance caches, from the instance (PUB) to every router (SUB), numbered without gaps.

A subscriber that finds a gap says so; asking for a snapshot and applying it is the caller's part.
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


class EventPublisher:
    """`sequence` is the number of the last batch published: a `Snapshot` taken now is valid after it."""

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
        """Binds; `address` is then the one to connect to."""
        self._socket = new_socket(self._context, zmq.PUB, queue_length=_QUEUE_LENGTH)
        self.address = bind(self._socket, self.address, self._key)

    def publish(self, events: list[BlockEvent]) -> None:
        """Never blocks: a subscriber that does not keep up misses batches, and notices by the gap."""
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
    """Follows one generation of one instance.

    `on_gap` is called when batches are missing before the next one handed on (the first one after `start` too, unless
    it is number 1); one call per gap. Batches go to `on_batch` in order, without repeats.
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
        """`context` stays the caller's."""
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
        socket = new_socket(self._context, zmq.SUB, queue_length=_QUEUE_LENGTH)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        connect(socket, self._address, self._key)
        self._socket = ZmqLoopSocket(socket, self._receive)
        self._socket.start()

    def rebase(self, sequence: int) -> None:
        """A snapshot valid after batch `sequence` was applied: what it contains is not handed on again."""
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
            logger.warning("event batch from %s refused: %s", self._address, exc)
            return
        if batch.generation != self._generation or batch.sequence <= self._sequence:
            return
        if batch.sequence != self._sequence + 1:
            self._on_gap()
        self._sequence = batch.sequence
        self._on_batch(batch)
