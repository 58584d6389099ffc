"""Messages between routers and instances: one ZeroMQ ROUTER per instance, one DEALER per (router, instance).

Carries `contracts.messages` and tells each side, once, when the other is gone. What a request is, or what is to be done
about a lost peer, is for the caller to know.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import NewType, Protocol

import zmq

from baton_serve.contracts.messages import Heartbeat, LoadReport, ToInstance, ToRouter
from baton_serve.contracts.wire import MAX_FRAME_BYTES, Decoder, WireError, encode
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.errors import PeerUnreachable
from baton_serve.services.common.limited_log import LimitedLog
from baton_serve.services.common.zmq.curve_sockets import CurveDealer, CurveRouter
from baton_serve.services.common.zmq.zmtp_sockets import ZmtpDealer, ZmtpRouter

logger = logging.getLogger(__name__)

RouterId = NewType("RouterId", bytes)
"""Names one connection of one router: a router that comes back has a new one."""

HEARTBEAT_S = 1.0
ROUTER_TIMEOUT_S = 10.0
INSTANCE_TIMEOUT_S = 3.0
_LINGER_MS = 300
_MAX_LOST_ROUTERS = 256
"""Remembered, of one instance; each has its own router's timeout to give its connection up."""


class InstanceServer:
    """The instance's end. Reports a router as lost when a message cannot reach it or when it has been silent.

    A lost router that is alive after all gets no answer on this connection, so that it gives it up as well: it must not
    wait for requests that have been given up here.
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
        """The last ones, oldest first."""
        self._router: Router | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(
        self,
        on_message: Callable[[RouterId, ToInstance], None],
        on_router_lost: Callable[[RouterId], None],
    ) -> None:
        """Binds; `address` is then the one to connect to. Raises `OSError` or `zmq.ZMQError` when it is in use."""
        self._on_message = on_message
        self._on_router_lost = on_router_lost
        self._loop = asyncio.get_running_loop()
        if self._key is None or _is_unix_socket(self.address):
            self._router = ZmtpRouter(on_message=self._receive, on_lost=self._lose)
        else:
            self._router = CurveRouter(self._key, on_message=self._receive)
        self.address = await self._router.start(self.address)
        self._watch = asyncio.create_task(self._watch_routers(), name="rpc-watch")

    def routers(self) -> list[RouterId]:
        return list(self._last_received)

    def send(self, router: RouterId, message: ToRouter) -> None:
        """Never blocks. To a router that is lost it does nothing."""
        if router not in self._last_received or self._router is None:
            return
        try:
            self._router.send(router, encode(message))
        except PeerUnreachable as exc:
            self._lose(router, str(exc))

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._router is not None:
            router, self._router = self._router, None
            await router.close(_LINGER_MS)

    def _receive(self, peer: bytes, frame: bytes) -> None:
        router = RouterId(peer)
        if router in self._lost:
            return
        try:
            message = self._decoder.decode(frame)
        except WireError as exc:
            self._log.warning("message of router %s refused: %s", router.hex(), exc)
            return
        self._last_received[router] = self._loop.time()
        self._on_message(router, message)

    async def _watch_routers(self) -> None:
        while self._router is not None:
            due = self._loop.time() + self._router_timeout_s / 10
            await asyncio.sleep(self._router_timeout_s / 10)
            # As of when this should have looked: what came while this process was busy may not have been read yet.
            oldest = due - self._router_timeout_s
            for router in [router for router, heard in self._last_received.items() if heard < oldest]:
                self._lose(router, f"no heartbeat for {self._router_timeout_s:g} s")

    def _lose(self, peer: bytes, reason: str) -> None:
        router = RouterId(peer)
        if self._last_received.pop(router, None) is not None:
            self._lost[router] = None
            if len(self._lost) > _MAX_LOST_ROUTERS:
                del self._lost[next(iter(self._lost))]
            logger.info("router %s is lost: %s", router.hex(), reason)
            # Later, since the caller may be in the middle of a loop over this router's requests.
            self._loop.call_soon(self._on_router_lost, router)


class Router(Protocol):
    """A bound address with a connection for each peer, which it names. Messages have one frame."""

    async def start(self, address: str) -> str: ...
    def send(self, peer: bytes, message: bytes) -> None: ...
    async def close(self, linger_ms: int = 0) -> None: ...


class DealerSocket(Protocol):
    """A connection that messages of one frame go over. Tells once when it is lost; `drain` hands on what has come."""

    def start(self) -> None: ...
    def send(self, message: bytes) -> None: ...
    def drain(self) -> None: ...
    def close(self, linger_ms: int = 0) -> None: ...


class InstanceLink:
    """A router's end of the connection to one generation of an instance.

    Once lost it stays lost: close it and make another.
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
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        """`on_lost` gets the reason, once: the connection broke, or nothing came for `timeout_s`. `context` stays the
        caller's: links that share one share its thread."""
        self._address = address
        self._on_message = on_message
        self._on_lost = on_lost
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._key = key
        self._decoder = Decoder[ToRouter](ToRouter)
        self._log = LimitedLog(logger)
        self._context = context
        self._own_context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._dealer: DealerSocket | None = None
        self._watch: asyncio.Task[None] | None = None
        self._last_received = 0.0
        self.is_ready = False
        """True from the instance's first `LoadReport` until it is lost."""
        self.is_lost = False

    async def start(self) -> None:
        if self._key is None or _is_unix_socket(self._address):
            self._dealer = ZmtpDealer(self._address, on_message=self._receive, on_lost=self._lose)
        else:
            if self._context is None:
                self._context = self._own_context = zmq.Context()
            self._dealer = CurveDealer(
                self._address, self._key, on_message=self._receive, on_lost=self._lose, context=self._context
            )
        self._dealer.start()
        self._loop = asyncio.get_running_loop()
        self._last_received = self._loop.time()
        self._watch = asyncio.create_task(self._send_heartbeat(), name="rpc-heartbeat")

    def prepare(self, message: ToInstance) -> Callable[[], None]:
        """Encode `message` and return what sends it. Raises `WireError`; sending the result never does."""
        frame = encode(message)
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"a message of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        return partial(self._send, frame)

    def send(self, message: ToInstance) -> None:
        """Never blocks. When the instance is lost it does nothing: `on_lost` was called, or is about to be."""
        self.prepare(message)()

    def _send(self, frame: bytes) -> None:
        if self._dealer is None or self.is_lost:
            return
        try:
            self._dealer.send(frame)
        except PeerUnreachable as exc:
            self._lose(str(exc))

    async def close(self) -> None:
        self.is_lost = True
        self.is_ready = False
        if self._watch is not None:
            self._watch.cancel()
        if self._dealer is not None:
            self._dealer.close(_LINGER_MS)
            self._dealer = None
        if self._own_context is not None:
            await asyncio.to_thread(self._own_context.term)

    def _receive(self, frame: bytes) -> None:
        if self.is_lost:
            return
        try:
            message = self._decoder.decode(frame)
        except WireError as exc:
            self._log.warning("message of the instance at %s refused: %s", self._address, exc)
            return
        self._last_received = self._loop.time()
        if isinstance(message, LoadReport):
            self.is_ready = True
        self._on_message(message)

    async def _send_heartbeat(self) -> None:
        loop = self._loop
        while not self.is_lost and self._dealer is not None:
            self.send(Heartbeat())
            due = loop.time() + self._heartbeat_s
            await asyncio.sleep(self._heartbeat_s)
            # A stall of this process is no silence of the instance: read what has come, forgive what was slept over.
            self._last_received += max(0.0, loop.time() - due)
            if self._dealer is not None:
                self._dealer.drain()
            if loop.time() - self._last_received > self._timeout_s:
                self._lose(f"no message for {self._timeout_s:g} s")

    def _lose(self, reason: str) -> None:
        if not self.is_lost:
            self.is_lost = True
            self.is_ready = False
            self._loop.call_soon(self._on_lost, reason)


def _is_unix_socket(address: str) -> bool:
    """Its two ends know each other's user: no key could add to that, and nobody can listen in between."""
    return address.startswith("ipc:")
