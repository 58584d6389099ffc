"""The producer side of a node: a ROUTER socket that consumers connect to, and the `ProducerSession` of each served
ticket.

This module decides nothing about a transfer. It carries messages to the sessions and performs the steps that they
return.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq

from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.contracts.wire import WireError, encode
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.errors import LocalTransferError, UnknownTicket
from baton_serve.kvtransfer.frames import (
    MAX_PAYLOAD_BYTES,
    Again,
    Attach,
    Detach,
    Fail,
    Fetch,
    Got,
    Hello,
    Join,
    Probe,
    Probed,
    Refuse,
    Release,
    Renew,
    Renewed,
    ToProducer,
    producer_decoder,
)
from baton_serve.kvtransfer.probing.producer import ProbeHost
from baton_serve.kvtransfer.producer.link import ProducerLink, refusal, welcome
from baton_serve.kvtransfer.producer.send_queue import SendBatch
from baton_serve.kvtransfer.session.producer import CODE_OF, ProducerSession
from baton_serve.kvtransfer.session.steps import Drain, ProducerStep, Released, ReleaseReason, Serve, Tell
from baton_serve.kvtransfer.session.table import ProducerState
from baton_serve.kvtransfer.sockets import LINGER_MS, MonitoredSocket, configure, encrypt

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.0005
"""First interval in seconds at which a draining ticket is checked; it doubles with each check."""
MAX_DRAIN_POLL_S = 0.05
"""Upper bound of that interval in seconds."""

K = TypeVar("K")
V = TypeVar("V")
SinkKey = tuple[TicketId, InstanceId, Generation]
"""Identifies a served ticket: the ticket and its consumer. A ticket id alone could be fetched by the wrong instance."""
FetchHandler = Callable[[Ticket, list[BlockHash]], None]
"""Receives a partial fetch that nobody has opened: its ticket and the wanted block hashes."""


class Handoff:
    """The session of one served ticket, with the transport that carries its blocks and the future that resolves when
    they may be freed.
    """

    def __init__(self, key: SinkKey, session: ProducerSession) -> None:
        self.key = key
        self.session = session
        self.transport = ""
        self.released: asyncio.Future[ReleaseReason] | None = None
        self.served_bytes = 0


class ProducerSide:
    """Serves the tickets of one node to all consumers that connect. Event loop only."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._links: dict[int, ProducerLink] = {}
        self._by_identity: dict[bytes, ProducerLink] = {}
        self._next_link = 1
        self._handoffs: dict[SinkKey, Handoff] = {}
        self._opened: dict[TicketId, Handoff] = {}
        self._outcomes: OrderedDict[TicketId, asyncio.Future[ReleaseReason]] = OrderedDict()
        self._tombstones: OrderedDict[SinkKey, ReleaseReason] = OrderedDict()
        self._cancelled: OrderedDict[TicketId, None] = OrderedDict()
        self.on_fetch: FetchHandler | None = None
        self._probes = ProbeHost(context)
        settings = context.settings
        socket = context.zmq.socket(zmq.ROUTER)
        configure(socket, settings)
        encrypt(socket, settings, listens=True)
        # Without this option ZeroMQ drops messages to a consumer that is gone, and the loss would not be noticed.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(settings.bind)
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket = MonitoredSocket(
            socket, on_message=self._receive, on_down=self._on_down, events=zmq.EVENT_DISCONNECTED
        )

    def open(self, ticket: Ticket) -> None:
        """Start serving a ticket; see `TransferNode.open`."""
        context = self._context
        if (ticket.source, ticket.source_generation) != (context.instance, context.generation):
            raise UnknownTicket(f"ticket {ticket.ticket} is for {ticket.source}, not for this instance")
        if ticket.ticket in self._outcomes:
            raise LocalTransferError(f"ticket {ticket.ticket} was opened before")
        released: asyncio.Future[ReleaseReason] = context.loop.create_future()
        self._outcomes[ticket.ticket] = released
        self._forget_old_outcomes()
        key = (ticket.ticket, ticket.sink, ticket.sink_generation)
        # A cancel, or a release by the consumer, may come before `open`.
        early = "cancelled" if ticket.ticket in self._cancelled else self._tombstones.get(key)
        if early is not None:
            released.set_result(early)
            return
        handoff, now = self._handoffs.get(key), context.clock()
        if handoff is None:
            session = ProducerSession(now=now, limits=context.limits, ticket=ticket)
            handoff = self._handoffs[key] = Handoff(key, session)
        handoff.released = released
        self._opened[ticket.ticket] = handoff
        self._apply(handoff, handoff.session.open(ticket, now))

    def publish(self, ticket: TicketId, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        """Offer complete blocks of a ticket. Raises `UnknownTicket` if the ticket was not opened."""
        handoff = self._find(ticket)
        if handoff is not None:
            self._apply(handoff, handoff.session.publish(blocks))

    def publish_parts(self, ticket: TicketId, blocks: Sequence[tuple[BlockHash, int]], parts: range) -> None:
        """Offer some parts of blocks of a ticket. Raises `UnknownTicket` if the ticket was not opened."""
        handoff = self._find(ticket)
        if handoff is not None:
            self._apply(handoff, handoff.session.publish_parts(blocks, parts))

    def finish(self, ticket: TicketId, payload: bytes) -> None:
        """Declare that nothing more will be published. Raises `LocalTransferError` if the payload is too long."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise LocalTransferError(f"a payload of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}")
        handoff = self._find(ticket)
        if handoff is not None:
            self._apply(handoff, handoff.session.finish(payload, self._context.clock()))

    def give_up(self, ticket: TicketId, reason: ReleaseReason, message: str) -> None:
        """Stop serving a ticket. `message` is the reason that the consumer gets."""
        handoff = self._find(ticket)
        if handoff is not None:
            self._apply(handoff, handoff.session.give_up(reason, message))

    def cancel(self, ticket: TicketId) -> None:
        """Cancel a ticket at any time. If `open` or the fetch comes later, the tombstone that is left here ends it at
        once.
        """
        _remember(self._cancelled, ticket, None, self._context.settings.max_tombstones)
        for handoff in [handoff for key, handoff in self._handoffs.items() if key[0] == ticket]:
            self._apply(handoff, handoff.session.give_up("cancelled", "cancelled by the producer"))

    def outcome(self, ticket: TicketId) -> "asyncio.Future[ReleaseReason]":
        """Return the future that resolves when the blocks of a ticket may be freed. Raises `UnknownTicket` if it was
        not opened.
        """
        future = self._outcomes.get(ticket)
        if future is None:
            raise UnknownTicket(f"ticket {ticket} was not opened")
        return future

    def tick(self, now: float) -> None:
        """Check the deadlines of all sessions, and forget links that are lost and unused."""
        for handoff in list(self._handoffs.values()):
            self._apply(handoff, handoff.session.tick(now))
        in_use = {handoff.session.link for handoff in self._handoffs.values()}
        peers_in_use = {handoff.key[1:] for handoff in self._handoffs.values()}
        for number, link in list(self._links.items()):
            # Keep a lost link while a session of its consumer lives: its pidfd still reports the death of that process.
            if not link.is_up and number not in in_use and link.peer not in peers_in_use and link.is_idle():
                link.close()
                del self._links[number]

    def num_sessions(self) -> int:
        """Return the number of tickets that are being served."""
        return len(self._handoffs)

    async def close(self, timeout_s: float) -> None:
        """End all tickets, wait up to `timeout_s` for consumers that are still copying, and close the socket."""
        for handoff in list(self._handoffs.values()):
            self._apply(handoff, handoff.session.give_up("closed", "the producer shuts down"))
        waiting = [future for future in self._outcomes.values() if not future.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        await self._probes.close()
        self._socket.close(linger_ms=LINGER_MS)
        for link in self._links.values():
            link.close()
        for future in self._outcomes.values():
            if not future.done():
                future.set_result("closed")

    def check_invariants(self) -> None:
        """Assert that all sessions are consistent and that opened tickets have not been released."""
        for handoff in self._handoffs.values():
            handoff.session.check_invariants()
            assert not handoff.session.is_over()
        for handoff in self._opened.values():
            assert handoff.released is not None and not handoff.released.done()

    def _find(self, ticket: TicketId) -> Handoff | None:
        """Return the handoff of an opened ticket, or None if it has ended: then a late call of its owner is ignored.
        Raises `UnknownTicket` if it was not opened.
        """
        handoff = self._opened.get(ticket)
        if handoff is None and ticket not in self._outcomes:
            raise UnknownTicket(f"ticket {ticket} was not opened")
        return handoff

    def _receive(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        link = self._by_identity.get(identity)
        try:
            message = producer_decoder.decode(frames[1].buffer)
        except (WireError, IndexError) as exc:
            logger.warning("undecodable message of a peer: %s", exc)
            return
        if isinstance(message, Hello) and link is None:
            self._greet(identity, int(frames[1].get(zmq.SRCFD)), message)
        elif isinstance(message, Join) and link is None:
            self._join(identity, int(frames[1].get(zmq.SRCFD)), message)
        elif link is None:
            self._answer(identity, Refuse("say hello first"))
        else:
            self._handle(link, message)

    def _greet(self, identity: bytes, fd: int, hello: Hello) -> None:
        # The system reuses file descriptors: handle the end of an older connection with this number first.
        self._socket.drain_monitor()
        refuse = refusal(self._context, hello)
        if refuse is not None:
            logger.warning("peer=%s refused: %s", hello.instance, refuse.reason)
            self._answer(identity, refuse)
            return
        # Numbers are never used again: a session may still refer to a link that is gone.
        number, self._next_link = self._next_link, self._next_link + 1
        link = ProducerLink(
            self._context, self._socket, identity=identity, number=number, fd=fd, hello=hello, on_lost=self._on_lost
        )
        self._links[number] = self._by_identity[identity] = link
        link.send(welcome(self._context, link))

    def _join(self, identity: bytes, fd: int, join: Join) -> None:
        self._socket.drain_monitor()
        # The secret identifies the link; the identity of a new connection says nothing about its owner.
        link = next((link for link in self._links.values() if link.admits(join)), None)
        if link is None:
            self._answer(identity, Refuse("no connection with this secret can be joined"))
            return
        link.join(identity, fd)
        self._by_identity[identity] = link

    def _answer(self, identity: bytes, refuse: Refuse) -> None:
        try:
            self._socket.send([identity, encode(refuse)])
        except zmq.ZMQError as exc:
            logger.debug("a refused peer is already gone: %s", exc)

    def _handle(self, link: ProducerLink, message: ToProducer) -> None:
        now = self._context.clock()
        match message:
            case Fetch():
                self._fetch(link, message, now)
            case Got():
                link.credit(message)
            case Renew():
                unknown = [ticket for ticket in message.tickets if not self._renew(link, ticket, now)]
                link.send(Renewed(message.sequence, unknown))
            case Again():
                handoff = self._handoffs.get((message.ticket, *link.peer))
                if handoff is not None:
                    self._apply(handoff, handoff.session.again(message, now))
            case Release():
                self._released(link, message)
            case Attach():
                link.attach(message)
            case Detach():
                link.detach(message.transport, message.epoch)
            case Probe() | Probed():
                self._probes.handle(link, message)
            case _:
                return  # a second `Hello` or `Join` on this connection

    def _fetch(self, link: ProducerLink, fetch: Fetch, now: float) -> None:
        context, key = self._context, (fetch.ticket, *link.peer)
        handoff = self._handoffs.get(key)
        fail: Fail | None = None
        if fetch.source_generation != context.generation:
            fail = Fail(fetch.ticket, fetch.attempt, "wrong_peer", "the ticket is of another generation")
        elif fetch.transport not in context.transports:
            fail = Fail(fetch.ticket, fetch.attempt, "wrong_peer", f"no transport {fetch.transport} here")
        elif (reason := self._tombstones.get(key)) is not None or fetch.ticket in self._cancelled:
            code = CODE_OF[reason or "cancelled"]
            fail = Fail(fetch.ticket, fetch.attempt, code, f"the ticket has ended here: {reason or 'cancelled'}")
        # A parked fetch costs memory before anyone has opened its ticket: bound what one peer can cause.
        elif handoff is None and self._is_flooded(link):
            fail = Fail(fetch.ticket, fetch.attempt, "busy", "too many fetches of this peer")
        if fail is not None:
            link.send(fail)
            return
        if handoff is None:
            session = ProducerSession(now=now, limits=context.limits)
            handoff = self._handoffs[key] = Handoff(key, session)
        if fetch.attempt > handoff.session.attempt:
            # The earlier attempt may have used another connection: nothing of it must leave any more.
            for other in self._links.values():
                other.drop(fetch.ticket)
            handoff.transport = fetch.transport
        pulls = context.transports[fetch.transport].pulls
        self._apply(handoff, handoff.session.fetch(fetch, link=link.number, pulls=pulls, now=now, parts=link.parts))
        if fetch.partial and self.on_fetch is not None and handoff.released is None and fetch.attempt == 1:
            self.on_fetch(self._ticket_of(fetch, link), list(fetch.names))

    def _ticket_of(self, fetch: Fetch, link: ProducerLink) -> Ticket:
        return Ticket(
            ticket=fetch.ticket,
            source=self._context.instance,
            source_generation=self._context.generation,
            source_address=self.address,
            sink=link.peer[0],
            sink_generation=link.peer[1],
            timeout_s=fetch.timeout_s,
        )

    def _is_flooded(self, link: ProducerLink) -> bool:
        limit = self._context.settings.max_fetches_per_peer
        return len(self._handoffs) >= limit and sum(key[1:] == link.peer for key in self._handoffs) >= limit

    def _renew(self, link: ProducerLink, ticket: TicketId, now: float) -> bool:
        handoff = self._handoffs.get((ticket, *link.peer))
        return handoff is not None and handoff.session.renew(now)

    def _released(self, link: ProducerLink, message: Release) -> None:
        key = (message.ticket, *link.peer)
        handoff = self._handoffs.get(key)
        if handoff is not None:
            self._apply(handoff, handoff.session.release(message))
        # The release overtook the fetch or `open`: leave a tombstone, so that a later one ends at once.
        elif key not in self._tombstones:
            self._entomb(key, "cancelled")

    def _apply(self, handoff: Handoff, steps: Sequence[ProducerStep]) -> None:
        session, ticket = handoff.session, handoff.key[0]
        link = self._links.get(session.link)
        for step in steps:
            match step:
                case Tell():
                    if link is not None:
                        link.send(step.message)
                case Serve():
                    if link is not None and link.is_up:
                        parcel = SendBatch(ticket, step.attempt, list(step.blocks), step.parts)
                        handoff.served_bytes += link.serve(handoff.transport, parcel)
                case Drain():
                    for other in self._links.values():
                        other.drop(ticket)
                    self._drain(handoff, DRAIN_POLL_S)
                case Released():
                    self._free(handoff, step.reason)
        if session.is_over() and handoff.key in self._handoffs:
            self._bury(handoff)

    def _drain(self, handoff: Handoff, wait_s: float) -> None:
        """Check again and again until no frame and no checksum reads the blocks. Most tickets pass the first check."""
        if handoff.session.state is not ProducerState.DRAINING:
            return
        if any(link.is_reading(handoff.key[0]) for link in self._links.values()):
            self._context.loop.call_later(wait_s, self._drain, handoff, min(wait_s * 2, MAX_DRAIN_POLL_S))
            return
        self._apply(handoff, handoff.session.quiet())

    def _free(self, handoff: Handoff, reason: ReleaseReason) -> None:
        if sent := handoff.served_bytes:
            self._context.observer.moved(
                peer=handoff.key[1], transport=handoff.transport, direction="sent", num_bytes=sent
            )
        self._opened.pop(handoff.key[0], None)
        if handoff.released is not None and not handoff.released.done():
            handoff.released.set_result(reason)

    def _bury(self, handoff: Handoff) -> None:
        """Forget a handoff and leave a tombstone. A parked fetch whose connection broke leaves none, because its
        consumer may come again.
        """
        del self._handoffs[handoff.key]
        if handoff.released is not None or handoff.session.reason != "lost":
            self._entomb(handoff.key, handoff.session.reason or "failed")

    def _entomb(self, key: SinkKey, reason: ReleaseReason) -> None:
        _remember(self._tombstones, key, reason, self._context.settings.max_tombstones)

    def _forget_old_outcomes(self) -> None:
        while len(self._outcomes) > self._context.settings.max_tombstones:
            ticket, future = next(iter(self._outcomes.items()))
            if not future.done():
                return  # the oldest ticket is still being served, and its caller may ask for the outcome
            del self._outcomes[ticket]

    def _on_down(self, fd: int) -> None:
        """Find the link of a connection that ended, by its file descriptor."""
        for link in self._links.values():
            if fd in link.fds and link.is_up:
                # Messages that arrived before the end, such as a release, are still in the socket: `_ended` handles
                # them first.
                self._context.loop.call_soon(self._ended, link)

    def _ended(self, link: ProducerLink) -> None:
        self._socket.drain()
        self._on_lost(link, False)

    def _on_lost(self, link: ProducerLink, dead: bool) -> None:
        dead = dead or link.is_dead()
        if link.is_up:
            logger.info("peer=%s disconnected dead=%s", link.peer[0], dead)
            link.lose()
            self._probes.lost(link)
            for identity in link.identities:
                self._by_identity.pop(identity, None)
        for handoff in list(self._handoffs.values()):
            if handoff.session.link == link.number or (dead and handoff.key[1:] == link.peer):
                # Without its process, no connection of the consumer will come back: end all its tickets, whatever link
                # they use.
                self._apply(handoff, handoff.session.link_lost(dead=dead))


def _remember(memory: "OrderedDict[K, V]", key: K, value: V, limit: int) -> None:
    memory[key] = value
    while len(memory) > limit:
        memory.popitem(last=False)
