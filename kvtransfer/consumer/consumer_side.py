"""Runs the fetches of a node over connections to producers; each fetch is decided in `session/consumer_session.py`."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence

import zmq

from baton_serve.contracts.identity import BlockHash, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import errors
from baton_serve.kvtransfer.consumer.connections import Connections
from baton_serve.kvtransfer.consumer.copy_jobs import CopyResult, StopFlag
from baton_serve.kvtransfer.consumer.fetching import Fetching, FetchOptions, FetchResult
from baton_serve.kvtransfer.consumer.link import ConsumerLink
from baton_serve.kvtransfer.consumer.parcel_copier import ParcelCopier
from baton_serve.kvtransfer.consumer.renewals import Renewals
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.control_messages import Blocks, Bytes, Done, Fail, Ready, Release, Renewed, ToConsumer
from baton_serve.kvtransfer.session.consumer_session import ConsumerSession
from baton_serve.kvtransfer.session.steps import (
    Arrived,
    Ask,
    ConsumerStep,
    Copy,
    Fault,
    Give,
    Relink,
    StopCopies,
    Succeed,
)

logger = logging.getLogger(__name__)


class ConsumerSide:
    """Runs all fetches of one node. Use it only on the event loop.

    It passes messages of producers and the results of copies to the fetches' state machines (`ConsumerSession`). These
    decide what happens next, and it performs the actions that they return.
    """

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._fetches: dict[TicketId, Fetching] = {}
        self._cancelled: OrderedDict[TicketId, None] = OrderedDict()
        # Three renewals in a lease: one may be lost or late without ending it.
        self._renewals = Renewals(context.limits.lease_s / 3)
        self._copier = ParcelCopier(context, self._copied)
        self.connections = Connections(context, on_message=self._receive, on_lost=self._lost, on_broken=self._broken)

    async def fetch(
        self, ticket: Ticket, wanted: Sequence[tuple[BlockHash, int]], options: FetchOptions
    ) -> FetchResult:
        """Fetch the blocks `wanted`: pairs of a block hash and the number of the block of this node that it is written
        to. See `TransferNode.fetch` for the errors.
        """
        self._check(ticket, wanted)
        fetching = self._begin(ticket, wanted, options)
        session, context = fetching.session, self._context
        self._fetches[ticket.ticket] = fetching
        self._connect(fetching, context.settings.connect_timeout_s)
        try:
            return await asyncio.shield(fetching.future)
        except asyncio.CancelledError:
            # A thread may be copying into the wanted blocks: the caller must not get them back before it has ended.
            self._apply(fetching, session.cancel())
            await _settled(fetching.future)
            raise
        finally:
            del self._fetches[ticket.ticket]
            if fetching.staged is not None:
                context.staging_buffers.end(fetching.staged)
            if fetching.connecting is not None:
                fetching.connecting.cancel()

    def cancel(self, ticket: TicketId) -> None:
        """Cancel the fetch of this ticket. If it has not begun yet, leave a tombstone, so that it raises
        `TransferCancelled` when it begins.
        """
        self._cancelled[ticket] = None
        # The tombstones are bounded: a ticket that is cancelled and never fetched would stay for ever.
        while len(self._cancelled) > self._context.settings.max_tombstones:
            self._cancelled.popitem(last=False)
        fetching = self._fetches.get(ticket)
        if fetching is not None:
            self._apply(fetching, fetching.session.cancel())

    def tick(self, now: float) -> None:
        """Do the work of one timer tick at the time `now` of the node's clock: end fetches whose deadline has passed,
        close unused connections, start probes, and renew leases.
        """
        for fetching in list(self._fetches.values()):
            self._apply(fetching, fetching.session.tick(now))
        self.connections.tick(now, {fetching.link for fetching in self._fetches.values() if fetching.link is not None})
        if self._renewals.is_due(now):
            for link in self.connections:
                self._renew(link, now)

    def num_sessions(self) -> int:
        """Return the number of running fetches."""
        return len(self._fetches)

    async def close(self) -> None:
        """End all running fetches with `NodeClosed`, wait until their copies have ended, then close the connections to
        producers.
        """
        running = list(self._fetches.values())
        for fetching in running:
            self._apply(fetching, fetching.session.close())
        for fetching in running:
            await _settled(fetching.future)
        await self.connections.close()

    def check_invariants(self) -> None:
        """Assert that the state machines of all running fetches are consistent. Only tests call it."""
        for fetching in self._fetches.values():
            fetching.session.check_invariants()

    def _check(self, ticket: Ticket, wanted: Sequence[tuple[BlockHash, int]]) -> None:
        context = self._context
        if (ticket.sink, ticket.sink_generation) != (context.instance, context.generation):
            raise errors.UnknownTicket(f"ticket {ticket.ticket} is for {ticket.sink}, not for this instance")
        if ticket.ticket in self._cancelled:
            raise errors.TransferCancelled(f"ticket {ticket.ticket} was cancelled")
        if ticket.ticket in self._fetches:
            raise errors.LocalTransferError(f"ticket {ticket.ticket} is being fetched already")
        if len(self._fetches) >= context.settings.max_fetches:
            raise errors.TooManyFetches(f"{len(self._fetches)} fetches are running")
        bad = [block for _, block in wanted if not 0 <= block < context.memory.num_blocks]
        if bad:
            raise errors.LocalTransferError(f"block {bad[0]} is not one of {context.memory.num_blocks}")

    def _begin(self, ticket: Ticket, wanted: Sequence[tuple[BlockHash, int]], options: FetchOptions) -> Fetching:
        context, translation = self._context, options.translation
        now, layout, staged = context.clock(), context.layout, None
        # Create the memory pages while the request travels, so that the copies find them.
        context.pages.make(block for _, block in wanted)
        if translation is not None and translation.layout != layout:
            layout, staged = translation.layout, context.staging_buffers.begin(translation, wanted)
            wanted = staged.wanted
        session = ConsumerSession(ticket, wanted, now=now, limits=context.limits, partial=options.partial)
        future: asyncio.Future[FetchResult] = context.loop.create_future()
        return Fetching(session, future, options, now, layout=layout, staged=staged)

    def _connect(self, fetching: Fetching, timeout_s: float) -> None:
        """Start the next attempt of a fetch now if a connection to its producer is ready, otherwise as soon as one is
        open. Opening takes at most `timeout_s`; after that the fetch fails.
        """
        ticket = fetching.ticket
        link = self.connections.ready(ticket.source_address, ticket.source_generation)
        if link is not None:
            self._linked(fetching, link)
        else:
            fetching.connecting = self._context.loop.create_task(self._wait_for_link(fetching, timeout_s))

    async def _wait_for_link(self, fetching: Fetching, timeout_s: float) -> None:
        ticket, session = fetching.ticket, fetching.session
        try:
            link = await self.connections.get(ticket.source_address, ticket.source_generation, timeout_s)
        except errors.PeerLost as exc:
            self._apply(fetching, session.link_failed(Fault.LOST, str(exc)))
        except errors.Refused as exc:
            self._apply(fetching, session.link_failed(Fault.REFUSED, str(exc)))
        except errors.TransportUnavailable as exc:
            fault = Fault.CORRUPT if fetching.is_damaged else Fault.REFUSED
            self._apply(fetching, session.link_failed(fault, str(exc)))
        else:
            self._linked(fetching, link)

    def _linked(self, fetching: Fetching, link: ConsumerLink) -> None:
        transport = link.transport
        if transport is None or not link.is_up:
            self._connect(fetching, self._context.settings.relink_timeout_s)
            return
        # The blocks would have other hashes, or other bytes under the same ones.
        if link.layout != fetching.layout:
            reason = f"layouts differ: producer {link.layout}, the fetch is for one of {fetching.layout}"
            self._apply(fetching, fetching.session.link_failed(Fault.REFUSED, reason))
            return
        fetching.link, fetching.receiver, fetching.is_buffered = link, link.receiver, transport.buffers
        fetching.block_bytes = link.block_bytes
        # A flag of its own for each attempt: copies of the last attempt stay stopped.
        fetching.stop = StopFlag()
        steps = fetching.session.linked(
            transport.name, pulls=transport.pulls, now=self._context.clock(), parts=link.parts
        )
        self._apply(fetching, steps)

    def _lost(self, link: ConsumerLink, reason: str, dead: bool) -> None:
        now = self._context.clock()
        for fetching in list(self._fetches.values()):
            if fetching.link is link:
                self._apply(fetching, fetching.session.link_lost(reason, dead=dead, now=now))

    def _broken(self, link: ConsumerLink, transport: str, reason: str) -> None:
        """Stop using `transport` on the connection `link`, because the transport delivers nothing more (`reason` says
        why). All fetches that use it start another attempt, by another transport.
        """
        if not link.demote(transport, reason):
            return
        now = self._context.clock()
        for fetching in list(self._fetches.values()):
            if fetching.link is link and fetching.session.transport == transport:
                self._apply(fetching, fetching.session.transport_lost(reason, now))

    def _receive(self, link: ConsumerLink, message: ToConsumer, frames: list[zmq.Frame]) -> None:
        match message:
            case Bytes():
                self._copier.take(link, message, frames)
            case Renewed():
                self._renewed(link, message, self._context.clock())
            case Ready() | Blocks() | Done() | Fail():
                self._handle_ticket(link, message, frames)
            case _:
                link.lose("it sent an unexpected message")

    def _handle_ticket(
        self, link: ConsumerLink, message: Ready | Blocks | Done | Fail, frames: list[zmq.Frame]
    ) -> None:
        now, fetching = self._context.clock(), self._fetches.get(message.ticket)
        if fetching is None or fetching.link is not link:
            if isinstance(message, Blocks):
                self._copier.skip(link, message, frames)
            if fetching is None and isinstance(message, Blocks | Done):
                # The producer still holds blocks for a fetch that has ended here: without an answer it would keep them
                # until its lease runs out.
                link.send(Release(message.ticket, message.attempt, "unknown"))
            return
        if isinstance(message, Done):
            fetching.done_at = now
        steps = fetching.session.handle(message, now)
        if isinstance(message, Blocks):
            copies = [step for step in steps if isinstance(step, Copy)]
            for step in copies:
                self._copier.copy(fetching, step.placements, message, frames)
            # Nothing is wanted of this message, but its bytes occupy the connection and count against the window.
            if not copies:
                self._copier.skip(link, message, frames)
        self._apply(fetching, steps)

    def _apply(self, fetching: Fetching, steps: Sequence[ConsumerStep]) -> None:
        for step in steps:
            match step:
                case Ask():
                    if fetching.link is not None:
                        fetching.link.send(step.message)
                case Copy():
                    continue  # `_handle_ticket` has started it, because the frames are needed
                case Arrived():
                    self._notify_caller(fetching, step)
                case StopCopies():
                    self._copier.stop(fetching)
                case Relink():
                    self._relink(fetching, step)
                case Succeed() | Give():
                    self._end(fetching, step)

    def _notify_caller(self, fetching: Fetching, step: Arrived) -> None:
        # The callback of the caller raised: end its fetch.
        if not fetching.notify(step):
            self._apply(fetching, fetching.session.cancel())

    def _end(self, fetching: Fetching, step: Succeed | Give) -> None:
        if isinstance(step, Succeed):
            fetching.succeed(fetching.result(step, self._context.clock()))
        else:
            fetching.fail(step.fault, step.reason)

    def _relink(self, fetching: Fetching, step: Relink) -> None:
        link, settings, peer = fetching.link, self._context.settings, fetching.ticket.source
        logger.warning("peer=%s fetch is retried: %s", peer, step.reason, extra=fetching.log_fields)
        self._context.observer.retried(peer=peer, transport=fetching.session.transport, reason=step.reason)
        if step.demote is not None and link is not None:
            self._broken(link, step.demote, step.reason)
        self._connect(fetching, settings.connect_timeout_s if step.demote else settings.relink_timeout_s)

    def _copied(self, fetching: Fetching, size: int, result: CopyResult) -> None:
        context, session = self._context, fetching.session
        peer, transport, now = fetching.ticket.source, session.transport, context.clock()
        if result.copied:
            self._apply(fetching, session.copied(result.copied, now))
            num_bytes = len(result.copied) * size
            context.observer.moved(peer=peer, transport=transport, direction="received", num_bytes=num_bytes)
        if result.damaged:
            fetching.is_damaged = True
            context.observer.mismatched(peer=peer, transport=transport, blocks=len(result.damaged))
            self._apply(fetching, session.damaged(result.damaged, now))
        if result.abandoned:
            self._apply(fetching, session.abandoned(result.abandoned, now, result.error))

    def _renew(self, link: ConsumerLink, now: float) -> None:
        attempts = {
            fetching.ticket.ticket: fetching.session.attempt
            for fetching in self._fetches.values()
            if fetching.link is link and fetching.session.attempt
        }
        if attempts:
            link.send(self._renewals.renew(attempts, now))

    def _renewed(self, link: ConsumerLink, message: Renewed, now: float) -> None:
        for confirmed in self._renewals.confirm(message):
            fetching = self._fetches.get(confirmed.ticket)
            if fetching is None or fetching.link is not link or fetching.session.attempt != confirmed.attempt:
                continue
            if confirmed.is_known:
                fetching.session.renewed(confirmed.sent_at)
            else:
                self._apply(fetching, fetching.session.forgotten(confirmed.attempt, now))


async def _settled(future: "asyncio.Future[FetchResult]") -> None:
    """Wait until the fetch that resolves `future` has ended, even if this task is cancelled again meanwhile: the caller
    may free the blocks only when no copy writes to them. The wait is short, because each copy is bounded in time.
    """
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        # Mark the exception as read, or asyncio logs it when the future is deleted.
        future.exception()
