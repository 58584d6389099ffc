"""Connections of this node's consumer to producers, one per address. Opened once for all who wait."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from functools import partial

import zmq

from baton_serve.contracts.identity import Generation
from baton_serve.kvtransfer.consumer.link import ConsumerLink
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.errors import PeerLost, Refused, TransportUnavailable
from baton_serve.kvtransfer.frames import ToConsumer
from baton_serve.kvtransfer.ladder import Rung
from baton_serve.kvtransfer.probing.consumer import Prober
from baton_serve.kvtransfer.sockets import LINGER_MS

logger = logging.getLogger(__name__)

RETRY_S = 0.05


class Connections:
    def __init__(
        self,
        context: NodeContext,
        *,
        on_message: Callable[[ConsumerLink, ToConsumer, list[zmq.Frame]], None],
        on_lost: Callable[[ConsumerLink, str, bool], None],
        on_broken: Callable[[ConsumerLink, str, str], None],
    ) -> None:
        self._context = context
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_broken = on_broken
        self._links: dict[str, ConsumerLink] = {}
        self._opening: dict[str, asyncio.Task[ConsumerLink]] = {}
        self._outgrown: list[ConsumerLink] = []
        """Replaced by faster ones; fetches that began on them end there."""
        self._prober = Prober(context, self.promote)

    def __iter__(self) -> Iterator[ConsumerLink]:
        return iter([*self._links.values(), *self._outgrown])

    def current(self) -> list[ConsumerLink]:
        """One for each peer: where new fetches go."""
        return list(self._links.values())

    def tick(self, now: float, in_use: Collection[ConsumerLink]) -> None:
        for link in [link for link in self._outgrown if link not in in_use]:
            self._outgrown.remove(link)
            link.lose("outgrown", linger_ms=LINGER_MS)
        self._prober.tick(now, self.current())

    def ready(self, address: str, generation: Generation) -> ConsumerLink | None:
        """A connection that can carry a fetch right now."""
        link = self._links.get(address)
        usable = link is not None and link.is_ready() and link.peer is not None and link.peer[1] == generation
        return link if usable else None

    async def get(self, address: str, generation: Generation, timeout_s: float) -> ConsumerLink:
        """Raises `PeerLost`, `Refused` or `TransportUnavailable`."""
        link = self._links.get(address)
        if link is not None and link.is_up and link.peer is not None and link.peer[1] != generation:
            link.lose("another generation is expected there")
            link = None
        if link is None or not link.is_up or link.peer is None:  # none, lost, or still being opened for another fetch
            link = await self.open(address, timeout_s)
        if link.peer is None or link.peer[1] != generation:
            raise PeerLost(f"another generation answers at {address}")
        await link.attach()
        return link

    async def open(self, address: str, timeout_s: float) -> ConsumerLink:
        """The connection to `address`, whatever generation is there."""
        link = self._links.get(address)
        if link is not None and link.is_ready():
            return link
        task = self._opening.get(address)
        if task is None:
            task = self._context.loop.create_task(self._open(address, timeout_s))
            self._opening[address] = task
            task.add_done_callback(partial(self._opened, address))
        return await asyncio.shield(task)

    async def warm(self, address: str) -> None:
        """Try until the peer is there or `connect_timeout_s` is over."""
        timeout_s = self._context.settings.connect_timeout_s
        deadline = self._context.loop.time() + timeout_s
        while True:
            try:
                await self.open(address, timeout_s)
                return
            except PeerLost:
                if self._context.loop.time() >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)

    async def promote(self, old: ConsumerLink, rung: Rung) -> bool:
        """A second connection, by a better transport; it takes over once it stands. False: it never did."""
        link = self._new_link(old.address, rung)
        try:
            await link.open(self._context.settings.connect_timeout_s)
            if link.peer != old.peer:
                raise PeerLost(f"another generation answers at {old.address}")
        except (PeerLost, Refused, TransportUnavailable) as exc:
            logger.warning("peer=%s stays where it is, %s cannot be had: %s", old.name, rung, exc)
            await link.close()
            return False
        except asyncio.CancelledError:
            await link.close()
            raise
        replaced = self._links.get(old.address)
        self._links[old.address] = link
        if replaced is not None:
            self._outgrown.append(replaced)
        return True

    async def close(self) -> None:
        await self._prober.close()
        for task in list(self._opening.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, PeerLost, Refused, TransportUnavailable):
                await task
        for link in self:
            await link.close()

    async def _open(self, address: str, timeout_s: float) -> ConsumerLink:
        old = self._links.pop(address, None)
        if old is not None:
            await old.close()
        link = self._new_link(address)
        self._links[address] = link
        await link.open(timeout_s)
        return link

    def _new_link(self, address: str, only: Rung | None = None) -> ConsumerLink:
        return ConsumerLink(
            self._context,
            address,
            on_message=self._on_message,
            on_lost=self._lost,
            on_broken=self._on_broken,
            only=only,
        )

    def _opened(self, address: str, task: "asyncio.Task[ConsumerLink]") -> None:
        self._opening.pop(address, None)
        if not task.cancelled():
            task.exception()  # all who waited may have given up: then nobody else looks at it

    def _lost(self, link: ConsumerLink, reason: str, dead: bool) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]
        if link in self._outgrown:
            self._outgrown.remove(link)
        self._on_lost(link, reason, dead)
