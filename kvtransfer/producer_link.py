"""One consumer's connection as the producer sees it: what is queued for it, what is on its way, whether it lives."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from contracts.identity import TicketId
from contracts.wire import encode
from kvtransfer.context import NodeContext
from kvtransfer.frames import PROTOCOL, Blocks, Bytes, Hello, Offer, Piece, Refuse, ToConsumer, Welcome, peer_of
from kvtransfer.liveness import watch_process
from kvtransfer.sockets import LoopSocket
from kvtransfer.transports.hostcopy import HostBlocks, host_blocks
from kvtransfer.transports.port import Buffer, Outlet
from kvtransfer.window import Parcel, SendQueue

logger = logging.getLogger(__name__)

SAMPLE = 8
"""`sampled` checks one block in so many."""


class ProducerLink:
    def __init__(
        self,
        context: NodeContext,
        socket: LoopSocket,
        *,
        identity: bytes,
        number: int,
        fd: int,
        hello: Hello,
        on_lost: Callable[["ProducerLink", bool], None],
    ) -> None:
        self.identity, self.number, self.fd = identity, number, fd
        self.peer = peer_of(hello)
        self.is_up = True
        self._context = context
        self._socket = socket
        self._on_lost = on_lost
        self._queues: dict[str, SendQueue] = {}
        self._outlets: dict[str, Outlet] = {}
        self._flight: deque[tuple[TicketId, zmq.MessageTracker]] = deque()
        self._num_parcels = 0
        self._hashing: Counter[TicketId] = Counter()
        self._blocks = host_blocks(context.memory) if context.memory.host_view is not None else None
        self._watch = watch_process(hello.host, context.host, lambda: on_lost(self, True))

    def send(self, message: ToConsumer) -> None:
        self._send([encode(message)])

    def serve(self, transport: str, parcel: Parcel) -> None:
        """Queue blocks; they leave as the window allows."""
        queue = self._queues.get(transport)
        if queue is None:
            settings, carrier = self._context.settings, self._context.transports[transport]
            self._outlets[transport] = carrier.outlet()
            queue = self._queues[transport] = SendQueue(
                block_bytes=self._context.memory.block_bytes,
                batch_bytes=settings.batch_bytes,
                window_bytes=settings.window_bytes if carrier.buffers else None,
            )
        queue.add(parcel.ticket, parcel.attempt, parcel.blocks)
        self._pump(transport)

    def drop(self, ticket: TicketId) -> None:
        for queue in self._queues.values():
            queue.drop(ticket)

    def credit(self, num_bytes: int) -> None:
        while self._flight and self._flight[0][1].done:
            self._flight.popleft()
        for name, queue in self._queues.items():
            if queue.travelling_bytes:
                queue.credit(num_bytes)
                self._pump(name)

    def is_reading(self, ticket: TicketId) -> bool:
        """Does anything here still read this ticket's blocks?"""
        return self._hashing[ticket] > 0 or any(t == ticket and not tracker.done for t, tracker in self._flight)

    def is_idle(self) -> bool:
        return not self._hashing.total() and all(tracker.done for _, tracker in self._flight)

    def is_dead(self) -> bool:
        return self._watch is not None and self._watch.is_dead()

    def lose(self) -> None:
        """The connection is gone; the process is watched until `close`."""
        self.is_up = False
        self._queues.clear()
        for outlet in self._outlets.values():
            outlet.close()
        self._outlets.clear()

    def close(self) -> None:
        self.lose()
        if self._watch is not None:
            self._watch.close()

    def _send(self, parts: Sequence[Buffer], copy: bool = True) -> zmq.MessageTracker | None:
        if not self.is_up:
            return None
        try:
            return self._socket.send([self.identity, *parts], copy=copy)
        except zmq.ZMQError as exc:
            logger.info("peer=%s connection lost on send: %s", self.peer[0], exc)
            self._context.loop.call_soon(self._on_lost, self, False)
            return None

    def _pump(self, transport: str) -> None:
        while (queue := self._queues.get(transport)) is not None and (parcel := queue.take()) is not None:
            self._prepare(transport, parcel)

    def _prepare(self, transport: str, parcel: Parcel) -> None:
        """Checksums first: inline when that is quicker than waking a thread."""
        context, blocks = self._context, self._blocks
        mode = context.settings.checksum
        if mode == "off" or blocks is None:
            self._push(transport, parcel, [Piece(index, block, None) for index, block in parcel.blocks])
            return
        sampled = mode == "sampled"
        if len(parcel.blocks) * blocks.block_bytes <= context.settings.inline_bytes:
            self._push(transport, parcel, _pieces(blocks, parcel, sampled))
            return
        self._hashing[parcel.ticket] += 1

        def job() -> None:
            pieces = _pieces(blocks, parcel, sampled)
            context.workers.post(partial(self._hashed, transport, parcel, pieces))

        context.workers.submit(job)

    def _hashed(self, transport: str, parcel: Parcel, pieces: list[Piece]) -> None:
        self._push(transport, parcel, pieces)
        self._hashing[parcel.ticket] -= 1
        if not self._hashing[parcel.ticket]:
            del self._hashing[parcel.ticket]

    def _push(self, transport: str, parcel: Parcel, pieces: list[Piece]) -> None:
        if self.is_up and transport in self._outlets:
            self._num_parcels += 1
            announcement = Blocks(parcel.ticket, parcel.attempt, pieces, self._num_parcels)
            self._outlets[transport].send(pieces, partial(self._announce, announcement))

    def _announce(self, announcement: Blocks, groups: Sequence[Sequence[Buffer]]) -> None:
        self._send([encode(announcement), *groups[0]])
        offset = 0
        for group in groups[1:]:
            tracker = self._send([encode(Bytes(announcement.parcel, offset)), *group], copy=False)
            if tracker is not None:
                self._flight.append((announcement.ticket, tracker))
            offset += sum(len(frame) for frame in group)


def refusal(context: NodeContext, hello: Hello) -> Refuse | None:
    if hello.protocol != PROTOCOL:
        return Refuse(f"this node speaks protocol {PROTOCOL}, the peer {hello.protocol}")
    if hello.layout != context.layout:
        return Refuse(f"layouts differ: producer {context.layout}, consumer {hello.layout}")
    return None


def welcome(context: NodeContext, hello: Hello) -> Welcome:
    offers: list[Offer] = []
    for transport in context.transports.values():
        offer = transport.offer(hello) if transport.name in hello.transports else None
        if offer is not None:
            offers.append(offer)
    return Welcome(
        instance=context.instance,
        generation=context.generation,
        host=context.host,
        num_blocks=context.memory.num_blocks,
        offers=offers,
    )


def _pieces(blocks: HostBlocks, parcel: Parcel, sampled: bool) -> list[Piece]:
    return [
        Piece(index, block, blocks.checksum(block) if not sampled or index % SAMPLE == 0 else None)
        for index, block in parcel.blocks
    ]
