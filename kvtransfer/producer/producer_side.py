"""Serves the tickets of a node to consumers; each ticket is decided in `session/producer_session.py`.

This module decides nothing about a transfer. It passes messages to the sessions and performs the steps that they
return.
"""

import asyncio
from collections.abc import Callable, Sequence

from baton_serve.contracts.identity import BlockHash, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.control_messages import (
    MAX_PAYLOAD_BYTES,
    Again,
    Attach,
    Detach,
    Fail,
    Fetch,
    Got,
    Probe,
    Probed,
    Release,
    Renew,
    Renewed,
    ToProducer,
)
from baton_serve.kvtransfer.errors import LocalTransferError, UnknownTicket
from baton_serve.kvtransfer.probing.producer import ProbeHost
from baton_serve.kvtransfer.producer.connections import ConsumerConnections
from baton_serve.kvtransfer.producer.handoff_table import Handoff, HandoffTable
from baton_serve.kvtransfer.producer.link import ProducerLink
from baton_serve.kvtransfer.producer.send_queue import SendBatch
from baton_serve.kvtransfer.session.producer_session import CODE_OF, ProducerSession
from baton_serve.kvtransfer.session.states import ProducerState
from baton_serve.kvtransfer.session.steps import Drain, ProducerStep, Released, ReleaseReason, Serve, Tell

DRAIN_POLL_S = 0.0005
"""First interval in seconds at which a draining ticket is checked; it doubles with each check."""
MAX_DRAIN_POLL_S = 0.05
"""Upper bound of that interval in seconds."""

FetchHandler = Callable[[Ticket, list[BlockHash]], None]
"""Receives a partial fetch that nobody has opened: its ticket and the wanted block hashes."""


