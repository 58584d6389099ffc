"""Runs a ZeroMQ socket of services on the event loop: frames go to a callback, and sending never blocks.

At each wake-up the socket is read until it is empty. With messages of 200 bytes over TCP loopback under uvloop this
handles 128,000 messages/s with round trips of 167 us; `zmq.asyncio` handles 22,000/s with 257 us.
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
"""Maximum number of messages that are read before the event loop does other work."""
_PING_EVERY_MS = 10_000
"""Time between two PINGs of the library on each connection."""
_MAX_SILENCE_MS = 30_000
"""Time without an answer to a PING after which the library closes a connection."""
_POLLED_READS = 2
"""Number of reads before which the socket is polled. Polling is cheaper than a read that finds nothing."""
_READABLE = int(zmq.POLLIN)


class ZmqLoopSocket:
    """Runs the ZeroMQ socket `socket` on the event loop, and owns it from `start` to `close`: received frames go to
    `on_frames`. All methods must be called on the event loop.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[Frames], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_drain_due = False

    def start(self) -> None:
        """Begin to pass the frames of each received message to `on_frames`."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self.drain)
        # The descriptor is edge-triggered: it does not report frames that arrived before.
        self._drain_soon()

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue `frames` as one message, without blocking. Raises `PeerUnreachable` if the receiver is not connected or
        its queue is full.
        """
        try:
            if len(frames) == 1:
                self._socket.send(frames[0], zmq.NOBLOCK)
            else:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again as exc:
            raise PeerUnreachable("the receiver does not read: its queue is full") from exc
        except zmq.ZMQError as exc:
            raise PeerUnreachable(f"the receiver is gone: {exc}") from exc
        # A send can consume an edge of the edge-triggered descriptor, so input must be looked for here.
        self._drain_soon()

    def drain(self) -> None:
        """Pass all messages that have arrived to `on_frames`, in portions, so that the event loop can do other work in
        between.
        """
        self._is_drain_due = False
        for count in range(_READS_PER_TURN):
            # A callback may have closed this socket.
            if self._loop is None:
                return
            # Mostly at most one message is there. Polling costs a third of a read that finds nothing.
            if count < _POLLED_READS and not cast(int, self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_frames(frames)
            except Exception:
                logger.exception("handling a received message has failed")
        self._drain_soon()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. ZeroMQ's own thread may still send queued messages for `linger_ms` milliseconds."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        self._socket.close(linger_ms)

    def _drain_soon(self) -> None:
        if not self._is_drain_due and self._loop is not None:
            self._is_drain_due = True
            self._loop.call_soon(self.drain)


def new_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, *, queue_length: int) -> zmq.Socket[bytes]:
    """Return a new ZeroMQ socket of the type `kind` (such as `zmq.PUB`) that queues up to `queue_length` messages for
    each peer; the caller closes it.

    By default the socket drops queued messages when it is closed. It limits the size of frames, and closes connections
    that do not answer a PING.
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, queue_length)
    socket.setsockopt(zmq.RCVHWM, queue_length)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_EVERY_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _MAX_SILENCE_MS)
    return socket


def bind(socket: zmq.Socket[bytes], address: str, key: ClusterKey | None = None) -> str:
    """Bind `socket` to `address` and return the address at which others connect; with `tcp://HOST:0` a free port is
    taken.

    With a key, messages are encrypted, and only processes that have the key can connect. A Unix socket accepts only
    processes of this user and of root.
    """
    if address.startswith("ipc:"):
        for uid in {ROOT, os.geteuid()}:
            socket.setsockopt(zmq.IPC_FILTER_UID, uid)
    if key is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    # Without this option ZeroMQ rejects IPv6 addresses.
    if ":[" in address or "//[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.bind(address)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect(socket: zmq.Socket[bytes], address: str, key: ClusterKey | None = None) -> None:
    """Connect `socket` to `address`, encrypted if there is a `key`. Return immediately; ZeroMQ connects in its own
    thread.
    """
    # The whole cluster shares one key pair, so it is the key of both ends.
    if key is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    host = urlsplit(address).hostname or ""
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)
