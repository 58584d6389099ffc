"""Connections of this node's consumer to producers, one per address. Opened once for all who wait."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial

import zmq

from contracts.identity import Generation
from kvtransfer.consumer_link import ConsumerLink
from kvtransfer.context import NodeContext
from kvtransfer.errors import PeerLost, Refused, TransportUnavailable
from kvtransfer.frames import ToConsumer

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

    def __iter__(self) -> Iterator[ConsumerLink]:
        return iter(list(self._links.values()))

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

    async def close(self) -> None:
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
        link = ConsumerLink(
            self._context, address, on_message=self._on_message, on_lost=self._lost, on_broken=self._on_broken
        )
        self._links[address] = link
        await link.open(timeout_s)
        return link

    def _opened(self, address: str, task: "asyncio.Task[ConsumerLink]") -> None:
        self._opening.pop(address, None)
        if not task.cancelled():
            task.exception()  # all who waited may have given up: then nobody else looks at it

    def _lost(self, link: ConsumerLink, reason: str, dead: bool) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]
        self._on_lost(link, reason, dead)
