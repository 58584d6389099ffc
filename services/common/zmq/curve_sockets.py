"""DEALER and ROUTER of the ZeroMQ library, for connections that are encrypted with CURVE.

The library does the work in its own thread. Connections without encryption use `zmtp_sockets`, which is faster.
"""

import asyncio
import logging
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.logs import LimitedLog
from baton_serve.services.common.zmq.loop_socket import Frames, ZmqLoopSocket, bind, connect, new_socket

logger = logging.getLogger(__name__)

_QUEUE_LENGTH = 100_000
"""Maximum number of queued messages per connection."""


class CurveDealer:
    """A router's encrypted connection to an instance. Implements `services.common.zmq.rpc.DealerSocket`."""

    def __init__(
        self,
        address: str,
        key: ClusterKey,
        *,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[str], None],
        context: "zmq.Context[zmq.Socket[bytes]]",
    ) -> None:
        self._address = address
        self._key = key
        self._on_message = on_message
        self._on_lost = on_lost
        # The library reports a broken connection only through a monitor socket.
        self._raw = new_socket(context, zmq.DEALER, queue_length=_QUEUE_LENGTH)
        events = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
        self._socket = ZmqLoopSocket(self._raw, lambda frames: self._on_message(frames[-1]))
        self._monitor = ZmqLoopSocket(self._raw.get_monitor_socket(events), self._on_event)

    def start(self) -> None:
        """Connect. The library repeats it until an instance answers."""
        # The monitor starts first, or it could miss a handshake that fails at once.
        self._monitor.start()
        self._socket.start()
        connect(self._raw, self._address, self._key)

    def send(self, message: bytes) -> None:
        """Queue a message. Raises `PeerUnreachable` if the queue is full."""
        self._socket.send([message])

    def drain(self) -> None:
        """Pass on all messages that have arrived."""
        self._socket.drain()

    def close(self, linger_ms: int = 0) -> None:
        """Close the connection. Queued messages are still sent for at most `linger_ms`."""
        self._raw.disable_monitor()
        self._monitor.close()
        self._socket.close(linger_ms)

    def _on_event(self, frames: Frames) -> None:
        event = zmq.Event(parse_monitor_message(frames)["event"])
        if event != zmq.Event.MONITOR_STOPPED:
            # Messages that arrived before the loss are still to be delivered.
            self._socket.drain()
            self._on_lost("the connection broke" if event == zmq.Event.DISCONNECTED else "the handshake failed")


class CurveRouter:
    """An instance's encrypted end for all routers. Implements `services.common.zmq.rpc.Router`.

    It notices only when it sends that a peer is gone.
    """

    def __init__(self, key: ClusterKey, *, on_message: Callable[[bytes, bytes], None]) -> None:
        self._key = key
        self._on_message = on_message
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: ZmqLoopSocket | None = None
        self._log = LimitedLog(logger)

    async def start(self, address: str) -> str:
        """Bind `address` and return the one for peers. Raises `zmq.ZMQError` if it is in use."""
        raw = new_socket(self._context, zmq.ROUTER, queue_length=_QUEUE_LENGTH)
        # Without this option a message to a router that is gone is dropped silently.
        raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        address = bind(raw, address, self._key)
        self._socket = ZmqLoopSocket(raw, self._on_frames)
        self._socket.start()
        return address

    def send(self, peer: bytes, message: bytes) -> None:
        """Queue a message. Raises `PeerUnreachable` if the peer is gone or its queue is full."""
        if self._socket is not None:
            self._socket.send([peer, message])

    async def close(self, linger_ms: int = 0) -> None:
        """Close all connections. Queued messages are still sent for at most `linger_ms`."""
        if self._socket is not None:
            self._socket.close(linger_ms)
            self._socket = None
        await asyncio.to_thread(self._context.term)

    # The first frame is the id of the peer, which the library adds.
    def _on_frames(self, frames: Frames) -> None:
        if len(frames) != 2:
            self._log.warning("a message with %d frames is ignored, one frame is expected", len(frames) - 1)
            return
        self._on_message(frames[0], frames[1])
