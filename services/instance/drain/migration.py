"""Hands the most used KV blocks of a draining instance to another one of its pool, within limits of time and bytes.

It sends the hashes of these blocks to a router, the router chooses the target, and the target fetches the blocks. Both
sides are implemented here. Time and bytes are limited, and a failure never delays the shutdown beyond that limit.
"""

import asyncio
import logging

import msgspec

from baton_serve.contracts.identity import TicketId
from baton_serve.contracts.messages import HotBlocks, MigrateIn, MigrationTickets
from baton_serve.services.instance.engine_thread import EngineCalls
from baton_serve.services.instance.errors import InstanceError
from baton_serve.services.instance.interfaces import RouterPort
from baton_serve.services.instance.kv_sharing.block_serving import KVSharing
from baton_serve.services.instance.kv_sharing.pulling import Puller
from baton_serve.services.instance.request_server import Identity

logger = logging.getLogger(__name__)


class DrainMigration:
    """Moves the most used KV blocks of a draining instance to another one: it offers those of this instance, and
    fetches those of others. Use it only on the event loop.

    `timeout_s` (seconds) and `max_blocks` limit what this instance hands to others; 0 disables that.
    """

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

    async def migrate_out(self) -> None:
        """Offer the most used blocks of this draining instance to another instance.

        Return when they have been fetched, if no router or instance takes them, or after `timeout_s`. Never raises.
        """
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
                # Any one router can choose the target: all have the same view of the cluster, and asking one avoids
                # that two targets fetch the same blocks.
                self._router.send(routers[0], hot)
                tickets = await self._migration_tickets
                await asyncio.gather(*(self._sharing.ended(ticket) for ticket in tickets))
                if tickets:
                    logger.info("handed the most used KV blocks to another instance", extra={"blocks": len(names)})
        except TimeoutError:
            logger.warning(
                "no instance fetched the most used KV blocks within %g s (--drain-handover-s)", self._timeout_s
            )
        except InstanceError as exc:
            logger.warning("cannot hand the most used KV blocks to another instance: %s", exc)

    def on_migration_tickets(self, message: MigrationTickets) -> None:
        """Handle a router's answer to the offer of this instance's most used blocks: the tickets with which other
        instances will fetch the blocks; empty if the router found no instance.
        """
        # A late or repeated answer of a router finds no open question.
        if self._migration_tickets is not None and not self._migration_tickets.done():
            self._migration_tickets.set_result(list(message.tickets))

    def on_migrate_in(self, message: MigrateIn, *, is_draining: bool = False) -> None:
        """Start to fetch the most used blocks of another instance, which is draining and has named them in `message`.
        If `is_draining`, this instance drains too, and fetches nothing.
        """
        if is_draining:
            # An empty fetch ends the wait of the source, which would otherwise last for its --drain-handover-s.
            message = msgspec.structs.replace(message, names=[])
        migration = asyncio.get_running_loop().create_task(self._migrate_in(message), name="migrate in")
        self._migrations_in.add(migration)
        # asyncio keeps only weak references to tasks: the set keeps them alive.
        migration.add_done_callback(self._migrations_in.discard)

    async def close(self) -> None:
        """Cancel all running fetches of other instances' blocks and wait for their end. Call it before the transfer
        node is closed.
        """
        for migration in self._migrations_in:
            migration.cancel()
        if self._migrations_in:
            await asyncio.wait(self._migrations_in)

    async def _migrate_in(self, message: MigrateIn) -> int:
        num_blocks = await self._puller.fetch_blocks(message.ticket, message.names, is_awaited=True)
        logger.info(
            "fetched KV blocks of a draining instance", extra={"source": message.ticket.source, "blocks": num_blocks}
        )
        return num_blocks
