"""Serves cached blocks to other instances that pull them by hash, and limits how many at a time.

Blocks are pinned while they are sent; those in the host tier are copied back to the device first. Blocks that are not
cached any more are not sent: the fetching instance takes what is available.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from baton_serve.contracts.identity import BlockHash, RequestId, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer.errors import LocalTransferError
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.interfaces import SourcePort
from baton_serve.services.instance.request_server import await_uncancelled

logger = logging.getLogger(__name__)

MAX_SHARES = 32
"""Maximum number of fetches served at the same time. Further ones are refused, so that the fetching instance computes
the blocks instead of waiting."""


MAX_ENDED_TICKETS = 1024
"""Number of ended tickets that are remembered for `KVSharing.ended`, which may be called after the end."""


class PullSourcePort(SourcePort, Protocol):
    """The producer's interface of `kvtransfer.TransferNode`, with a callback for fetches whose ticket this instance has
    not opened.
    """

    def on_fetch(self, handler: Callable[[Ticket, list[BlockHash]], None], /) -> None: ...


class KVSharing:
    """Serves cached KV blocks of this instance to other instances that fetch them by hash. Use it only on the event
    loop.
    """

    def __init__(self, engine: EngineCalls, transfer: PullSourcePort, *, max_shares: int = MAX_SHARES) -> None:
        self._engine = engine
        self._transfer = transfer
        self._max_shares = max_shares
        self._shares: set[asyncio.Task[None]] = set()
        self._awaited: dict[TicketId, asyncio.Event] = {}
        transfer.on_fetch(self._begin)

    async def ended(self, ticket: TicketId) -> None:
        """Wait until the transfer of this ticket is over. The ticket was given to an instance that takes the blocks of
        this draining one; that instance may fetch the blocks before or after this call.
        """
        await self._awaited.setdefault(ticket, asyncio.Event()).wait()

    async def close(self) -> None:
        """Wait until all fetches that are being served have ended. Call it after the transfer node was closed, which
        ends them.
        """
        while self._shares:
            await asyncio.wait(self._shares)

    def _begin(self, ticket: Ticket, names: list[BlockHash]) -> None:
        try:
            # The ticket may be expired or of another generation of this process.
            self._transfer.open(ticket)
        except LocalTransferError as exc:
            logger.debug("cannot serve ticket %s: %s", ticket.ticket, exc)
            return
        if len(self._shares) >= self._max_shares:
            self._transfer.fail(
                ticket.ticket, f"this instance serves {self._max_shares} fetches already, which is the maximum"
            )
            self._has_ended(ticket)
            return
        task = asyncio.get_running_loop().create_task(self._share(ticket, names), name=f"share-{ticket.ticket}")
        self._shares.add(task)
        task.add_done_callback(self._shares.discard)

    async def _share(self, ticket: Ticket, names: Sequence[BlockHash]) -> None:
        pin_id = RequestId(f"share:{ticket.ticket}")
        try:
            # Only the cached prefix of `names` is returned; the transfer ends without the rest.
            pinned = await self._engine.call(lambda engine: engine.pin(pin_id, names))
            self._transfer.publish(ticket.ticket, pinned)
            self._transfer.finish(ticket.ticket, b"")
        except Exception as exc:  # noqa: BLE001 - the fetching instance gets the reason and computes the blocks
            self._transfer.fail(ticket.ticket, f"{type(exc).__name__}: {exc}")
        finally:
            # Blocks must stay pinned until no transport reads them, even if this task is cancelled.
            await await_uncancelled(self._release(ticket, pin_id))

    async def _release(self, ticket: Ticket, pin_id: RequestId) -> None:
        await self._transfer.released(ticket.ticket)
        self._has_ended(ticket)
        self._engine.post(lambda engine: engine.unpin(pin_id))

    def _has_ended(self, ticket: Ticket) -> None:
        self._awaited.setdefault(ticket.ticket, asyncio.Event()).set()
        while len(self._awaited) > MAX_ENDED_TICKETS:
            # Dicts keep insertion order, so this drops the oldest entry.
            del self._awaited[next(iter(self._awaited))]
