"""Runs the transfers of a rank other than 0: each waits until the rank has executed the engine's commands before it."""

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Literal

from baton_serve.contracts.identity import BlockHash, InstanceId, TicketId
from baton_serve.contracts.wire import WireError
from baton_serve.engine.parallel.part_links import OwnPart
from baton_serve.kvtransfer import LocalRank, ReleaseReason, TransferError
from baton_serve.services.instance.engine_thread import SWITCH_INTERVAL_S
from baton_serve.services.instance.rank_transfers.part_memory import PartMemory, describe_part, part_node
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
    PartRefused,
    PartReleased,
    PartStarted,
    PublishPart,
    StartPart,
    ToRank,
    rank_decoder,
    receive,
    send,
)

logger = logging.getLogger(__name__)

COMMANDS_TIMEOUT_S = 60.0
"""Longest time in seconds for which published blocks wait for commands of the engine that were sent before."""


def serve_part(connection: socket.socket, part: OwnPart) -> None:
    """Serve the transfers of a rank's `part` in a new thread, until rank 0 closes `connection`."""
    # As in the process of rank 0: with Python's default, the rank's thread and this one wait for each other for 5 ms.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    threading.Thread(target=_serve, args=(connection, part), name="transfers", daemon=True).start()


def _serve(connection: socket.socket, part: OwnPart) -> None:
    try:
        asyncio.run(_run(connection, part))
    except Exception:
        # The connection is closed, by which rank 0 notices it.
        logger.exception("the transfers of this rank have ended")


async def _run(connection: socket.socket, part: OwnPart) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        await PartServer(reader, writer, part).run()
    except (EOFError, WireError) as exc:
        logger.debug("rank 0 has closed the connection of transfers: %s", exc)
    finally:
        writer.close()