class ProducerSide:
    """Serves the tickets of one node to all consumers that connect. Use it only on the event loop."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._handoffs = HandoffTable(context.settings.max_tombstones)
        self.on_fetch: FetchHandler | None = None
        self._probes = ProbeHost(context)
        self._connections = ConsumerConnections(context, on_message=self._handle, on_lost=self._on_lost)
        self.address = self._connections.address

    def open(self, ticket: Ticket, on_fetched: Callable[[], None] | None = None) -> None:
        """Start serving a ticket: the consumer that it names may fetch blocks. See `TransferNode.open`
        for the details.
        """
        context = self._context
        if (ticket.source, ticket.source_generation) != (context.instance, context.generation):
            raise UnknownTicket(f"ticket {ticket.ticket} is for {ticket.source}, not for this instance")
        released: asyncio.Future[ReleaseReason] = context.loop.create_future()
        self._handoffs.expect(ticket.ticket, released)
        key = (ticket.ticket, ticket.sink, ticket.sink_generation)
        # A cancel, or a release by the consumer, may come before `open`.
        early = "cancelled" if self._handoffs.is_cancelled(ticket.ticket) else self._handoffs.tombstone(key)
        if early is not None:
            released.set_result(early)
            return
        handoff, now = self._handoffs.get(key), context.clock()
        if handoff is None:
            handoff = self._handoffs.add(key, ProducerSession(now=now, limits=context.limits, ticket=ticket))
        elif on_fetched is not None:
            # The fetch came first. Not at once, because the caller has not finished its own part of opening.
            context.loop.call_soon(on_fetched)
        handoff.on_fetched = on_fetched
        self._handoffs.open(handoff, released)
        self._apply(handoff, handoff.session.open(ticket, now))

    def publish(self, ticket: TicketId, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        """Offer complete blocks (hash, block number) to the consumer of a ticket; see `TransferNode.publish`. Ignored
        if the ticket has ended. Raises `UnknownTicket` if it was not opened.
        """
        handoff = self._handoffs.find(ticket)
        if handoff is not None:
            self._apply(handoff, handoff.session.publish(blocks))

    def publish_parts(self, ticket: TicketId, blocks: Sequence[tuple[BlockHash, int]], parts: range) -> None:
        """Offer the parts with the numbers `parts` of blocks (hash, block number); see `TransferNode.publish_parts`.
        Ignored if the ticket has ended. Raises `UnknownTicket` if it was not opened.
        """
        handoff = self._handoffs.find(ticket)
        if handoff is not None:
            self._apply(handoff, handoff.session.publish_parts(blocks, parts))

    def finish(self, ticket: TicketId, payload: bytes) -> None:
        """Declare that nothing more will be published for a ticket; the consumer gets `payload`. Ignored if the ticket
        has ended. Raises `UnknownTicket` if it was not opened, and `LocalTransferError` if the payload is too long.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise LocalTransferError(f"a payload of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}")
        handoff = self._handoffs.find(ticket)
        if handoff is not None:
            self._apply(handoff, handoff.session.finish(payload, self._context.clock()))

    def give_up(self, ticket: TicketId, reason: ReleaseReason, message: str) -> None:
        """Stop serving a ticket that this node opened. `reason` is what its owner gets from `released`, and `message`
        is the text that the consumer's error contains.
        """
        handoff = self._handoffs.find(ticket)
        if handoff is not None:
            self._apply(handoff, handoff.session.give_up(reason, message))

    def cancel(self, ticket: TicketId) -> None:
        """Stop serving a ticket, at any time. If it is opened or fetched only later, the tombstone that is left here
        ends it at once.
        """
        for handoff in self._handoffs.cancel(ticket):
            self._apply(handoff, handoff.session.give_up("cancelled", "cancelled by the producer"))

    def outcome(self, ticket: TicketId) -> "asyncio.Future[ReleaseReason]":
        """Return the future that resolves, with the reason, when the blocks of a ticket may be freed. Raises
        `UnknownTicket` if the ticket was not opened here.
        """
        return self._handoffs.outcome(ticket)

    def tick(self, now: float) -> None:
        """Do the work of one timer tick at the time `now` of the node's clock: end tickets whose deadline or lease has
        passed, and forget lost connections that nothing uses.
        """
        for handoff in self._handoffs:
            self._apply(handoff, handoff.session.tick(now))
        self._connections.forget_lost(
            {handoff.session.link for handoff in self._handoffs}, {handoff.key[1:] for handoff in self._handoffs}
        )

    def num_sessions(self) -> int:
        """Return the number of tickets that are served now, including fetches of tickets that are not opened yet."""
        return len(self._handoffs)

    async def close(self, timeout_s: float) -> None:
        """End all served tickets, wait up to `timeout_s` seconds for consumers that still copy blocks, then stop
        listening.
        """
        for handoff in self._handoffs:
            self._apply(handoff, handoff.session.give_up("closed", "the producer shuts down"))
        if waiting := self._handoffs.unresolved():
            await asyncio.wait(waiting, timeout=timeout_s)
        await self._probes.close()
        self._connections.close()
        for future in self._handoffs.unresolved():
            future.set_result("closed")

    def check_invariants(self) -> None:
        """Assert that the state of each served ticket is consistent and that its blocks were not freed too early. Only
        tests call it.
        """
        self._handoffs.check_invariants()

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
        elif (reason := self._handoffs.tombstone(key)) is not None or self._handoffs.is_cancelled(fetch.ticket):
            code = CODE_OF[reason or "cancelled"]
            fail = Fail(fetch.ticket, fetch.attempt, code, f"the ticket has ended here: {reason or 'cancelled'}")
        # A parked fetch costs memory before anyone has opened its ticket: bound what one peer can cause.
        elif handoff is None and self._is_flooded(link):
            fail = Fail(fetch.ticket, fetch.attempt, "busy", "too many fetches of this peer")
        if fail is not None:
            link.send(fail)
            return
        if handoff is None:
            handoff = self._handoffs.add(key, ProducerSession(now=now, limits=context.limits))
        if fetch.attempt > handoff.session.attempt:
            # The earlier attempt may have used another connection: nothing of it must leave any more.
            self._connections.drop(fetch.ticket)
            handoff.transport = fetch.transport
            if handoff.on_fetched is not None:
                context.loop.call_soon(handoff.on_fetched)
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
        return len(self._handoffs) >= limit and self._handoffs.count_of(link.peer) >= limit

    def _renew(self, link: ProducerLink, ticket: TicketId, now: float) -> bool:
        handoff = self._handoffs.get((ticket, *link.peer))
        return handoff is not None and handoff.session.renew(now)

    def _released(self, link: ProducerLink, message: Release) -> None:
        key = (message.ticket, *link.peer)
        handoff = self._handoffs.get(key)
        if handoff is not None:
            self._apply(handoff, handoff.session.release(message))
        # The release overtook the fetch or `open`: leave a tombstone, so that a later one ends immediately.
        elif self._handoffs.tombstone(key) is None:
            self._handoffs.entomb(key, "cancelled")

    def _apply(self, handoff: Handoff, steps: Sequence[ProducerStep]) -> None:
        session, ticket = handoff.session, handoff.key[0]
        link = self._connections.get(session.link)
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
                    self._connections.drop(ticket)
                    self._drain(handoff, DRAIN_POLL_S)
                case Released():
                    self._free(handoff, step.reason)
        if session.is_over():
            self._handoffs.bury(handoff)

    def _drain(self, handoff: Handoff, wait_s: float) -> None:
        """Release the blocks of an ended ticket (`handoff`) as soon as no frame that is being sent and no thread reads
        them. Check now and, if necessary, again after `wait_s` seconds, which doubles each time.
        """
        if handoff.session.state is not ProducerState.DRAINING:
            return
        if self._connections.is_reading(handoff.key[0]):
            self._context.loop.call_later(wait_s, self._drain, handoff, min(wait_s * 2, MAX_DRAIN_POLL_S))
            return
        self._apply(handoff, handoff.session.quiet())

    def _free(self, handoff: Handoff, reason: ReleaseReason) -> None:
        if sent := handoff.served_bytes:
            self._context.observer.moved(
                peer=handoff.key[1], transport=handoff.transport, direction="sent", num_bytes=sent
            )
        self._handoffs.release(handoff, reason)

    def _on_lost(self, link: ProducerLink, dead: bool) -> None:
        self._probes.lost(link)
        for handoff in self._handoffs:
            if handoff.session.link == link.number or (dead and handoff.key[1:] == link.peer):
                # Without its process, no connection of the consumer will come back: end all its tickets, whatever link
                # they use.
                self._apply(handoff, handoff.session.link_lost(dead=dead))
