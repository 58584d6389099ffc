"""Carries messages and blocks of one connection to a producer over ZeroMQ sockets. They are used once: a broken
connection is replaced, never repaired.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import zmq

from baton_serve.contracts.wire import encode
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.control_messages import Got, Join, ToProducer
from baton_serve.kvtransfer.errors import PeerLost
from baton_serve.kvtransfer.monitored_socket import MonitoredSocket, configure, encrypt

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ProducerChannel:
    """Carries messages to and from one producer over ZeroMQ sockets. `ConsumerLink` owns it. Use it only on the event
    loop.

    The first socket carries all control messages, and further ones carry bytes of blocks only. If one of them breaks,
    the whole connection is lost: `on_lost` is called with the reason and must call `close`.
    """

    def __init__(
        self,
        context: NodeContext,
        address: str,
        *,
        on_frames: Callable[[list[zmq.Frame]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.is_up = True
        self._context = context
        self._address = address
        self._on_frames = on_frames
        self._on_lost = on_lost
        self._credit = 0
        self._gone: asyncio.Future[None] = context.loop.create_future()
        self._sockets = [self._connected()]

    @property
    def num_connections(self) -> int:
        """Return the number of open sockets to the producer, including the one for control messages."""
        return len(self._sockets)

    def send(self, message: ToProducer) -> None:
        """Send a control message to the producer, without blocking. If that fails, `on_lost` is called on the next turn
        of the event loop. After `close` nothing is sent.
        """
        if not self.is_up:
            return
        try:
            self._sockets[0].send([encode(message)])
        except zmq.ZMQError as exc:
            logger.info("%s connection lost on send: %s", self._address, exc)
            # The caller may be in the middle of a step of a session: `on_lost` would enter the session again.
            self._context.loop.call_soon(self._on_lost, "connection lost")

    def credit(self, num_bytes: int) -> None:
        """Report to the producer that `num_bytes` were received, so that it may send more. The calls of one turn of the
        event loop are sent as one message.
        """
        if num_bytes and not self._credit:
            self._context.loop.call_soon(self._give_credit)
        self._credit += num_bytes

    def widen(self, num_connections: int, secret: bytes) -> None:
        """Open more sockets to the producer, up to `num_connections` in all. `secret`, from the producer's `Welcome`,
        proves that the sockets belong to the same consumer. The producer sends over a new socket once that socket's
        `Join` message has arrived.
        """
        for _ in range(num_connections - len(self._sockets)):
            joined = self._connected()
            self._sockets.append(joined)
            joined.send([encode(Join(secret))])

    async def unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of the coroutine `work`. If the connection is lost before, cancel `work` and raise
        `PeerLost`.
        """
        task = self._context.loop.create_task(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                # Wait until it has been cancelled: it must not touch the connection after the loss.
                await asyncio.wait({task})
        if task.cancelled():
            raise PeerLost(f"{self._address}: connection lost")
        return task.result()

    def close(self, linger_ms: int = 0) -> None:
        """Close all sockets; call it only once. Control messages already queued may still be sent for `linger_ms`
        milliseconds.
        """
        self.is_up = False
        self._gone.set_result(None)
        first, *joined = self._sockets
        for socket in joined:
            socket.close()
        first.close(linger_ms=linger_ms)

    def _connected(self) -> MonitoredSocket:
        socket, settings = self._context.zmq.socket(zmq.DEALER), self._context.settings
        configure(socket, settings)
        encrypt(socket, settings, listens=False)
        socket.connect(self._address)
        return MonitoredSocket(socket, on_message=self._on_frames, on_down=self._on_down)

    def _give_credit(self) -> None:
        num_bytes, self._credit = self._credit, 0
        self.send(Got(num_bytes))

    def _on_down(self, _: int) -> None:
        # Messages that arrived before the end may complete fetches: handle them first.
        for socket in list(self._sockets):
            socket.drain()
        self._on_lost("connection lost")
