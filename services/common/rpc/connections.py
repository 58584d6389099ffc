"""Opens connections between router and instance (TCP or Unix sockets), and decides which are encrypted or refused.

The event loop itself reads and writes, so that a message wakes up no further thread.
"""

import asyncio
import logging
import secrets
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import cast
from urllib.parse import urlsplit

from baton_serve.contracts.same_user import stranger
from baton_serve.contracts.wire import MAX_FRAME_BYTES
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.errors import PeerUnreachable
from baton_serve.services.common.http.late_timer import LateTimer
from baton_serve.services.common.logs import LimitedLog
from baton_serve.services.common.rpc.encryption import Encryption, tls_context
from baton_serve.services.common.rpc.framing import PREAMBLE, FrameReader, ProtocolError, frame

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""Longest time for the peer's preamble, and for the handshake of the encryption before it."""
SILENCE_S = 30.0
"""Longest time between two reads from a peer."""
ANY_UNIX_SOCKET = "ipc://@*"
"""Address for `MessageServer.start`: an abstract Unix socket with a random name that no process can know before."""
_ABSTRACT = "ipc://@"
_RECONNECT_S = 0.1
"""Time between two attempts to connect."""
_MAX_UNSENT_BYTES = 4 * MAX_FRAME_BYTES
"""Maximum size of the messages that are queued for one peer. A queue below it still accepts one message of any size."""


