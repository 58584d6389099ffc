"""Commands another rank's transfers from rank 0: each call becomes a message, and answers resolve futures."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from baton_serve.contracts.identity import TicketId
from baton_serve.contracts.instance import LinkStatus
from baton_serve.contracts.messages import Ticket
from baton_serve.contracts.wire import WireError
from baton_serve.engine.parallel.part_links import PartLink
from baton_serve.kvtransfer import (
    FetchResult,
    LocalTransferError,
    NodeClosed,
    PeerLost,
    ReleaseReason,
    TransferObserver,
    errors,
)
from baton_serve.kvtransfer.consumer.fetching import OnBlocks
from baton_serve.kvtransfer.ranks.rank_port import NamedBlocks
from baton_serve.services.instance.rank_transfers.part_messages import (
    CancelPart,
    ConnectNode,
    FailPart,
    FetchPart,
    FinishPart,
    FromRank,
    NodeConnected,
    OpenPart,
    PartArrived,
    PartCounted,
    PartFailed,
    PartFetched,
    PartReleased,
    PartStarted,
    PublishPart,
    StartPart,
    ToRank,
    rank_zero_decoder,
    receive,
    send,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Longest time in seconds until a rank's node listens. Its first start may compile a C++ library."""
END_MARGIN_S = 30.0
"""Seconds beyond the time of a ticket in which a rank must report its end. A rank that does not has lost control of its
memory, so the instance must end."""
CONNECT_TIMEOUT_S = 30.0
"""Longest time in seconds until a rank reports whether it is connected; it gives up by itself before."""
CLOSE_TIMEOUT_S = 3.0
"""Longest wait in seconds for a rank that closes its node."""


class RankStartError(Exception):
    """A rank cannot serve its part of the blocks; the instance sends whole blocks only."""


@dataclass(slots=True)
class RunningFetch:
    """A fetch of another rank: the future of its end, and the caller's function for arrived blocks."""

    future: "asyncio.Future[FetchResult]"
    on_blocks: OnBlocks


