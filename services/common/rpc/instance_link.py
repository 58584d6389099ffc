"""Connects routers and instances, sends heartbeats, and decides when a silent instance or router is lost.

They carry `contracts.messages`, and call each side back once when it has lost the other. The caller decides what to do
with requests then.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import NewType

from baton_serve.contracts.messages import Heartbeat, LoadReport, ToInstance, ToRouter
from baton_serve.contracts.wire import MAX_FRAME_BYTES, Decoder, WireError, encode
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.errors import PeerUnreachable
from baton_serve.services.common.logs import LimitedLog
from baton_serve.services.common.rpc.connections import MessageClient, MessageServer

logger = logging.getLogger(__name__)

RouterId = NewType("RouterId", bytes)
"""Identifies one connection of one router. A router that reconnects gets a new one."""

HEARTBEAT_S = 1.0
"""Time between two heartbeats of a router."""
ROUTER_TIMEOUT_S = 10.0
"""Time without a message after which an instance reports a router as lost."""
INSTANCE_TIMEOUT_S = 3.0
"""Time without a message after which a router reports an instance as lost."""
_LINGER_MS = 300
"""Time for sending queued messages when a connection is closed."""
_MAX_LOST_ROUTERS = 256
"""Number of lost routers that an instance remembers. A router gives up its connection after its own timeout."""


class InstanceServer:
    """An instance's end of the connections to all routers, on its event loop; it sends and receives message objects. A
    router counts as lost if a message cannot be sent to it or if it was silent for `router_timeout_s` seconds. If a
    lost router is still alive, its messages are ignored, so that it finds this instance lost too. Otherwise it would
    wait for requests that this instance has ended already.
    """

    def __init__(
        self,
        bind_address: str = "tcp://127.0.0.1:0",
        *,
        router_timeout_s: float = ROUTER_TIMEOUT_S,
        key: ClusterKey | None = None,
    ) -> None:
        self.address = bind_address
        self._key = key
        self._router_timeout_s = router_timeout_s
        self._decoder = Decoder[ToInstance](ToInstance)
        self._log = LimitedLog(logger)
        self._last_received: dict[RouterId, float] = {}
        self._lost: dict[RouterId, None] = {}
        """The routers that were lost last, the oldest first."""
        self._server: MessageServer | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(
        self,
        on_message: Callable[[RouterId, ToInstance], None],
        on_router_lost: Callable[[RouterId], None],
    ) -> None:
        """Listen for routers; `address` is then the one at which they connect. `on_message` receives each message with
        the router that sent it, and `on_router_lost` each lost router. Raises `OSError` if the address is in use.
        """
        self._on_message = on_message
        self._on_router_lost = on_router_lost
        self._loop = asyncio.get_running_loop()
        self._server = MessageServer(on_message=self._receive, on_lost=self._lose, key=self._key)
        self.address = await self._server.start(self.address)
        self._watch = asyncio.create_task(self._watch_routers(), name="rpc-watch")

    def routers(self) -> list[RouterId]:
        """Return the ids of the routers that are connected now."""
        return list(self._last_received)

    def send(self, router: RouterId, message: ToRouter) -> None:
        """Send a message to a router, without blocking. Do nothing if the router is lost."""
        if router not in self._last_received or self._server is None:
            return
        try:
            self._server.send(router, encode(message))
        except PeerUnreachable as exc:
            self._lose(router, str(exc))

    async def close(self) -> None:
        """Stop listening and close the connections to all routers. Queued messages may still be sent for `_LINGER_MS`
        milliseconds.
        """
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            server, self._server = self._server, None
            await server.close(_LINGER_MS)

    def _receive(self, peer: bytes, frame: bytes) -> None:
        router = RouterId(peer)
        if router in self._lost:  # See the docstring of the class.
            return
        try:
            message = self._decoder.decode(frame)
        except WireError as exc:
            self._log.warning("a message of router %s is ignored, it cannot be decoded: %s", router.hex(), exc)
            return
        self._last_received[router] = self._loop.time()
        self._on_message(router, message)

    async def _watch_routers(self) -> None:
        while self._server is not None:
            due = self._loop.time() + self._router_timeout_s / 10
            await asyncio.sleep(self._router_timeout_s / 10)
            # Compare with the time at which this check was due and not with the present: if this process was busy in
            # between, heartbeats may have arrived that are not read yet.
            oldest = due - self._router_timeout_s
            for router in [router for router, received_at in self._last_received.items() if received_at < oldest]:
                self._lose(router, f"no heartbeat for {self._router_timeout_s:g} s")

    def _lose(self, peer: bytes, reason: str) -> None:
        router = RouterId(peer)
        if self._last_received.pop(router, None) is not None:
            self._lost[router] = None
            if len(self._lost) > _MAX_LOST_ROUTERS:
                del self._lost[next(iter(self._lost))]
            logger.info("lost the connection to router %s: %s", router.hex(), reason)
            # Called later, because a caller of `send` may be in a loop over this router's requests.
            self._loop.call_soon(self._on_router_lost, router)


class InstanceLink:
    """A router's end of the connection to one generation of an instance, on the router's event loop; it sends and
    receives message objects.

    A link that is lost stays lost. The caller closes it and makes a new one.
    """

    def __init__(
        self,
        address: str,
        *,
        on_message: Callable[[ToRouter], None],
        on_lost: Callable[[str], None],
        heartbeat_s: float = HEARTBEAT_S,
        timeout_s: float = INSTANCE_TIMEOUT_S,
        key: ClusterKey | None = None,
    ) -> None:
        """Connect only in `start`. `on_message` receives each message of the instance. `on_lost` is called once with
        the reason if the connection breaks or no message comes for `timeout_s` seconds. `heartbeat_s` is the time
        between two heartbeats.
        """
        self._address = address
        self._on_message = on_message
        self._on_lost = on_lost
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._key = key
        self._decoder = Decoder[ToRouter](ToRouter)
        self._log = LimitedLog(logger)
        self._client: MessageClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self._last_received = 0.0
        self.is_ready = False
        """True from the instance's first `LoadReport` until the instance is lost."""
        self.is_lost = False

    async def start(self) -> None:
        """Begin to connect to the instance and to send heartbeats. Return before the connection exists; `on_lost`
        reports a failure.
        """
        self._client = MessageClient(self._address, on_message=self._receive, on_lost=self._lose, key=self._key)
        self._client.start()
        self._loop = asyncio.get_running_loop()
        self._last_received = self._loop.time()
        self._watch = asyncio.create_task(self._send_heartbeat(), name="rpc-heartbeat")

    def prepare(self, message: ToInstance) -> Callable[[], None]:
        """Encode `message` and return a function that sends it to the instance.

        Raises `WireError` if the message is too long. The returned function never raises: a caller can first encode the
        messages for several instances and then send either all or none.
        """
        frame = encode(message)
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"a message of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        return partial(self._send, frame)

    def send(self, message: ToInstance) -> None:
        """Send a message to the instance, without blocking. Raises `WireError` if it is too long.

        Do nothing if the instance is lost: `on_lost` was called, or will be called soon.
        """
        self.prepare(message)()

    def _send(self, frame: bytes) -> None:
        if self._client is None or self.is_lost:
            return
        try:
            self._client.send(frame)
        except PeerUnreachable as exc:
            self._lose(str(exc))

    async def close(self) -> None:
        """Close the connection to the instance without calling `on_lost`. Queued messages may still be sent for
        `_LINGER_MS` milliseconds.
        """
        self.is_lost = True
        self.is_ready = False
        if self._watch is not None:
            self._watch.cancel()
        if self._client is not None:
            self._client.close(_LINGER_MS)
            self._client = None

    def _receive(self, frame: bytes) -> None:
        if self.is_lost:
            return
        try:
            message = self._decoder.decode(frame)
        except WireError as exc:
            self._log.warning(
                "a message of the instance at %s is ignored, it cannot be decoded: %s", self._address, exc
            )
            return
        self._last_received = self._loop.time()
        # The instance answers each heartbeat with a report, so the first one proves that both directions work.
        if isinstance(message, LoadReport):
            self.is_ready = True
        self._on_message(message)

    async def _send_heartbeat(self) -> None:
        loop = self._loop
        while not self.is_lost and self._client is not None:
            self.send(Heartbeat())
            due = loop.time() + self._heartbeat_s
            await asyncio.sleep(self._heartbeat_s)
            # If this process has stalled, messages of the instance are still unread. Do not count the stall as silence,
            # or a busy router would report healthy instances as lost.
            self._last_received += max(0.0, loop.time() - due)
            if loop.time() - self._last_received > self._timeout_s:
                self._lose(f"no message for {self._timeout_s:g} s")

    def _lose(self, reason: str) -> None:
        if not self.is_lost:
            self.is_lost = True
            self.is_ready = False
            self._loop.call_soon(self._on_lost, reason)
