"""Opens, replaces and closes a node's connections to producers, one for each address."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from functools import partial

import zmq

from baton_serve.contracts.identity import Generation
from baton_serve.kvtransfer.consumer.link import ConsumerLink
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.control_messages import ToConsumer
from baton_serve.kvtransfer.errors import PeerLost, Refused, TransportUnavailable
from baton_serve.kvtransfer.ladder import Rung
from baton_serve.kvtransfer.monitored_socket import LINGER_MS
from baton_serve.kvtransfer.probing.consumer import Prober

logger = logging.getLogger(__name__)

RETRY_S = 0.05
"""Seconds between two attempts of `warm`."""


class Connections:
    """Opens, replaces and closes the connections of one node to producers. Use it only on the event loop.

    Fetches that want the same address while it is being opened wait for one task. `on_message` receives each message
    with the frames behind it, `on_lost` each lost connection, and `on_broken` each transport that broke while its
    connection still works.
    """

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
        """Connections that were replaced by faster ones. Fetches that began on them end there."""
        self._prober = Prober(context, self.promote)

    def __iter__(self) -> Iterator[ConsumerLink]:
        return iter([*self._links.values(), *self._outgrown])

    def current(self) -> list[ConsumerLink]:
        """Return the connections that new fetches would use, one for each connected producer."""
        return list(self._links.values())

    def tick(self, now: float, in_use: Collection[ConsumerLink]) -> None:
        """Close replaced connections that are not `in_use` by a fetch any more, and start probes that are due."""
        for link in [link for link in self._outgrown if link not in in_use]:
            self._outgrown.remove(link)
            link.lose("outgrown", linger_ms=LINGER_MS)
        self._prober.tick(now, self.current())

    def ready(self, address: str, generation: Generation) -> ConsumerLink | None:
        """Return the connection to this generation of the producer at `address` if a transport is attached to it, so
        that a fetch can start without waiting; otherwise None.
        """
        link = self._links.get(address)
        usable = link is not None and link.is_ready() and link.peer is not None and link.peer[1] == generation
        return link if usable else None

    async def get(self, address: str, generation: Generation, timeout_s: float) -> ConsumerLink:
        """Return a connection to this `generation` of the producer at `address`, with a transport; open one if
        necessary, for at most `timeout_s`. Raises `PeerLost` if it does not answer or another generation does,
        `Refused` if the producer rejects this node, and `TransportUnavailable` if no transport works.
        """
        link = self._links.get(address)
        if link is not None and link.is_up and link.peer is not None and link.peer[1] != generation:
            # The process was restarted. Its new generation knows nothing of the old connection.
            link.lose("another generation is expected there")
            link = None
        # There is none, it was lost, or another fetch is still opening it: `open` waits for that one task.
        if link is None or not link.is_up or link.peer is None:
            link = await self.open(address, timeout_s)
        if link.peer is None or link.peer[1] != generation:
            raise PeerLost(f"another generation answers at {address}")
        await link.attach()
        return link

    async def open(self, address: str, timeout_s: float) -> ConsumerLink:
        """Return the connection to the producer at `address`, whatever generation answers there; open it if necessary.
        Raises the same errors as `get`.
        """
        link = self._links.get(address)
        if link is not None and link.is_ready():
            return link
        task = self._opening.get(address)
        if task is None:
            task = self._context.loop.create_task(self._open(address, timeout_s))
            self._opening[address] = task
            task.add_done_callback(partial(self._opened, address))
        # Other fetches wait for the same task: cancelling this one must not cancel it.
        return await asyncio.shield(task)

    async def warm(self, address: str) -> None:
        """Connect to the producer at `address` before the first fetch. If the producer is not reachable yet, retry
        until `connect_timeout_s` is over, then raise `PeerLost`. Raises `Refused` if the producer rejects this node,
        and `TransportUnavailable` if no transport works.
        """
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
        """Open a second connection to the producer of `old`, by the better transport and dialect `rung`. New fetches
        then use it instead of `old`; running fetches end on `old`. Return False, and keep `old`, if it cannot be
        opened.
        """
        link = self._new_link(old.address, rung)
        try:
            await link.open(self._context.settings.connect_timeout_s)
            # The producer may have been restarted since the probe: its transports must be proved again.
            if link.peer != old.peer:
                raise PeerLost(f"another generation answers at {old.address}")
        except (PeerLost, Refused, TransportUnavailable) as exc:
            logger.warning("peer=%s keeps its transport, cannot connect by %s: %s", old.name, rung, exc)
            await link.close()
            return False
        except asyncio.CancelledError:
            await link.close()
            raise
        replaced = self._links.get(old.address)
        self._links[old.address] = link
        if replaced is not None:
            # Fetches that run on the old connection end there: moving them would repeat the blocks that are in flight.
            self._outgrown.append(replaced)
        return True

    async def close(self) -> None:
        """Stop probes and attempts to connect, and close all connections."""
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
            # If all waiting fetches have given up, nothing else reads the exception, and asyncio would log it.
            task.exception()

    def _lost(self, link: ConsumerLink, reason: str, dead: bool) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]
        if link in self._outgrown:
            self._outgrown.remove(link)
        self._on_lost(link, reason, dead)
