"""ZeroMQ's own DEALER and ROUTER, for connections that are encrypted (CURVE): they live in the library's thread."""

import asyncio
import logging
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.limited_log import LimitedLog
from baton_serve.services.common.zmq.loop_socket import Frames, ZmqLoopSocket, bind, connect, new_socket

logger = logging.getLogger(__name__)

_QUEUE_LENGTH = 100_000


class CurveDealer:
    """`services.common.zmq.rpc.Dealer`."""

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
        self._raw = new_socket(context, zmq.DEALER, queue_length=_QUEUE_LENGTH)
        events = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
        self._socket = ZmqLoopSocket(self._raw, lambda frames: self._on_message(frames[-1]))
        self._monitor = ZmqLoopSocket(self._raw.get_monitor_socket(events), self._on_event)

    def start(self) -> None:
        self._monitor.start()
        self._socket.start()
        connect(self._raw, self._address, self._key)

    def send(self, message: bytes) -> None:
        """Raises `PeerUnreachable`."""
        self._socket.send([message])

    def drain(self) -> None:
        self._socket.drain()

    def close(self, linger_ms: int = 0) -> None:
        self._raw.disable_monitor()
        self._monitor.close()
        self._socket.close(linger_ms)

    def _on_event(self, frames: Frames) -> None:
        event = zmq.Event(parse_monitor_message(frames)["event"])
        if event != zmq.Event.MONITOR_STOPPED:
            self._socket.drain()
            self._on_lost("the connection broke" if event == zmq.Event.DISCONNECTED else "the handshake failed")


class CurveRouter:
    """`services.common.zmq.rpc.Router`. That a peer is gone it notices when it sends."""

    def __init__(self, key: ClusterKey, *, on_message: Callable[[bytes, bytes], None]) -> None:
        self._key = key
        self._on_message = on_message
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: ZmqLoopSocket | None = None
        self._log = LimitedLog(logger)

    async def start(self, address: str) -> str:
        """Raises `zmq.ZMQError` when the address is in use."""
        raw = new_socket(self._context, zmq.ROUTER, queue_length=_QUEUE_LENGTH)
        # Without this a message to a router that is gone vanishes silently.
        raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        address = bind(raw, address, self._key)
        self._socket = ZmqLoopSocket(raw, self._on_frames)
        self._socket.start()
        return address

    def send(self, peer: bytes, message: bytes) -> None:
        """Raises `PeerUnreachable`."""
        if self._socket is not None:
            self._socket.send([peer, message])

    async def close(self, linger_ms: int = 0) -> None:
        if self._socket is not None:
            self._socket.close(linger_ms)
            self._socket = None
        await asyncio.to_thread(self._context.term)

    def _on_frames(self, frames: Frames) -> None:
        if len(frames) != 2:
            self._log.warning("message refused: %d frames", len(frames))
            return
        self._on_message(frames[0], frames[1])
