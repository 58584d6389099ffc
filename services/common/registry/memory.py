"""The registry inside the router, for a cluster on one machine: a ZeroMQ ROUTER that takes `Register` and `Leave`.

It is lost with its router; instances fill the next router's by renewing.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import reduce
from operator import or_

import zmq
from zmq.utils.monitor import parse_monitor_message

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.contracts.messages import Leave, Register, Registered, ToRegistry
from baton_serve.contracts.wire import Decoder, WireError, encode
from baton_serve.services.common.callbacks import call_each
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.errors import PeerUnreachable, RegistryUnavailable, Superseded
from baton_serve.services.common.limited_log import LimitedLog
from baton_serve.services.common.registry.table import RecordTable
from baton_serve.services.common.zmq.loop_socket import Frames, ZmqLoopSocket, bind, connect, new_socket

logger = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 2.0
_EXPIRY_CHECK_S = 0.2
_CONNECT_CHECK_S = 0.01
_QUEUE_LENGTH = 10_000
_REASONS = {
    zmq.Event.ACCEPT_FAILED: "a process of another user",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it broke off the handshake",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it has not this cluster's key",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it has not this cluster's key",
}
"""What ZeroMQ reports of connections that come to nothing, and what that means here."""


class MemoryRegistryView:
    """Hosts the registry. Bind to port 0 and `url` is, after `start`, what instances are given. `on_message` hears
    every message, once the view knows what it says."""

    def __init__(
        self,
        address: str,
        *,
        key: ClusterKey | None = None,
        on_message: Callable[[ToRegistry], None] = lambda message: None,
    ) -> None:
        self._address = address
        self._on_message = on_message
        self._key = key
        self._table = RecordTable()
        self._log = LimitedLog(logger)
        self._decoder = Decoder[ToRegistry](ToRegistry)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: ZmqLoopSocket | None = None
        self._raw: zmq.Socket[bytes] | None = None
        self._monitor: ZmqLoopSocket | None = None
        self._expiry: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        kind, _, where = self._address.partition("://")
        return "memory://" + (where if kind == "tcp" else "/" + where.removeprefix("/"))

    async def start(self, on_change: Callable[[], None]) -> None:
        """Raises `zmq.ZMQError` when the address is in use."""
        self._on_change = on_change
        socket = new_socket(self._context, zmq.ROUTER, queue_length=_QUEUE_LENGTH)
        self._address = bind(socket, self._address, self._key)
        self._monitor = ZmqLoopSocket(socket.get_monitor_socket(reduce(or_, _REASONS)), self._on_refusal)
        self._monitor.start()
        self._raw, self._socket = socket, ZmqLoopSocket(socket, self._receive)
        self._socket.start()
        self._expiry = asyncio.create_task(self._expire(), name="registry-expiry")

    def records(self) -> list[InstanceRecord]:
        return self._table.records()

    def is_connected(self) -> bool:
        return self._socket is not None

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if self._raw is not None and self._monitor is not None:
            self._raw.disable_monitor()
            self._monitor.close()
            self._raw = self._monitor = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        await asyncio.to_thread(self._context.term)

    def _on_refusal(self, frames: Frames) -> None:
        reason = _REASONS.get(zmq.Event(parse_monitor_message(frames)["event"]))
        if reason is not None:
            self._log.warning("a connection to the registry is refused: %s", reason)

    def _receive(self, frames: Frames) -> None:
        try:
            message = self._decoder.decode(frames[-1])
        except WireError as exc:
            self._log.warning("registration refused: %s", exc)
            return
        match message:
            case Register(record=record, ttl_s=ttl_s):
                now = asyncio.get_running_loop().time()
                generation, is_news = self._table.register(record, ttl_s, now)
            case Leave(instance=instance, generation=generation):
                is_news = self._table.leave(instance, generation)
        try:
            assert self._socket is not None
            self._socket.send([frames[0], encode(Registered(generation))])
        except PeerUnreachable as exc:
            logger.info("a registration could not be answered: %s", exc)
        self._on_message(message)
        if is_news:
            call_each("a change of the registry", [self._on_change])

    async def _expire(self) -> None:
        while self._socket is not None:
            await asyncio.sleep(_EXPIRY_CHECK_S)
            # Renewals that arrived while this process was busy come first.
            self._socket.drain()
            if self._table.expire(asyncio.get_running_loop().time()):
                call_each("a change of the registry", [self._on_change])


class MemoryRegistryClient:
    """Speaks to the registry in a router. One call at a time."""

    def __init__(
        self, address: str, *, reply_timeout_s: float = REPLY_TIMEOUT_S, key: ClusterKey | None = None
    ) -> None:
        self._address = address
        self._key = key
        self._reply_timeout_s = reply_timeout_s
        self._decoder = Decoder[Registered](Registered)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: ZmqLoopSocket | None = None
        self._reply: asyncio.Future[Generation] | None = None
        self._turn = asyncio.Lock()

    async def register(self, record: InstanceRecord, ttl_s: float) -> None:
        generation = await self._ask(Register(record, ttl_s))
        if generation != record.generation:
            raise Superseded(f"{record.instance}: another process has registered under this name")

    async def leave(self, instance: InstanceId, generation: Generation) -> None:
        await self._ask(Leave(instance, generation))

    async def close(self) -> None:
        self._disconnect()
        await asyncio.to_thread(self._context.term)

    async def _ask(self, message: Register | Leave) -> Generation:
        async with self._turn:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            self._reply = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._reply_timeout_s):
                    await self._send(message)
                    return await self._reply
            except (TimeoutError, PeerUnreachable) as exc:
                # With the socket goes the message: a registry that comes back must not find old ones.
                self._disconnect()
                key = "no cluster key" if self._key is None else "the same cluster key"
                reason = f"no answer from the registry at {self._address} (is a router there, with {key}?)"
                raise RegistryUnavailable(reason) from exc

    async def _send(self, message: Register | Leave) -> None:
        """A registration waits for the connection; leaving does not, for who is gone has forgotten us."""
        while True:
            assert self._socket is not None
            try:
                return self._socket.send([encode(message)])
            except PeerUnreachable:
                if isinstance(message, Leave):
                    raise
            await asyncio.sleep(_CONNECT_CHECK_S)

    def _connect(self) -> None:
        socket = new_socket(self._context, zmq.DEALER, queue_length=_QUEUE_LENGTH)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        connect(socket, self._address, self._key)
        self._socket = ZmqLoopSocket(socket, self._receive)
        self._socket.start()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _receive(self, frames: Frames) -> None:
        try:
            answer = self._decoder.decode(frames[-1])
        except WireError as exc:
            logger.warning("answer of the registry refused: %s", exc)
            return
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(answer.generation)