class RemoteRank:
    """Implements `kvtransfer.RankPort` for a rank in another process of this host. Use it only on the event loop.

    `on_broken` is called with the reason if the rank's transfers cannot be controlled any more: the instance must end,
    because the rank may still be writing to blocks.
    """

    def __init__(self, link: PartLink, observer: TransferObserver, on_broken: Callable[[str], None]) -> None:
        self.address = ""
        self.division = ""
        self._link = link
        self._observer = observer
        self._on_broken = on_broken
        self._released: dict[TicketId, asyncio.Future[ReleaseReason]] = {}
        self._fetches: dict[TicketId, RunningFetch] = {}
        self._connects: dict[str, asyncio.Future[str]] = {}
        self._is_closing = False
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, start: StartPart) -> None:
        """Start the rank's node. Raises `RankStartError` if that fails; the caller then calls `close`."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._link.connection)
        send(self._writer, start)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = rank_zero_decoder.decode(await receive(reader))
        except (TimeoutError, EOFError, WireError) as exc:
            raise RankStartError(f"rank {self._link.number}: {type(exc).__name__} {exc}") from exc
        if not isinstance(answer, PartStarted):
            raise RankStartError(f"rank {self._link.number}: {getattr(answer, 'reason', answer)}")
        self.address, self.division = answer.address, answer.division
        self._reading = asyncio.get_running_loop().create_task(self._read(reader), name=f"rank-{self._link.number}")

    def open(self, ticket: Ticket) -> "asyncio.Future[ReleaseReason]":
        loop = asyncio.get_running_loop()
        released: asyncio.Future[ReleaseReason] = loop.create_future()
        if self._is_closing:
            # Nothing of the ticket has left this rank.
            released.set_result("closed")
            return released
        self._released[ticket.ticket] = released
        # A fetch may come at the end of the ticket's time, and has as much time again.
        limit_s = 2 * ticket.timeout_s + END_MARGIN_S
        overdue = loop.call_later(limit_s, self._break, f"it has not released a ticket within {limit_s:g} s")
        released.add_done_callback(lambda _: overdue.cancel())
        self._send(OpenPart(ticket))
        return released

    def publish(self, ticket: TicketId, blocks: NamedBlocks) -> None:
        self._send(PublishPart(ticket, list(blocks), self._link.num_commands()))

    def finish(self, ticket: TicketId, payload: bytes) -> None:
        self._send(FinishPart(ticket, payload))

    def fail(self, ticket: TicketId, reason: str) -> None:
        self._send(FailPart(ticket, reason))

    def cancel(self, ticket: TicketId) -> None:
        self._send(CancelPart(ticket))

    async def fetch(self, ticket: Ticket, wanted: NamedBlocks, on_blocks: OnBlocks) -> FetchResult:
        if self._is_closing:
            raise NodeClosed("the transfers of this rank were closed")
        if ticket.ticket in self._fetches:
            raise LocalTransferError(f"ticket {ticket.ticket} is being fetched already")
        future: asyncio.Future[FetchResult] = asyncio.get_running_loop().create_future()
        self._fetches[ticket.ticket] = RunningFetch(future, on_blocks)
        self._send(FetchPart(ticket, list(wanted), self._link.num_commands()))
        try:
            async with asyncio.timeout(ticket.timeout_s + END_MARGIN_S):
                return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The caller may reuse the blocks only when the rank's last copy has ended.
            self.cancel(ticket.ticket)
            await self._settled(future)
            raise
        except TimeoutError as exc:
            self._break(f"it has not ended a fetch within {END_MARGIN_S:g} s after its deadline")
            raise NodeClosed("a rank does not answer") from exc
        finally:
            self._fetches.pop(ticket.ticket, None)

    async def connect(self, address: str) -> None:
        """Connect the rank's node to that of another instance. Raises `PeerLost` if that fails."""
        if self._is_closing:
            raise PeerLost("the transfers of this rank were closed")
        future = self._connects.get(address)
        if future is None:
            future = self._connects[address] = asyncio.get_running_loop().create_future()
            self._send(ConnectNode(address))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                failure = await asyncio.shield(future)
        except TimeoutError:
            failure = f"no answer within {CONNECT_TIMEOUT_S:g} s"
        finally:
            self._connects.pop(address, None)
        if failure:
            raise PeerLost(f"rank {self._link.number}: {failure}")

    def links(self) -> list[LinkStatus]:
        """Return nothing: rank 0's own part stands for those of all ranks."""
        return []

    async def close(self) -> None:
        """Let the rank close its node, and wait for it."""
        self._is_closing = True
        if self._writer is None:
            self._link.connection.close()
            return
        if self._writer.is_closing():
            return
        with suppress(OSError, RuntimeError):
            self._writer.write_eof()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=CLOSE_TIMEOUT_S)
            self._reading.cancel()
        self._end_all()
        self._writer.close()

    def _send(self, message: ToRank) -> None:
        """Send an order. Without a connection, as after its end, nothing is left to be ordered."""
        if self._writer is not None and not self._is_closing:
            send(self._writer, message)

    async def _settled(self, future: "asyncio.Future[FetchResult]") -> None:
        """Wait for the end of a fetch that was cancelled, even if this task is cancelled again."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + END_MARGIN_S
        while not future.done():
            try:
                await asyncio.wait([future], timeout=max(0.0, deadline - loop.time()))
            except asyncio.CancelledError:
                continue
            if not future.done() and loop.time() >= deadline:
                self._break(f"it has not ended a cancelled fetch within {END_MARGIN_S:g} s")
                return
        if not future.cancelled():
            future.exception()  # marks it as read: asyncio logs exceptions that nobody has read

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Handle the messages of the rank until the connection ends."""
        try:
            while True:
                self._handle(rank_zero_decoder.decode(await receive(reader)))
        except (EOFError, WireError) as exc:
            if not self._is_closing:
                self._break(str(exc))

    def _handle(self, message: FromRank) -> None:
        match message:
            case PartReleased():
                released = self._released.pop(message.ticket, None)
                if released is not None and not released.done():
                    released.set_result(message.reason)
            case NodeConnected():
                if (connected := self._connects.get(message.address)) is not None and not connected.done():
                    connected.set_result(message.failure)
            case PartArrived():
                if (fetch := self._fetches.get(message.ticket)) is not None:
                    fetch.on_blocks(message.names)
            case PartFetched():
                self._fetched(message)
            case PartFailed():
                self._failed(message)
            case PartCounted():
                getattr(self._observer, message.event)(**message.values)
            case _:
                raise EOFError(f"{type(message).__name__} came unasked")

    def _fetched(self, message: PartFetched) -> None:
        fetch = self._fetches.get(message.ticket)
        if fetch is not None and not fetch.future.done():
            fetch.future.set_result(
                FetchResult(
                    payload=message.payload,
                    transport=message.transport,
                    seconds=message.seconds,
                    exposed_s=message.exposed_s,
                    num_bytes=message.num_bytes,
                    num_blocks=message.num_blocks,
                    names=(),
                    ended_at=message.ended_at,
                )
            )

    def _failed(self, message: PartFailed) -> None:
        fetch = self._fetches.get(message.ticket)
        if fetch is not None and not fetch.future.done():
            error = getattr(errors, message.error, errors.LocalTransferError)
            fetch.future.set_exception(error(f"rank {self._link.number}: {message.reason}"))

    def _break(self, reason: str) -> None:
        """End the instance, because this rank's transfers are out of control."""
        if self._is_closing:
            return
        self._is_closing = True
        logger.error("the transfers of rank %d: %s", self._link.number, reason)
        self._end_all()
        self._on_broken(f"the transfers of rank {self._link.number}: {reason}")

    def _end_all(self) -> None:
        for fetch in self._fetches.values():
            if not fetch.future.done():
                fetch.future.set_exception(NodeClosed("the transfers of this rank have ended"))
        for connected in self._connects.values():
            if not connected.done():
                connected.set_result("its transfers have ended")
        for released in self._released.values():
            if not released.done():
                released.set_result("closed")
        self._released.clear()
