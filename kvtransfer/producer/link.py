"""One consumer's connection as the producer sees it: what is queued for it, what is on its way, whether it lives."""

import asyncio
import hmac
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from baton_serve.contracts.identity import TicketId
from baton_serve.contracts.layout import obstacle
from baton_serve.contracts.wire import encode
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.conversion.plan import wire_layout
from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.frames import (
    PROTOCOL,
    Attach,
    Attached,
    Blocks,
    Bytes,
    Detached,
    Got,
    Hello,
    Join,
    Piece,
    Refuse,
    ToConsumer,
    Welcome,
    peer_of,
)
from baton_serve.kvtransfer.liveness import watch_process
from baton_serve.kvtransfer.producer.send_queue import SendBatch, SendQueue, is_checked
from baton_serve.kvtransfer.sockets import MonitoredSocket
from baton_serve.kvtransfer.transports.port import AttachRequest, Buffer, ParcelContent, Prepared, Sender

logger = logging.getLogger(__name__)

SECRET_BYTES = 16


class AttachedTransport:
    """A transport that the consumer has attached, with what is queued for it."""

    def __init__(self, epoch: int, sender: Sender, block_bytes: int, *, is_stream: bool) -> None:
        self.epoch = epoch
        self.sender = sender
        self.block_bytes = block_bytes
        """Of a whole block as it travels."""
        self.queue = SendQueue(
            block_bytes=block_bytes,
            batch_bytes=sender.batch_bytes,
            window_bytes=sender.window_bytes,
            taper_bytes=sender.taper_bytes,
            in_blocks=sender.stages,
        )
        self.is_stream = is_stream
        self.batches: dict[int, Prepared] = {}
        """Announced, and not yet taken."""


