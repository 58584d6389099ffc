"""An instance that leaves hands its hottest blocks on: it tells a router which they are, the router finds an heir in
its pool, and the heir fetches them by name. The other end, being an heir, is here too.

Bounded by time and bytes; whatever goes wrong, the instance leaves in time.
"""

import asyncio
import logging

from baton_serve.contracts.identity import TicketId
from baton_serve.contracts.messages import Adopt, Heirs, HotBlocks
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.errors import InstanceError
from baton_serve.services.instance.kv_sharing.pulling import Puller
from baton_serve.services.instance.kv_sharing.serving import KVSharing
from baton_serve.services.instance.ports import RouterPort
from baton_serve.services.instance.request_server import Identity

logger = logging.getLogger(__name__)


class DrainMigration:
    def __init__(
        self,
        identity: Identity,
        *,
        engine: EngineCalls,
        router: RouterPort,
        sharing: KVSharing,
        puller: Puller,
        timeout_s: float,
        max_blocks: int,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._router = router
        self._sharing = sharing
        self._puller = puller
        self._timeout_s = timeout_s
        self._max_blocks = max_blocks
        self._migration_tickets: asyncio.Future[list[TicketId]] | None = None
        self._migrations_in: set[asyncio.Task[int]] = set()

    async def hand_on(self) -> None:
        """Returns when the blocks were fetched, nobody wants them, or `timeout_s` is over. Never raises."""
        routers = self._router.routers()
        if not routers or self._timeout_s <= 0 or self._max_blocks <= 0:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                names = await self._engine.call(lambda engine: engine.hot_block_hashes(self._max_blocks))
                if not names:
                    return
                self._migration_tickets = asyncio.get_running_loop().create_future()
                hot = HotBlocks(
                    instance=self._identity.instance,
                    generation=self._identity.generation,
                    names=names,
                    timeout_s=self._timeout_s,
                )
                self._router.send(routers[0], hot)
                tickets = await self._migration_tickets
                await asyncio.gather(*(self._sharing.ended(ticket) for ticket in tickets))
                if tickets:
                    logger.info("hot blocks are handed on", extra={"blocks": len(names)})
        except TimeoutError:
            logger.warning("hot blocks were not handed on within %g s", self._timeout_s)
        except InstanceError as exc:
            logger.warning("hot blocks were not handed on: %s", exc)

    def on_migration_tickets(self, message: Heirs) -> None:
        """A router's answer."""
        if self._migration_tickets is not None and not self._migration_tickets.done():
            self._migration_tickets.set_result(list(message.tickets))

    def on_migrate_in(self, message: Adopt) -> None:
        """Another instance leaves, and this one takes its blocks."""
        adoption = asyncio.get_running_loop().create_task(self._migrate_in(message), name="adopt")
        self._migrations_in.add(adoption)
        adoption.add_done_callback(self._migrations_in.discard)

    async def close(self) -> None:
        """Gives up what is on its way here; before the transfer node closes."""
        for adoption in self._migrations_in:
            adoption.cancel()
        if self._migrations_in:
            await asyncio.wait(self._migrations_in)

    async def _migrate_in(self, message: Adopt) -> int:
        num_blocks = await self._puller.adopt(message.ticket, message.names, is_awaited=True)
        logger.info("blocks of an instance that leaves", extra={"source": message.ticket.source, "blocks": num_blocks})
        return num_blocks