class MessageClient:
    """A router's connection to one instance, which carries messages (bytes). It repeats the attempt to connect until a
    process listens. After that, the loss of the connection is final: `on_lost` is called once with the reason, but not
    after `close`.
    """

    def __init__(
        self,
        address: str,
        *,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[str], None],
        key: ClusterKey | None = None,
        max_unsent_bytes: int = _MAX_UNSENT_BYTES,
    ) -> None:
        """Connect only in `start`. `address` is `tcp://HOST:PORT`, encrypted if there is a `key`, or `ipc://@NAME` for
        a Unix socket. `max_unsent_bytes` limits the queue of messages to the instance.
        """
        self._address = address
        self._connection = _Connection(
            on_message, on_lost, _context_for(address, key, is_server=False), max_unsent_bytes=max_unsent_bytes
        )
        self._connecting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect in the background. Messages can be sent immediately; they are queued until the connection
        exists.
        """
        self._connecting = asyncio.create_task(self._connect(), name="rpc-connect")

    def send(self, message: bytes) -> None:
        """Queue a message to the instance. Raises `PeerUnreachable` if the queue is full, because the instance does not
        read.
        """
        self._connection.send(message)

    def close(self, linger_ms: int = 0) -> None:
        """Close the connection. Queued messages may still be sent for `linger_ms` milliseconds."""
        if self._connecting is not None:
            self._connecting.cancel()
        self._connection.close(linger_ms)

    async def _connect(self) -> None:
        while True:
            try:
                await self._open()
            except OSError:
                # No process listens yet. This loop goes on until `InstanceLink` gives up after its own timeout.
                await asyncio.sleep(_RECONNECT_S)
            else:
                return

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        if self._address.startswith(_ABSTRACT):
            # asyncio cannot connect to an abstract address by its path, so the socket is connected first.
            connecting = socket.socket(socket.AF_UNIX)
            try:
                connecting.setblocking(False)
                await loop.sock_connect(connecting, _abstract_path(self._address))
                await loop.create_unix_connection(lambda: self._connection, sock=connecting)
            except BaseException:
                connecting.close()
                raise
            return
        parts = urlsplit(self._address)
        await loop.create_connection(lambda: self._connection, parts.hostname or "", parts.port or 0)


class MessageServer:
    """An instance's end of the connections to all routers. Each connection has a random id, the first argument of the
    callbacks. A connection that is silent for `silence_s` seconds is closed, because every router sends heartbeats.
    `on_lost` is called once with the reason for each connection that ends, but not after `close`.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[bytes, bytes], None],
        on_lost: Callable[[bytes, str], None],
        key: ClusterKey | None = None,
        handshake_s: float = HANDSHAKE_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._key = key
        self._timeouts = (handshake_s, silence_s)
        self._log = LimitedLog(logger)
        self._tls: ssl.SSLContext | None = None
        self._connections: dict[bytes, _Connection] = {}
        self._server: asyncio.AbstractServer | None = None

    async def start(self, address: str) -> str:
        """Listen on `address` and return the address at which routers connect. Raises `OSError` if the address is in
        use.

        With a key, TCP is encrypted, and only processes that have the key are accepted. On a Unix socket only processes
        of this user and of root are accepted.
        """
        loop = asyncio.get_running_loop()
        self._tls = _context_for(address, self._key, is_server=True)
        if address.startswith(_ABSTRACT):
            address = f"{_ABSTRACT}baton-{secrets.token_hex(16)}" if address == ANY_UNIX_SOCKET else address
            bound = _bound(socket.AF_UNIX, _abstract_path(address))
            self._server = await loop.create_unix_server(self._accept, sock=bound)
            return address
        parts = urlsplit(address)
        host = parts.hostname or ""
        bound = _bound(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, parts.port or 0))
        self._server = await loop.create_server(self._accept, sock=bound)
        return f"tcp://{parts.netloc.rpartition(':')[0]}:{bound.getsockname()[1]}"

    def send(self, peer: bytes, message: bytes) -> None:
        """Queue a message to the router with the connection id `peer`. Raises `PeerUnreachable` if the router is gone
        or its queue is full.
        """
        connection = self._connections.get(peer)
        if connection is None:
            raise PeerUnreachable("the receiver is gone")
        connection.send(message)

    async def close(self, linger_ms: int = 0) -> None:
        """Stop listening and close all connections. Queued messages may still be sent for `linger_ms` milliseconds."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections.values():
            connection.close(linger_ms)
        self._connections.clear()

    def _accept(self) -> "_Connection":
        # Random, so that the id of a lost connection never names a later one.
        peer = secrets.token_bytes(8)

        def on_lost(reason: str) -> None:
            del self._connections[peer]
            self._on_lost(peer, reason)

        connection = _Connection(
            partial(self._on_message, peer), on_lost, self._tls, timeouts=self._timeouts, log=self._log
        )
        self._connections[peer] = connection
        return connection


class _Connection(asyncio.Protocol):
    """One end of one connection between a router and an instance. `on_lost` is called once with the reason if it is
    lost, but not if `close` was called.

    Messages of one iteration of the event loop are sent together at its end. None is sent before the first bytes of the
    peer (its preamble) have arrived: it may be a process that must not get them.
    """

    def __init__(
        self,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[str], None],
        tls: ssl.SSLContext | None,
        *,
        max_unsent_bytes: int = _MAX_UNSENT_BYTES,
        timeouts: tuple[float, float] | None = None,
        log: LimitedLog | None = None,
    ) -> None:
        """Prepare one end of a connection. `tls` encrypts it (None: not encrypted). `timeouts` are the longest times
        for the peer's preamble and between two later reads, in seconds. `log` gets a line for a peer that is refused.

        Clients pass neither `timeouts` nor `log`: their caller watches the connection itself, and logs the reason of
        its loss.
        """
        self._on_message = on_message
        self._on_lost = on_lost
        self._encryption = None if tls is None else Encryption(tls)
        self._max_unsent_bytes = max_unsent_bytes
        self._timeouts = timeouts
        self._log = log
        self._timer: LateTimer | None = None
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._num_unsent = 0
        self._is_flush_due = False
        self._is_closed = False

    def send(self, message: bytes) -> None:
        """Queue a message to the peer. Raises `PeerUnreachable` if the queue is full."""
        written = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if written + self._num_unsent > self._max_unsent_bytes:
            raise PeerUnreachable("the receiver does not read: its queue is full")
        self._unsent.append(framed := frame(message))
        self._num_unsent += len(framed)
        if self._reader.is_ready and not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self, linger_ms: int = 0) -> None:
        """Close the connection without calling `on_lost`. Queued messages may still be sent for `linger_ms`
        milliseconds.
        """
        self._is_closed = True
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        if self._transport is not None:
            self._flush()
            self._transport.close()
            # A peer that does not read would keep a closing transport open for ever.
            asyncio.get_running_loop().call_later(linger_ms / 1e3, self._transport.abort)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._unsent and self._reader.is_ready and self._transport is not None:
            data = self._unsent[0] if len(self._unsent) == 1 else b"".join(self._unsent)
            self._unsent.clear()
            self._num_unsent = 0
            if not self._transport.is_closing():
                self._write(data)

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data if self._encryption is None else self._encryption.encrypt(data))

    # The next three methods without an underscore are called by asyncio's transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_closed:
            self._transport.abort()
        elif (uid := stranger(transport.get_extra_info("socket"))) is not None:
            # Any user of the machine may connect to, or listen at, an abstract Unix socket.
            self._refuse(f"the peer is a process of another user (uid {uid})")
        else:
            if self._timeouts is not None:
                loop = asyncio.get_running_loop()
                self._timer = LateTimer(loop)
                self._timer.set(loop.time() + self._timeouts[0], self._on_silence)
            if self._encryption is None:
                self._transport.write(PREAMBLE)
            else:
                self._shake_hands(self._encryption, b"")

    def data_received(self, data: bytes) -> None:
        try:
            if (encryption := self._encryption) is not None:
                data = encryption.decrypt(data) if encryption.is_ready else self._shake_hands(encryption, data)
            for message in self._reader.feed(data):
                if self._is_closed:
                    return
                self._deliver(message)
        except ProtocolError as exc:
            self._refuse(str(exc))
        if self._reader.is_ready:
            if self._timer is not None and self._timeouts is not None:
                self._timer.set(asyncio.get_running_loop().time() + self._timeouts[1], self._on_silence)
            if self._unsent and not self._is_flush_due:
                self._flush()  # Messages were held back until the peer's preamble, which may be in `data`.

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("the connection broke")

    def _shake_hands(self, encryption: Encryption, data: bytes) -> bytes:
        """Pass `data` from the peer to the TLS handshake and send its answer. Return the first decrypted bytes, which
        may directly follow the handshake. Raises `ProtocolError` if the peer does not have the key.
        """
        assert self._transport is not None
        try:
            plain = encryption.decrypt(data)
        finally:
            # An alert too: it says why to the peer.
            self._transport.write(encryption.pending())
        if encryption.is_ready:
            self._write(PREAMBLE)
        return plain

    def _on_silence(self) -> None:
        """Give the connection up, because the peer was silent for too long: its host may have failed without closing
        the connection.
        """
        self._lose("the peer was silent for too long")

    def _deliver(self, message: bytes) -> None:
        try:
            self._on_message(message)
        except Exception:
            logger.exception("handling a received message has failed")

    def _refuse(self, reason: str) -> None:
        if self._log is not None:
            self._log.warning("a connection is refused: %s", reason)
        # It gets no queued messages, and TLS cannot send any more after an error.
        self._unsent.clear()
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if not self._is_closed:
            self.close()
            self._on_lost(reason)


def _context_for(address: str, key: ClusterKey | None, *, is_server: bool) -> ssl.SSLContext | None:
    """Return the TLS context for connections at `address`, or None if they need no encryption: without a key, or on a
    Unix socket.

    A Unix socket needs none, because each end checks the other's user, and the kernel carries the messages.
    """
    return None if key is None or address.startswith("ipc:") else tls_context(key, is_server=is_server)


def _bound(family: int, where: str | tuple[str, int]) -> socket.socket:
    """Return a socket of the address family `family` that is bound to the address `where`, a path or a (host, port)
    pair. Raises `OSError` if the address is in use.
    """
    bound = socket.socket(family)
    try:
        if family != socket.AF_UNIX:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
    except OSError:
        bound.close()
        raise
    return bound


def _abstract_path(address: str) -> str:
    """Return the kernel's form of an abstract Unix address `ipc://@NAME`, which begins with a NUL and is not a file."""
    return "\0" + address.removeprefix(_ABSTRACT)
