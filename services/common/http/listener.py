"""Accepts connections while slots and file descriptors are free; which one is closed for a new one,
`connection_slots.py` decides.

`bind_tcp` creates the TCP sockets on which processes listen.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.connection_slots import Slot, Slots


def bind_tcp(host: str, port: int, *, shares_port: bool = False, listens: bool = True) -> socket.socket:
    """Return a TCP socket that is bound to `host` and `port` and listens for connections; the caller closes it.

    Without `listens` the socket only reserves the port. With `shares_port` other processes of this user may bind the
    same port too. Raises `ConfigurationError`, which names the address, if the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    # Without it a restart would fail for a minute, while old connections are in TIME_WAIT.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if shares_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
        if listens:
            bound.listen(2048)
    except (OSError, OverflowError) as exc:
        bound.close()
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigurationError(f"cannot listen on {host}:{port}: {reason} (choose another --port)") from exc
    bound.setblocking(False)
    return bound


_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "*": "127.0.0.1"}
"""Values of `--host` that stand for all addresses, and the address at which this machine reaches itself."""


def reachable_url(host: str, port: int, *, is_tls: bool) -> str:
    """Return the URL, without a path, at which processes of this machine reach a server that listens on `host` and
    `port`; `host` may stand for all addresses (`0.0.0.0`).
    """
    name = _WILDCARDS.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if is_tls else 'http'}://{name}:{port}"


logger = logging.getLogger(__name__)

_ACCEPTS_PER_TURN = 64
"""Maximum number of connections that are accepted before the event loop does other work."""
_PAUSE_S = 0.2
"""Time without accepting after the process or the system ran out of file descriptors or memory."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of `accept` that pass when other connections are closed."""
_REASON = b"This server has too many connections."
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n\r\n%b" % (len(_REASON), _REASON)
)
_LOG_EVERY_S = 10.0
"""Shortest time between two warnings about refused connections."""


class Listener:
    """Accepts connections on the socket `listening`, on the event loop, and creates a protocol object for each
    connection by `protocol`. The listener owns each accepted socket until the protocol object has it. The caller owns
    and closes `listening`.
    """

    def __init__(
        self,
        listening: socket.socket,
        protocol: Callable[[Slot], asyncio.Protocol],
        *,
        slots: Slots,
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float = 10.0,
    ) -> None:
        self._listening = listening
        self._protocol = protocol
        self._slots = slots
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self._is_exhausted = False
        self._num_refused = 0
        self._logged_at = -_LOG_EVERY_S

    def start(self) -> None:
        """Accept connections from now on."""
        self._loop.add_reader(self._listening, self._accept_all)

    def close(self) -> None:
        """Accept no more connections. Connections that have their protocol object stay open; those in a TLS handshake
        are closed.
        """
        self._loop.remove_reader(self._listening)
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        for task in self._connecting:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until each accepted connection was passed to its protocol object or closed. Call it after `close`."""
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _accept_all(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                if exc.errno not in _EXHAUSTED:
                    raise
                self._pause(exc)
                return
            if self._is_exhausted:
                self._is_exhausted = False
                logger.info("connections are accepted again")
            self._take(connection, address[0])

    def _pause(self, reason: OSError) -> None:
        """Stop accepting for `_PAUSE_S` seconds, because the process has no free file descriptors or memory (`reason`).
        An idle connection is closed.
        """
        # Without the pause the loop would spin: the socket stays readable, because new connections wait in the kernel's
        # queue.
        if not self._is_exhausted:
            self._is_exhausted = True
            logger.warning(
                "cannot accept connections: %s; %d are open (raise `ulimit -n`, or lower --max-connections)",
                reason.strerror,
                len(self._slots),
            )
        self._slots.evict()
        self._loop.remove_reader(self._listening)
        self._resuming = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._resuming = None
        self.start()

    def _take(self, connection: socket.socket, address: str) -> None:
        slot = self._slots.admit(address)
        if slot is None:
            self._refuse(connection, address)
            return
        connection.setblocking(False)
        # Nagle's algorithm would hold back a token until the client has acknowledged the previous one.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connect(connection, slot))
        slot.on_evicted = task.cancel
        self._connecting.add(task)
        task.add_done_callback(partial(self._on_connected, connection, slot))

    async def _connect(self, connection: socket.socket, slot: Slot) -> None:
        if self._tls is None:
            await self._loop.connect_accepted_socket(lambda: self._protocol(slot), connection)
        else:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(slot),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )

    def _on_connected(self, connection: socket.socket, slot: Slot, task: asyncio.Task[None]) -> None:
        self._connecting.discard(task)
        if task.cancelled() or (failure := task.exception()) is not None:
            connection.close()
            slot.release()
            if not task.cancelled():
                logger.debug("a connection from %s has failed: %s", slot.address, failure)

    def _refuse(self, connection: socket.socket, address: str) -> None:
        """Close a connection from `address` that has exceeded the limits of connections. Send a response with status
        503 before, if that needs neither TLS nor waiting.
        """
        with connection:
            connection.setblocking(False)
            if self._tls is None:
                try:
                    connection.send(_REFUSAL)
                    connection.shutdown(socket.SHUT_WR)
                    # Closing with unread data would reset the connection, and the client would lose the response.
                    connection.recv(64 * 1024)
                except OSError:
                    pass
        self._num_refused += 1
        now = self._loop.time()
        if now - self._logged_at >= _LOG_EVERY_S:
            logger.warning(
                "refused %d connections, the last one from %s: %d are open"
                " (see --max-connections and --max-connections-per-address)",
                self._num_refused,
                address,
                len(self._slots),
            )
            self._num_refused, self._logged_at = 0, now