class PartServer:
    """Executes rank 0's orders about this rank's part of blocks, in their order. Use it only on its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, part: OwnPart) -> None:
        self._reader, self._writer, self._part = reader, writer, part
        self._fetches: dict[TicketId, asyncio.Task[FromRank]] = {}
        self._connecting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Start the node as the first message says, then execute orders until the connection ends, which raises
        `EOFError`.
        """
        first = rank_decoder.decode(await receive(self._reader))
        if not isinstance(first, StartPart):
            raise EOFError(f"the first message is {type(first).__name__}")
        memory = PartMemory(self._part.cache)
        division = describe_part(self._part.cache, first.layout, first.rank, first.num_ranks)
        try:
            node = part_node(
                first.instance,
                first.generation,
                memory=memory,
                division=division,
                settings=first.settings,
                observer=ReportingObserver(self._send),
            )
            await node.start()
        except TransferError as exc:
            self._send(PartRefused(str(exc)))
            raise EOFError(str(exc)) from exc
        self._rank = LocalRank(node, memory.mark)
        self._send(PartStarted(node.address, division))
        try:
            while True:
                await self._execute(rank_decoder.decode(await receive(self._reader)))
        finally:
            # Ends the fetches too, and then their tasks.
            await self._rank.close()
            left = [*self._fetches.values(), *self._connecting]
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)

    async def _execute(self, order: ToRank) -> None:
        match order:
            case OpenPart():
                outcome = self._rank.open(order.ticket)
                outcome.add_done_callback(partial(self._released, order.ticket.ticket))
            case PublishPart():
                await self._publish(order)
            case FinishPart():
                self._rank.finish(order.ticket, order.payload)
            case FailPart():
                self._rank.fail(order.ticket, order.reason)
            case CancelPart():
                self._rank.cancel(order.ticket)
                # It may still wait for commands of the engine.
                if (fetch := self._fetches.get(order.ticket)) is not None:
                    fetch.cancel()
            case FetchPart():
                fetch = asyncio.get_running_loop().create_task(self._fetch(order))
                self._fetches[order.ticket.ticket] = fetch
                fetch.add_done_callback(partial(self._fetched, order.ticket.ticket))
            case ConnectNode():
                connecting = asyncio.get_running_loop().create_task(self._connect(order.address))
                self._connecting.add(connecting)
                connecting.add_done_callback(self._connecting.discard)
            case StartPart():
                raise EOFError("the node was started twice")

    async def _connect(self, address: str) -> None:
        failure = ""
        try:
            await self._rank.connect(address)
        except TransferError as exc:
            failure = f"{type(exc).__name__}: {exc}"
        self._send(NodeConnected(address, failure))

    async def _publish(self, order: PublishPart) -> None:
        try:
            async with asyncio.timeout(COMMANDS_TIMEOUT_S):
                await self._commands_executed(order.after)
        except TimeoutError:
            self._rank.fail(order.ticket, f"a rank has not computed the blocks within {COMMANDS_TIMEOUT_S:g} s")
            return
        self._rank.publish(order.ticket, order.blocks)

    def _released(self, ticket: TicketId, outcome: "asyncio.Future[ReleaseReason]") -> None:
        if not outcome.cancelled():
            self._send(PartReleased(ticket, outcome.result()))

    async def _fetch(self, order: FetchPart) -> FromRank:
        """Fetch this rank's part of blocks, and return the message about the end."""
        ticket = order.ticket
        try:
            async with asyncio.timeout(ticket.timeout_s):
                # Before, this rank may still use the memory of the wanted blocks for another request.
                await self._commands_executed(order.after)
        except TimeoutError:
            return PartFailed(ticket.ticket, "TransferTimeout", "this rank was busy for the whole time of the ticket")
        try:
            result = await self._rank.fetch(ticket, order.wanted, partial(self._arrived, ticket.ticket))
        except TransferError as exc:
            return PartFailed(ticket.ticket, type(exc).__name__, str(exc))
        return PartFetched(
            ticket.ticket,
            payload=result.payload,
            transport=result.transport,
            seconds=result.seconds,
            exposed_s=result.exposed_s,
            num_bytes=result.num_bytes,
            num_blocks=result.num_blocks,
            ended_at=result.ended_at,
        )

    def _fetched(self, ticket: TicketId, fetch: "asyncio.Task[FromRank]") -> None:
        """Report the end of a fetch to rank 0, also if its task was cancelled before it began."""
        self._fetches.pop(ticket, None)
        if fetch.cancelled():
            self._send(PartFailed(ticket, "TransferCancelled", "cancelled by rank 0"))
        elif (error := fetch.exception()) is not None:
            logger.error("a fetch of this rank failed", exc_info=error)
            self._send(PartFailed(ticket, "LocalTransferError", f"{type(error).__name__}: {error}"))
        else:
            self._send(fetch.result())

    def _arrived(self, ticket: TicketId, names: list[BlockHash]) -> None:
        self._send(PartArrived(ticket, names))

    async def _commands_executed(self, count: int) -> None:
        """Wait until the rank's thread has executed the first `count` commands of rank 0's engine."""
        loop = asyncio.get_running_loop()
        reached: asyncio.Future[None] = loop.create_future()
        self._part.commands.when(count, partial(_call_in, loop, partial(_resolve, reached)))
        await reached

    def _send(self, message: FromRank) -> None:
        send(self._writer, message)


def _call_in(loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> None:
    """Call `then` on `loop`, which may have ended meanwhile. Any thread may call this."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(then)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class ReportingObserver:
    """Passes the events of a rank's node to rank 0, which counts them. Implements `kvtransfer.TransferObserver`."""

    def __init__(self, report: Callable[[PartCounted], None]) -> None:
        self._report = report

    def moved(
        self, *, peer: InstanceId, transport: str, direction: Literal["received", "sent"], num_bytes: int
    ) -> None:
        about = {"peer": peer, "transport": transport, "direction": direction}
        self._report(PartCounted("moved", {**about, "num_bytes": num_bytes}))

    def retried(self, *, peer: InstanceId, transport: str, reason: str) -> None:
        self._report(PartCounted("retried", {"peer": peer, "transport": transport, "reason": reason}))

    def mismatched(self, *, peer: InstanceId, transport: str, blocks: int) -> None:
        self._report(PartCounted("mismatched", {"peer": peer, "transport": transport, "blocks": blocks}))

    def probed(self, *, peer: InstanceId, transport: str, outcome: str) -> None:
        self._report(PartCounted("probed", {"peer": peer, "transport": transport, "outcome": outcome}))

    def switched(self, *, peer: InstanceId, transport: str, change: Literal["demoted", "promoted"]) -> None:
        self._report(PartCounted("switched", {"peer": peer, "transport": transport, "change": change}))
