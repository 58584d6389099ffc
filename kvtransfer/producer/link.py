"""Sends blocks to one consumer; decides whether it is accepted, which transports it is offered, and how many parts a
block has.
"""

import asyncio
import hmac
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from baton_serve.contracts.block_layout import obstacle
from baton_serve.contracts.identity import TicketId
from baton_serve.contracts.wire import encode
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.control_messages import (
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
from baton_serve.kvtransfer.conversion.plan import wire_layout
from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.liveness import watch_process
from baton_serve.kvtransfer.monitored_socket import MonitoredSocket
from baton_serve.kvtransfer.producer.send_queue import SendBatch, SendQueue, is_checked
from baton_serve.kvtransfer.transports.port import AttachRequest, Buffer, ParcelContent, Prepared, Sender

logger = logging.getLogger(__name__)

SECRET_BYTES = 16
"""Length of the secret that further connections of a consumer must present."""


class AttachedTransport:
    """A transport that one consumer has attached: the producer's end of it (`sender`), the queue of blocks to send, and
    the parcels that were staged. `epoch` is the number of the consumer's attempt to attach it.
    """

    def __init__(self, epoch: int, sender: Sender, block_bytes: int, *, is_stream: bool) -> None:
        self.epoch = epoch
        self.sender = sender
        self.block_bytes = block_bytes
        """Size of one whole block in bytes, in the layout in which it is sent."""
        self.queue = SendQueue(
            block_bytes=block_bytes,
            batch_bytes=sender.batch_bytes,
            window_bytes=sender.window_bytes,
            taper_bytes=sender.taper_bytes,
            in_blocks=sender.stages,
        )
        self.is_stream = is_stream
        self.batches: dict[int, Prepared] = {}
        """Staged parcels that were announced and that the consumer still reads, by number."""


class ProducerLink:
    """The connection of one consumer, as the producer sees it. It owns the transports that the consumer has attached
    and the watch on the consumer's process. `ConsumerConnections` owns it. Use it only on the event loop.
    """

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
        """Identities and file descriptors of the first connection, which carries the control messages, and of those
        that joined it.
        """
        self.connections = min(context.settings.zeromq_connections, hello.connections)
        """Largest number of connections of this consumer."""
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
        """Return whether the further connection that sent `join` may become part of this link: its secret is right and
        the largest number of connections is not reached.
        """
        is_wanted = self.is_up and len(self.identities) < self.connections
        # `compare_digest` takes the same time for every secret, so its duration does not reveal how much of a guess is
        # right.
        return is_wanted and hmac.compare_digest(self.secret, join.secret)

    def join(self, identity: bytes, fd: int) -> None:
        """Add a further connection of this link's consumer, given by its ZeroMQ identity and file descriptor (`fd`).
        The new connection carries only bytes of blocks.
        """
        self.identities.append(identity)
        self.fds.add(fd)

    def send(self, message: ToConsumer) -> None:
        """Send a control message to the consumer, without blocking. If that fails, `on_lost` is called on the next turn
        of the event loop.
        """
        self._send(self.identities[0], [encode(message)])

    def attach(self, message: Attach) -> None:
        """Prepare the transport that `message` names for this consumer in the background. Then send `Attached` with the
        data for the consumer, or with the reason if it cannot be used.
        """
        # A second attachment replaces the first, for example after the consumer has demoted it.
        self.detach(message.transport)
        self._attaching[message.transport] = self._context.loop.create_task(self._attach(message))

    def detach(self, transport: str, epoch: int | None = None) -> None:
        """Free the producer's end of a transport and forget the blocks queued for it. If `epoch` is given, do so only
        if that attempt attached the transport that is in use.
        """
        attached = self._attached_transports.get(transport)
        if attached is not None and epoch in (None, attached.epoch):
            del self._attached_transports[transport]
            attached.sender.close()
        task = self._attaching.pop(transport, None)
        if task is not None:
            task.cancel()

    def serve(self, transport: str, parcel: SendBatch) -> int:
        """Queue the blocks of `parcel` for the transport with this name, and send as many as may be in flight. Return
        the number of bytes that were queued; 0 if the transport is not attached any more.
        """
        attached = self._attached_transports.get(transport)
        if attached is None:  # it broke, and `_broke` has reported that to the consumer
            return 0
        attached.queue.add(parcel.ticket, parcel.attempt, parcel.blocks, parcel.parts)
        self._pump(transport)
        return len(parcel.blocks) * attached.block_bytes // parcel.parts

    def drop(self, ticket: TicketId) -> None:
        """Remove the queued blocks of a ticket, so that they are not sent to this consumer by any transport."""
        for attached in self._attached_transports.values():
            attached.queue.drop(ticket)

    def credit(self, message: Got) -> None:
        """Handle `Got`, the consumer's report that it has read bytes or a whole parcel: free the parcel's staging
        memory and count fewer bytes in flight. Then send the queued blocks that may be sent now.
        """
        # ZeroMQ sends in order, so finished frames are at the front.
        while self._in_flight and self._in_flight[0][1].done:
            self._in_flight.popleft()
        for name, attached in list(self._attached_transports.items()):
            num_bytes = message.num_bytes
            prepared = attached.batches.pop(message.parcel, None)
            if prepared is not None:
                attached.sender.taken(prepared)
                num_bytes = attached.queue.window_bytes_of(len(prepared.sources), prepared.parts)
            if attached.queue.travelling_bytes and num_bytes:
                attached.queue.credit(num_bytes)
                self._pump(name)

    def is_reading(self, ticket: TicketId) -> bool:
        """Return whether the memory of this ticket's blocks is still read for this consumer: by a ZeroMQ frame that is
        being sent, or by a thread that stages blocks or computes checksums.
        """
        return self._hashing[ticket] > 0 or any(t == ticket and not tracker.done for t, tracker in self._in_flight)

    def is_idle(self) -> bool:
        """Return whether no frame that is being sent and no thread reads any block for this consumer."""
        return not self._hashing.total() and all(tracker.done for _, tracker in self._in_flight)

    def is_dead(self) -> bool:
        """Return whether the consumer's process is known to have ended."""
        return self._watch is not None and self._watch.is_dead()

    def lose(self) -> None:
        """Free all attached transports, because the connection to the consumer is lost. The consumer's process is still
        watched until `close`.
        """
        self.is_up = False
        for name in {*self._attached_transports, *self._attaching}:
            self.detach(name)

    def close(self) -> None:
        """Free all attached transports and stop watching the consumer's process."""
        self.lose()
        if self._watch is not None:
            self._watch.close()

    async def _attach(self, message: Attach) -> None:
        name, epoch, context = message.transport, message.epoch, self._context
        carrier = context.transports.get(name)
        reason = f"no transport {name} here"
        if carrier is not None:
            wire = wire_layout(context.layout, self.hello.layout, narrows=carrier.narrows)
            request = AttachRequest(
                self.hello, epoch, message.dialects, context.memory, context.layout, wire, context.sums
            )
            try:
                sender = await carrier.sender(request, partial(self._broke, name, epoch))
            except TransportUnavailable as exc:
                reason = str(exc)
            except Exception as exc:
                logger.exception("peer=%s transport %s cannot be offered", self.peer[0], name)
                reason = f"{type(exc).__name__}: {exc}"
            else:
                self._attached_transports[name] = AttachedTransport(
                    epoch, sender, wire.block_bytes, is_stream=carrier.streams
                )
                self.send(Attached(transport=name, epoch=epoch, offer=sender.offer))
                return
        self.send(Attached(transport=name, epoch=epoch, reason=reason))

    def _broke(self, transport: str, epoch: int, reason: str) -> None:
        attached = self._attached_transports.get(transport)
        if attached is not None and attached.epoch == epoch:
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
        while (attached := self._attached_transports.get(transport)) is not None and (
            parcel := attached.queue.take()
        ) is not None:
            self._prepare(transport, parcel)

    def _prepare(self, transport: str, parcel: SendBatch) -> None:
        """Stage the blocks of `parcel` if `transport` needs it, compute their checksums, then send them. A worker
        thread does it, unless it is quicker than waking a thread.
        """
        context, attached, parts = self._context, self._attached_transports[transport], parcel.parts
        checked = [is_checked(context.settings.checksum, index, parts) for index, _ in parcel.blocks]
        chosen = ParcelContent([block for _, block in parcel.blocks], checked, parts)
        num_bytes = len(parcel.blocks) * attached.block_bytes // parts
        if attached.sender.is_quick(chosen, is_little=num_bytes <= context.settings.inline_bytes):
            self._push(attached, parcel, attached.sender.prepare(chosen))
            return
        # The thread reads the blocks: `is_reading` keeps them from being freed until it has finished.
        self._hashing[parcel.ticket] += 1

        def job() -> None:
            try:
                prepared = attached.sender.prepare(chosen)
            except Exception as exc:
                logger.exception("peer=%s transport %s failed to prepare blocks", self.peer[0], transport)
                context.workers.post(partial(self._broke, transport, attached.epoch, f"{type(exc).__name__}: {exc}"))
                context.workers.post(partial(self._prepared, attached, parcel, None))
            else:
                context.workers.post(partial(self._prepared, attached, parcel, prepared))

        context.workers.submit(job)

    def _prepared(self, attached: AttachedTransport, parcel: SendBatch, prepared: Prepared | None) -> None:
        if prepared is not None:
            self._push(attached, parcel, prepared)
        self._hashing[parcel.ticket] -= 1
        if not self._hashing[parcel.ticket]:
            del self._hashing[parcel.ticket]

    def _push(self, attached: AttachedTransport, parcel: SendBatch, prepared: Prepared) -> None:
        # The transport may have been detached while a thread staged the parcel.
        if not self.is_up or attached not in self._attached_transports.values():
            return
        self._num_parcels += 1
        whole = zip(parcel.blocks, prepared.sources, prepared.checksums, strict=True)
        pieces = [Piece(index, source, checksum) for (index, _), source, checksum in whole]
        epoch = attached.epoch if attached.is_stream else 0
        announcement = Blocks(parcel.ticket, parcel.attempt, pieces, self._num_parcels, epoch, parcel.parts)
        if attached.sender.stages:
            attached.batches[self._num_parcels] = prepared
        attached.sender.send(pieces, prepared, partial(self._announce, announcement))

    def _announce(self, announcement: Blocks, groups: Sequence[Sequence[Buffer]]) -> None:
        """Send the message that announces a parcel with `groups[0]`, the frames that travel with it; each further group
        of frames follows in a message of its own. Such larger parcels use the consumer's connections in turn, but all
        bytes of one parcel use the same connection, so that they stay in order.
        """
        identity, offset = self.identities[0], 0
        if len(groups) > 1:
            identity = self.identities[self._turn % len(self.identities)]
            self._turn += 1
        self._send(identity, [encode(announcement), *groups[0]])
        for group in groups[1:]:
            # Without a copy, ZeroMQ reads the blocks until the tracker is done: they must not be freed before.
            tracker = self._send(identity, [encode(Bytes(announcement.parcel, offset)), *group], copy=False)
            if tracker is not None:
                self._in_flight.append((announcement.ticket, tracker))
            offset += sum(len(frame) for frame in group)


def refusal(context: NodeContext, hello: Hello) -> Refuse | None:
    """Return the message that rejects the consumer that sent `hello`, because its protocol or its layout does not fit.
    Return None if the consumer can be served.
    """
    if hello.protocol != PROTOCOL:
        return Refuse(f"this node speaks protocol {PROTOCOL}, the peer {hello.protocol}")
    if (reason := obstacle(context.layout, hello.layout)) is not None:
        return Refuse(f"layouts differ, {reason}: producer {context.layout}, consumer {hello.layout}")
    return None


def welcome(context: NodeContext, link: ProducerLink) -> Welcome:
    """Return the message that accepts the consumer of `link`. It lists the transports that both ends have and that can
    reach the consumer.
    """
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
    """Return into how many parts each block is divided for the consumer that sent `hello`: the number of the settings,
    or 1 if the layouts differ, because converted blocks travel whole.
    """
    return context.settings.parts if hello.layout == context.layout else 1
