"""Serves cached blocks to instances that ask for them by name: the other end of `pulling`.

Blocks are pinned while they are read, a host tier's copied back to the device first. What is not cached any more is not
sent: the asking instance takes what there is.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from baton_serve.contracts.identity import BlockHash, RequestId, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer.errors import LocalTransferError
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.ports import SourcePort
from baton_serve.services.instance.request_server import await_uncancelled

logger = logging.getLogger(__name__)

MAX_SHARES = 32
"""At once. More are refused, so that those who ask compute instead of waiting."""


MAX_ENDED_TICKETS = 1024


class PullSourcePort(SourcePort, Protocol):
    """`kvtransfer.TransferNode`."""

    def on_fetch(self, handler: Callable[[Ticket, list[BlockHash]], None], /) -> None: ...


class KVSharing:
    def __init__(self, engine: EngineCalls, transfer: PullSourcePort, *, max_shares: int = MAX_SHARES) -> None:
        self._engine = engine
        self._transfer = transfer
        self._max_shares = max_shares
        self._shares: set[asyncio.Task[None]] = set()
        self._awaited: dict[TicketId, asyncio.Event] = {}
        transfer.on_fetch(self._begin)

    async def ended(self, ticket: TicketId) -> None:
        """Returns when the blocks of this ticket, which somebody has been told to ask for, were read."""
        await self._awaited.setdefault(ticket, asyncio.Event()).wait()

    async def close(self) -> None:
        """After the transfer node has closed, which ends all shares."""
        while self._shares:
            await asyncio.wait(self._shares)

    def _begin(self, ticket: Ticket, names: list[BlockHash]) -> None:
        try:
            self._transfer.open(ticket)
        except LocalTransferError as exc:
            logger.debug("ticket %s: %s", ticket.ticket, exc)
            return
        if len(self._shares) >= self._max_shares:
            self._transfer.fail(ticket.ticket, f"{self._max_shares} instances fetch from here already")
            self._has_ended(ticket)
            return
        task = asyncio.get_running_loop().create_task(self._share(ticket, names), name=f"share-{ticket.ticket}")
        self._shares.add(task)
        task.add_done_callback(self._shares.discard)

    async def _share(self, ticket: Ticket, names: Sequence[BlockHash]) -> None:
        pin_id = RequestId(f"share:{ticket.ticket}")
        try:
            pinned = await self._engine.call(lambda engine: engine.pin(pin_id, names))
            self._transfer.publish(ticket.ticket, pinned)
            self._transfer.finish(ticket.ticket, b"")
        except Exception as exc:  # noqa: BLE001 - the asking instance is told and computes instead
            self._transfer.fail(ticket.ticket, f"{type(exc).__name__}: {exc}")
        finally:
            await await_uncancelled(self._release(ticket, pin_id))

    async def _release(self, ticket: Ticket, pin_id: RequestId) -> None:
        await self._transfer.released(ticket.ticket)
        self._has_ended(ticket)
        self._engine.post(lambda engine: engine.unpin(pin_id))

    def _has_ended(self, ticket: Ticket) -> None:
        self._awaited.setdefault(ticket.ticket, asyncio.Event()).set()
        while len(self._awaited) > MAX_ENDED_TICKETS:
            del self._awaited[next(iter(self._awaited))]
