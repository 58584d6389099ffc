"""A ZeroMQ socket inside asyncio: frames come in through a callback, sends never block.

Reads its socket until it is empty on every wake-up, straight from the event loop. Measured over TCP loopback with
200-byte messages under uvloop: 128,000 messages/s and 167 us a round trip, against 22,000/s and 257 us for
`zmq.asyncio`. Knows nothing of what the frames mean.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import urlsplit

import zmq

from baton_serve.contracts.same_user import ROOT
from baton_serve.contracts.wire import MAX_FRAME_BYTES
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.errors import PeerUnreachable

logger = logging.getLogger(__name__)

Frames = list[bytes]
_READS_PER_TURN = 512
_PING_EVERY_MS = 10_000
_MOST_SILENT_MS = 30_000
_ASKED_READS = 2
_READABLE = int(zmq.POLLIN)


class ZmqLoopSocket:
    """Owns `socket` from `start` to `close`. Every method belongs to the event loop's thread."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[Frames], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_drain_due = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self.drain)
        self._drain_soon()

    def send(self, frames: Sequence[bytes]) -> None:
        """Raises `PeerUnreachable` when there is no route to the receiver or its queue is full."""
        try:
            if len(frames) == 1:
                self._socket.send(frames[0], zmq.NOBLOCK)
            else:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again as exc:
            raise PeerUnreachable("the receiver does not read: its queue is full") from exc
        except zmq.ZMQError as exc:
            raise PeerUnreachable(f"the receiver is gone: {exc}") from exc
        # The descriptor is edge-triggered and a send consumes its edge, so look for input ourselves.
        self._drain_soon()

    def drain(self) -> None:
        """Hands on all frames that have arrived, some at a time so that the loop's other work gets its turn."""
        self._is_drain_due = False
        for count in range(_READS_PER_TURN):
            if self._loop is None:
                return
            # Mostly there is nothing or one message: asking costs a third of a receive that fails.
            if count < _ASKED_READS and not cast(int, self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_frames(frames)
            except Exception:
                logger.exception("a received message could not be handled")
        self._drain_soon()

    def close(self, linger_ms: int = 0) -> None:
        """Unsent frames get `linger_ms` to leave, in ZeroMQ's own thread."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        self._socket.close(linger_ms)

    def _drain_soon(self) -> None:
        if not self._is_drain_due and self._loop is not None:
            self._is_drain_due = True
            self._loop.call_soon(self.drain)


def new_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, *, queue_length: int) -> zmq.Socket[bytes]:
    """A socket that drops its queue when closed, bounds frames, speaks IPv6 where an address asks for it, and ends
    connections whose other end does not answer a PING."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, queue_length)
    socket.setsockopt(zmq.RCVHWM, queue_length)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_EVERY_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _MOST_SILENT_MS)
    return socket


def bind(socket: zmq.Socket[bytes], address: str, key: ClusterKey | None = None) -> str:
    """Binds to `address` (`tcp://HOST:0` picks a free port) and returns the address that peers connect to.

    With a key, only who has it too can connect, and all is encrypted. To a Unix socket only this user and root can.
    """
    if address.startswith("ipc:"):
        for uid in {ROOT, os.geteuid()}:
            socket.setsockopt(zmq.IPC_FILTER_UID, uid)
    if key is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    if ":[" in address or "//[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.bind(address)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect(socket: zmq.Socket[bytes], address: str, key: ClusterKey | None = None) -> None:
    if key is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    host = urlsplit(address).hostname or ""
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)
