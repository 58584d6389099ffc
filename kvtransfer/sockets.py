"""A ZeroMQ socket on the event loop: every message that has arrived is handled in one wake-up, sending never blocks.

A connection is used once: it is never repaired by ZeroMQ, since a silent reconnect would hide lost messages.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from baton_serve.kvtransfer.frames import MAX_CONTROL_BYTES
from baton_serve.kvtransfer.settings import TransferSettings

logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 32
CONNECTION_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Each says that a connecting socket will never be of use again."""

LINGER_MS = 100
"""For the last words of a node that closes."""

CURVE_BYTES = 1024
"""More than encryption adds to a frame."""

Parts = Sequence[bytes | memoryview]


def configure(socket: "zmq.Socket[bytes]", settings: TransferSettings) -> None:
    """Unbounded queues (credits bound them), bounded frames, heartbeats answered by ZeroMQ's own thread, no
    reconnection."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    longest = max(MAX_CONTROL_BYTES, settings.frame_bytes, settings.inline_bytes)
    socket.setsockopt(zmq.MAXMSGSIZE, longest + CURVE_BYTES)  # before a frame is allocated
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(settings.heartbeat_interval_s * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(settings.heartbeat_timeout_s * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TTL, int(settings.heartbeat_timeout_s * 1000))


def encrypt(socket: "zmq.Socket[bytes]", settings: TransferSettings, *, listens: bool) -> None:
    """With keys, only a peer that has them too can connect. Call before the socket binds or connects."""
    if not settings.curve_secret_key:
        return
    socket.setsockopt(zmq.CURVE_SECRETKEY, settings.curve_secret_key)
    if listens:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    else:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, settings.curve_public_key)
        socket.setsockopt(zmq.CURVE_SERVERKEY, settings.curve_public_key)


class MonitoredSocket:
    """`on_message` gets the frames of each message, `on_down` the value of each monitored event.

    With EVENT_DISCONNECTED alone, that is the file descriptor of the connection.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        *,
        on_message: Callable[[list[zmq.Frame]], None],
        on_down: Callable[[int], None],
        events: int = CONNECTION_EVENTS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._on_message = on_message
        self._on_down = on_down
        self._monitor = socket.get_monitor_socket(events)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._fd = int(socket.getsockopt(zmq.FD))
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._is_closed = False
        self._is_scheduled = False
        self._loop.add_reader(self._fd, self._drain)
        self._loop.add_reader(self._monitor_fd, self.drain_monitor)
        self._schedule()
        self._loop.call_soon(self.drain_monitor)  # a descriptor signals only after a first look found nothing

    def send(self, parts: Parts, *, copy: bool = True) -> zmq.MessageTracker | None:
        """With `copy=False` the parts' memory is read until the returned tracker is done.

        Raises zmq.ZMQError when the peer is gone (EHOSTUNREACH on a ROUTER, EAGAIN on a DEALER).
        """
        tracker: Any = self._socket.send_multipart(parts, zmq.DONTWAIT, copy=copy, track=not copy)
        self._schedule()
        return tracker  # type: ignore[no-any-return]

    def drain_monitor(self) -> None:
        """Hear of connections that ended. `on_down` must first handle what they still had to say: `drain`."""
        while not self._is_closed and _is_readable(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.DONTWAIT)
            self._on_down(event["value"])

    def drain(self, limit: int = sys.maxsize) -> bool:
        """Handle messages that are here; True when none is left."""
        for _ in range(limit):
            if self._is_closed or not _is_readable(self._socket):
                return True
            self._on_message(self._socket.recv_multipart(zmq.DONTWAIT, copy=False))
        return False

    def close(self, *, linger_ms: int = 0) -> None:
        """`linger_ms`: how long messages already sent may still leave."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_reader(self._monitor_fd)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)

    def _schedule(self) -> None:
        """ZeroMQ's descriptor signals edges, and sending may swallow one: look again soon."""
        if not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._again)

    def _again(self) -> None:
        self._is_scheduled = False
        self._drain()

    def _drain(self) -> None:
        if not self.drain(MESSAGES_PER_TURN):
            self._schedule()


def _is_readable(socket: "zmq.Socket[bytes]") -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
