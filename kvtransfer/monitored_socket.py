"""Runs the ZeroMQ sockets of transfers on the event loop: options, encryption (CURVE), and the end of connections.

A connection is used once. ZeroMQ must not reconnect it, because a silent reconnect would hide lost messages.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from baton_serve.kvtransfer.control_messages import MAX_CONTROL_BYTES
from baton_serve.kvtransfer.settings import TransferSettings

logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 32
"""Messages handled before other tasks of the event loop may run."""
CONNECTION_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Monitor events after which a connecting socket cannot be used any more."""

LINGER_MS = 100
"""Milliseconds that a closing node waits for its last messages to leave."""

CURVE_BYTES = 1024
"""Upper bound of the bytes that CURVE encryption adds to a frame."""

Parts = Sequence[bytes | memoryview]


def configure(socket: "zmq.Socket[bytes]", settings: TransferSettings) -> None:
    """Set the options of a new ZeroMQ socket: unbounded queues, a largest size of frames, heartbeats, and no
    reconnection.

    The queues need no bound, because the consumer's credits limit the bytes in flight. ZeroMQ's I/O thread answers
    heartbeats itself, so a busy event loop does not look dead.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    # A socket that reconnects would drop messages without an error; `Connections` makes a new one instead.
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    # ZeroMQ checks the length before it allocates a frame, so a peer cannot exhaust the memory.
    longest = max(MAX_CONTROL_BYTES, settings.frame_bytes, settings.inline_bytes)
    socket.setsockopt(zmq.MAXMSGSIZE, longest + CURVE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(settings.heartbeat_interval_s * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(settings.heartbeat_timeout_s * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TTL, int(settings.heartbeat_timeout_s * 1000))


def encrypt(socket: "zmq.Socket[bytes]", settings: TransferSettings, *, listens: bool) -> None:
    """Enable ZeroMQ's CURVE encryption on `socket` if the settings have keys, so that only a peer with the same keys
    can connect. `listens` says whether the socket binds or connects. Call it before the socket does either.
    """
    if not settings.curve_secret_key:
        return
    socket.setsockopt(zmq.CURVE_SECRETKEY, settings.curve_secret_key)
    # All nodes share one key pair, so the client's own key and the server's key are the same.
    if listens:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    else:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, settings.curve_public_key)
        socket.setsockopt(zmq.CURVE_SERVERKEY, settings.curve_public_key)


class MonitoredSocket:
    """Owns a ZeroMQ socket and its monitor, which reports the end of connections. It passes the frames of each message
    to `on_message`, and the value of each monitored event to `on_down`.

    If only EVENT_DISCONNECTED is monitored, the value of an event is the file descriptor of the ended connection. Use
    it only on the event loop.
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
        # The monitor's descriptor signals an event only after a first read has found the monitor empty.
        self._loop.call_soon(self.drain_monitor)

    def send(self, parts: Parts, *, copy: bool = True) -> zmq.MessageTracker | None:
        """Send the frames `parts` as one message without blocking. With `copy=False`, ZeroMQ reads their memory until
        the returned tracker is done; with a copy, return None.

        Raises `zmq.ZMQError` if the peer is gone (EHOSTUNREACH on a ROUTER socket, EAGAIN on a DEALER).
        """
        tracker: Any = self._socket.send_multipart(parts, zmq.DONTWAIT, copy=copy, track=not copy)
        self._schedule()
        return tracker  # type: ignore[no-any-return]

    def drain_monitor(self) -> None:
        """Call `on_down` for each connection that has ended. `on_down` must first call `drain`, which handles messages
        that arrived before the connection ended.
        """
        while not self._is_closed and _is_readable(self._monitor):
            # The value is the file descriptor of a connection, or an error number, depending on the event.
            event = recv_monitor_message(self._monitor, zmq.DONTWAIT)
            self._on_down(event["value"])

    def drain(self, limit: int = sys.maxsize) -> bool:
        """Pass up to `limit` messages that have arrived to `on_message`. Return True if none is left."""
        for _ in range(limit):
            if self._is_closed or not _is_readable(self._socket):
                return True
            self._on_message(self._socket.recv_multipart(zmq.DONTWAIT, copy=False))
        return False

    def close(self, *, linger_ms: int = 0) -> None:
        """Close the socket and its monitor. Messages already queued may still be sent for `linger_ms` milliseconds. A
        second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_reader(self._monitor_fd)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)

    def _schedule(self) -> None:
        """Read the socket again on the next turn of the event loop. ZeroMQ's file descriptor signals only changes, and
        a send may consume such a signal.
        """
        if not self._is_scheduled and not self._is_closed:
            # Both file descriptors and `send` can ask for another look; one callback per turn is enough.
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