class ProducerLink:
    def __init__(
        self,
        context: NodeContext,
        socket: MonitoredSocket,
        *,
        identity: bytes,
        number: int,
        fd: int,
        hello: Hello,
        on_lost: Callable[["ProducerLink", bool], None],
    ) -> None:
        self.number = number
        self.identities, self.fds = [identity], {fd}
        """Of the first connection, which control messages take, and of those that joined it."""
        self.connections = min(context.settings.zeromq_connections, hello.connections)
        """So many there may be."""
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.peer = peer_of(hello)
        self.parts = parts_for(context, hello)
        self.is_up = True
        self._context = context
        self._socket = socket
        self._on_lost = on_lost
        self.hello = hello
        self._attached_transports: dict[str, AttachedTransport] = {}
        self._attaching: dict[str, asyncio.Task[None]] = {}
        self._in_flight: deque[tuple[TicketId, zmq.MessageTracker]] = deque()
        self._num_parcels = 0
        self._turn = 0
        self._hashing: Counter[TicketId] = Counter()
        self._watch = watch_process(hello.host, context.host, lambda: on_lost(self, True))

    def admits(self, join: Join) -> bool:
        """Is this one of the connections that `welcome` allowed?"""
        is_wanted = self.is_up and len(self.identities) < self.connections
        return is_wanted and hmac.compare_digest(self.secret, join.secret)

    def join(self, identity: bytes, fd: int) -> None:
        self.identities.append(identity)
        self.fds.add(fd)

    def send(self, message: ToConsumer) -> None:
        self._send(self.identities[0], [encode(message)])

    def attach(self, message: Attach) -> None:
        """Prepare a transport for this consumer, and say what it needs to use it."""
        self.detach(message.transport)
        self._attaching[message.transport] = self._context.loop.create_task(self._attach(message))

    def detach(self, transport: str, epoch: int | None = None) -> None:
        """Free what is held for it; with `epoch` only if it is still that one."""
        way = self._attached_transports.get(transport)
        if way is not None and epoch in (None, way.epoch):
            del self._attached_transports[transport]
            way.sender.close()
        task = self._attaching.pop(transport, None)
        if task is not None:
            task.cancel()

    def serve(self, transport: str, parcel: SendBatch) -> int:
        """Queue blocks; they leave as the window allows. Returns their bytes."""
        way = self._attached_transports.get(transport)
        if way is None:  # it broke, and the consumer has been told
            return 0
        way.queue.add(parcel.ticket, parcel.attempt, parcel.blocks, parcel.parts)
        self._pump(transport)
        return len(parcel.blocks) * way.block_bytes // parcel.parts

    def drop(self, ticket: TicketId) -> None:
        for way in self._attached_transports.values():
            way.queue.drop(ticket)

    def credit(self, message: Got) -> None:
        while self._in_flight and self._in_flight[0][1].done:
            self._in_flight.popleft()
        for name, way in list(self._attached_transports.items()):
            num_bytes = message.num_bytes
            prepared = way.batches.pop(message.parcel, None)
            if prepared is not None:
                way.sender.taken(prepared)
                num_bytes = way.queue.window_bytes_of(len(prepared.sources), prepared.parts)
            if way.queue.travelling_bytes and num_bytes:
                way.queue.credit(num_bytes)
                self._pump(name)

    def is_reading(self, ticket: TicketId) -> bool:
        """Does anything here still read this ticket's blocks?"""
        return self._hashing[ticket] > 0 or any(t == ticket and not tracker.done for t, tracker in self._in_flight)

    def is_idle(self) -> bool:
        return not self._hashing.total() and all(tracker.done for _, tracker in self._in_flight)

    def is_dead(self) -> bool:
        return self._watch is not None and self._watch.is_dead()

    def lose(self) -> None:
        """The connection is gone; the process is watched until `close`."""
        self.is_up = False
        for name in {*self._attached_transports, *self._attaching}:
            self.detach(name)

    def close(self) -> None:
        self.lose()
        if self._watch is not None:
            self._watch.close()

    async def _attach(self, message: Attach) -> None:
        name, epoch, context = message.transport, message.epoch, self._context
        carrier = context.transports.get(name)
        reason = f"no transport {name} here"
        if carrier is not None:
            wire = wire_layout(context.layout, self.hello.layout, narrows=carrier.narrows)
            wish = AttachRequest(
                self.hello, epoch, message.dialects, context.memory, context.layout, wire, context.sums
            )
            try:
                sender = await carrier.sender(wish, partial(self._broke, name, epoch))
            except TransportUnavailable as exc:
                reason = str(exc)
            except Exception as exc:
                logger.exception("transport %s cannot be offered", name)
                reason = f"{type(exc).__name__}: {exc}"
            else:
                self._attached_transports[name] = AttachedTransport(
                    epoch, sender, wire.block_bytes, is_stream=carrier.streams
                )
                self.send(Attached(transport=name, epoch=epoch, offer=sender.offer))
                return
        self.send(Attached(transport=name, epoch=epoch, reason=reason))

    def _broke(self, transport: str, epoch: int, reason: str) -> None:
        way = self._attached_transports.get(transport)
        if way is not None and way.epoch == epoch:
            logger.warning("peer=%s transport %s broke: %s", self.peer[0], transport, reason)
            self.detach(transport)
            self.send(Detached(transport, epoch, reason))

    def _send(self, identity: bytes, parts: Sequence[Buffer], copy: bool = True) -> zmq.MessageTracker | None:
        if not self.is_up:
            return None
        try:
            return self._socket.send([identity, *parts], copy=copy)
        except zmq.ZMQError as exc:
            logger.info("peer=%s connection lost on send: %s", self.peer[0], exc)
            self._context.loop.call_soon(self._on_lost, self, False)
            return None

    def _pump(self, transport: str) -> None:
        while (way := self._attached_transports.get(transport)) is not None and (
            parcel := way.queue.take()
        ) is not None:
            self._prepare(transport, parcel)

    def _prepare(self, transport: str, parcel: SendBatch) -> None:
        """Staging and checksums first: inline when that is quicker than waking a thread."""
        context, way, parts = self._context, self._attached_transports[transport], parcel.parts
        checked = [is_checked(context.settings.checksum, index, parts) for index, _ in parcel.blocks]
        chosen = ParcelContent([block for _, block in parcel.blocks], checked, parts)
        num_bytes = len(parcel.blocks) * way.block_bytes // parts
        if way.sender.is_quick(chosen, is_little=num_bytes <= context.settings.inline_bytes):
            self._push(way, parcel, way.sender.prepare(chosen))
            return
        self._hashing[parcel.ticket] += 1

        def job() -> None:
            try:
                prepared = way.sender.prepare(chosen)
            except Exception as exc:
                logger.exception("peer=%s transport %s cannot be fed", self.peer[0], transport)
                context.workers.post(partial(self._broke, transport, way.epoch, f"{type(exc).__name__}: {exc}"))
                context.workers.post(partial(self._prepared, way, parcel, None))
            else:
                context.workers.post(partial(self._prepared, way, parcel, prepared))

        context.workers.submit(job)

    def _prepared(self, way: AttachedTransport, parcel: SendBatch, prepared: Prepared | None) -> None:
        if prepared is not None:
            self._push(way, parcel, prepared)
        self._hashing[parcel.ticket] -= 1
        if not self._hashing[parcel.ticket]:
            del self._hashing[parcel.ticket]

    def _push(self, way: AttachedTransport, parcel: SendBatch, prepared: Prepared) -> None:
        if not self.is_up or way not in self._attached_transports.values():
            return
        self._num_parcels += 1
        whole = zip(parcel.blocks, prepared.sources, prepared.checksums, strict=True)
        pieces = [Piece(index, source, checksum) for (index, _), source, checksum in whole]
        epoch = way.epoch if way.is_stream else 0
        announcement = Blocks(parcel.ticket, parcel.attempt, pieces, self._num_parcels, epoch, parcel.parts)
        if way.sender.stages:
            way.batches[self._num_parcels] = prepared
        way.sender.send(pieces, prepared, partial(self._announce, announcement))

    def _announce(self, announcement: Blocks, groups: Sequence[Sequence[Buffer]]) -> None:
        """Parcels that are more than one message take the connections in turns, each with all of its bytes."""
        identity, offset = self.identities[0], 0
        if len(groups) > 1:
            identity = self.identities[self._turn % len(self.identities)]
            self._turn += 1
        self._send(identity, [encode(announcement), *groups[0]])
        for group in groups[1:]:
            tracker = self._send(identity, [encode(Bytes(announcement.parcel, offset)), *group], copy=False)
            if tracker is not None:
                self._in_flight.append((announcement.ticket, tracker))
            offset += sum(len(frame) for frame in group)


def refusal(context: NodeContext, hello: Hello) -> Refuse | None:
    if hello.protocol != PROTOCOL:
        return Refuse(f"this node speaks protocol {PROTOCOL}, the peer {hello.protocol}")
    if (reason := obstacle(context.layout, hello.layout)) is not None:
        return Refuse(f"layouts differ, {reason}: producer {context.layout}, consumer {hello.layout}")
    return None


def welcome(context: NodeContext, link: ProducerLink) -> Welcome:
    hello = link.hello
    return Welcome(
        instance=context.instance,
        generation=context.generation,
        layout=context.layout,
        parts=link.parts,
        host=context.host,
        num_blocks=context.memory.num_blocks,
        transports=[name for name, t in context.transports.items() if name in hello.transports and t.serves(hello)],
        connections=link.connections,
        secret=link.secret if link.connections > 1 else b"",
    )


def parts_for(context: NodeContext, hello: Hello) -> int:
    """Parts of a block that this consumer takes one by one. Blocks that are converted stay whole."""
    return context.settings.parts if hello.layout == context.layout else 1
