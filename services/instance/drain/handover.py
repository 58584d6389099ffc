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
from baton_serve.services.instance.kv_sharing.serving import Sharing
from baton_serve.services.instance.ports import RouterPort
from baton_serve.services.instance.request_server import Identity

logger = logging.getLogger(__name__)


class Handover:
    def __init__(
        self,
        identity: Identity,
        *,
        engine: EngineCalls,
        router: RouterPort,
        sharing: Sharing,
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
        self._heirs: asyncio.Future[list[TicketId]] | None = None
        self._adoptions: set[asyncio.Task[int]] = set()

    async def hand_on(self) -> None:
        """Returns when the blocks were fetched, nobody wants them, or `timeout_s` is over. Never raises."""
        routers = self._router.routers()
        if not routers or self._timeout_s <= 0 or self._max_blocks <= 0:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                names = await self._engine.call(lambda engine: engine.hot_names(self._max_blocks))
                if not names:
                    return
                self._heirs = asyncio.get_running_loop().create_future()
                hot = HotBlocks(
                    instance=self._identity.instance,
                    generation=self._identity.generation,
                    names=names,
                    timeout_s=self._timeout_s,
                )
                self._router.send(routers[0], hot)
                tickets = await self._heirs
                await asyncio.gather(*(self._sharing.ended(ticket) for ticket in tickets))
                if tickets:
                    logger.info("hot blocks are handed on", extra={"blocks": len(names)})
        except TimeoutError:
            logger.warning("hot blocks were not handed on within %g s", self._timeout_s)
        except InstanceError as exc:
            logger.warning("hot blocks were not handed on: %s", exc)

    def on_heirs(self, message: Heirs) -> None:
        """A router's answer."""
        if self._heirs is not None and not self._heirs.done():
            self._heirs.set_result(list(message.tickets))

    def on_adopt(self, message: Adopt) -> None:
        """Another instance leaves, and this one takes its blocks."""
        adoption = asyncio.get_running_loop().create_task(self._adopt(message), name="adopt")
        self._adoptions.add(adoption)
        adoption.add_done_callback(self._adoptions.discard)

    async def close(self) -> None:
        """Gives up what is on its way here; before the transfer node closes."""
        for adoption in self._adoptions:
            adoption.cancel()
        if self._adoptions:
            await asyncio.wait(self._adoptions)

    async def _adopt(self, message: Adopt) -> int:
        num_blocks = await self._puller.adopt(message.ticket, message.names, is_awaited=True)
        logger.info("blocks of an instance that leaves", extra={"source": message.ticket.source, "blocks": num_blocks})
        return num_blocks
