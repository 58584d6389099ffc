"""The registry inside a router (`memory://`): a ZeroMQ socket that receives `Register` and `Leave`.

Its records are lost when the router ends. Instances fill the registry of the next router with their renewals.
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
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.errors import PeerUnreachable, RegistryUnavailable, Superseded
from baton_serve.services.common.logs import LimitedLog
from baton_serve.services.common.process_lifecycle import call_each
from baton_serve.services.common.registry.record_table import RecordTable
from baton_serve.services.common.zmq.loop_socket import Frames, ZmqLoopSocket, bind, connect, new_socket

logger = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 2.0
"""Longest time that an instance waits for the registry's answer."""
_EXPIRY_CHECK_S = 0.2
"""Time between two searches for expired records."""
_CONNECT_CHECK_S = 0.01
"""Time between two attempts to send while the connection is being made."""
_QUEUE_LENGTH = 10_000
"""Maximum number of queued messages per connection."""
_REASONS = {
    zmq.Event.ACCEPT_FAILED: "a process of another user",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it broke off the handshake",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it does not have this cluster's key (--cluster-key-file)",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it does not have this cluster's key (--cluster-key-file)",
}
"""ZeroMQ's events for connections that fail, and what they mean here."""


class MemoryRegistryView:
    """The registry of instances in a router's memory, on its event loop. Implements `RegistryView`.

    With port 0 in `address` a free port is taken; after `start`, `url` is the URL for instances. `on_message` is called
    with each valid message of an instance after it was applied.
    """

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
        """The `memory://` URL at which instances reach this registry; valid after `start`."""
        kind, _, where = self._address.partition("://")
        return "memory://" + (where if kind == "tcp" else "/" + where.removeprefix("/"))

    async def start(self, on_change: Callable[[], None]) -> None:
        """Listen for instances. `on_change` is called as `RegistryView.start` describes. Raises `zmq.ZMQError` if the
        address is in use.
        """
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
        # `term` blocks until queued messages have left, so it must not run on the event loop.
        await asyncio.to_thread(self._context.term)

    def _on_refusal(self, frames: Frames) -> None:
        reason = _REASONS.get(zmq.Event(parse_monitor_message(frames)["event"]))
        if reason is not None:
            self._log.warning("a connection to the registry is refused: %s", reason)

    def _receive(self, frames: Frames) -> None:
        try:
            message = self._decoder.decode(frames[-1])
        except WireError as exc:
            self._log.warning("a message to the registry is ignored, it cannot be decoded: %s", exc)
            return
        match message:
            case Register(record=record, ttl_s=ttl_s):
                now = asyncio.get_running_loop().time()
                generation, is_change = self._table.register(record, ttl_s, now)
            case Leave(instance=instance, generation=generation):
                is_change = self._table.leave(instance, generation)
        try:
            assert self._socket is not None
            self._socket.send([frames[0], encode(Registered(generation))])
        except PeerUnreachable as exc:
            # Harmless: the instance sends its next renewal on a new connection.
            logger.info("cannot answer a registration: %s", exc)
        self._on_message(message)
        if is_change:
            call_each("a change of the registry", [self._on_change])

    async def _expire(self) -> None:
        while self._socket is not None:
            await asyncio.sleep(_EXPIRY_CHECK_S)
            # Read renewals that arrived while this process was busy, or they would come too late for their records.
            self._socket.drain()
            if self._table.expire(asyncio.get_running_loop().time()):
                call_each("a change of the registry", [self._on_change])


class MemoryRegistryClient:
    """Registers one instance with the registry that a router keeps in its memory. Implements `RegistryClient`.

    Calls run one after the other, since an answer of the registry does not say to which message it belongs.
    """

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
        self._call_lock = asyncio.Lock()

    async def register(self, record: InstanceRecord, ttl_s: float) -> None:
        generation = await self._call(Register(record, ttl_s))
        # The answer is the generation that is valid now.
        if generation != record.generation:
            raise Superseded(f"{record.instance}: another process has registered under this name")

    async def leave(self, instance: InstanceId, generation: Generation) -> None:
        await self._call(Leave(instance, generation))

    async def close(self) -> None:
        self._disconnect()
        await asyncio.to_thread(self._context.term)

    async def _call(self, message: Register | Leave) -> Generation:
        """Send a message to the registry and return the generation in its answer. Raises `RegistryUnavailable` if no
        answer comes in time.
        """
        async with self._call_lock:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            self._reply = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._reply_timeout_s):
                    await self._send(message)
                    return await self._reply
            except (TimeoutError, PeerUnreachable) as exc:
                # Closing the socket also drops the queued message: a registry that comes back must not receive an old
                # record, and its answer must not be taken for that of the next message.
                self._disconnect()
                key = "without a cluster key" if self._key is None else "with the same --cluster-key-file"
                reason = f"no answer from the registry at {self._address} (does a router run there, {key}?)"
                raise RegistryUnavailable(reason) from exc

    async def _send(self, message: Register | Leave) -> None:
        """Send a message to the registry. If the registry is not connected, wait with `Register` until it is; with
        `Leave` raise `PeerUnreachable`, because a registry that cannot be reached loses the record anyway when it
        expires.
        """
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
        # Queue messages only for a connection that exists, so that `send` fails as long as no registry is there.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)  # In milliseconds; the default is 100.
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
            logger.warning("an answer of the registry is ignored, it cannot be decoded: %s", exc)
            return
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(answer.generation)
