"""ZeroMQ's wire protocol on a connection of the event loop: the end of a DEALER that sends and gets messages of one
frame each, without encryption.

The library gives its sockets to a thread of its own: each message then wakes two threads on its way. Here a message is
written and read by the loop itself. Speaks ZMTP 3.0 (https://rfc.zeromq.org/spec/23/) with the NULL mechanism, so the
other end is any ZeroMQ socket. `ZmtpReader` does no I/O.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import cast
from urllib.parse import urlsplit

from contracts.wire import MAX_FRAME_BYTES
from services.common.errors import PeerUnreachable

logger = logging.getLogger(__name__)

_MORE, _LONG, _COMMAND = 0x01, 0x02, 0x04
_MECHANISM = b"NULL".ljust(20, b"\0")
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = _SIGNATURE + b"\x03\x00" + _MECHANISM + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"

_RECONNECT_S = 0.1
_MOST_UNSENT_BYTES = 4 * MAX_FRAME_BYTES


class ZmtpError(Exception):
    """The other end speaks something else, or refuses this one."""


def framed(message: bytes) -> bytes:
    """As one frame, the last of its message."""
    if len(message) < 256:
        return bytes((0, len(message))) + message
    return b"\x02" + len(message).to_bytes(8, "big") + message


def command(body: bytes) -> bytes:
    return bytes((_COMMAND, len(body))) + body


class ZmtpReader:
    """Bytes in, messages out. `is_ready` from the end of the handshake on."""

    def __init__(self) -> None:
        self.is_ready = False
        self._is_greeted = False
        self._parts: list[bytes] = []
        self._missing = 0
        """Of what `_parts` begins: a long frame is put together once, not with each of its parts."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The last frames of the messages that `data` completes. Raises `ZmtpError`."""
        if self._parts:
            data = self._put_together(data)
        start, end = 0 if self._is_greeted else self._greeting(data), len(data)
        while self._is_greeted and start < end:
            flags = data[start]
            body = start + (9 if flags & _LONG else 2)
            if body > end:
                break
            stop = body + int.from_bytes(data[start + 1 : body], "big")
            if stop - body > MAX_FRAME_BYTES:
                raise ZmtpError(f"a frame of {stop - body} bytes exceeds the limit of {MAX_FRAME_BYTES}")
            if stop > end:
                self._missing = stop - end
                break
            start = stop
            if flags & _COMMAND:
                self._on_command(data[body:stop])
            elif not self.is_ready:
                raise ZmtpError("a message came before the handshake's end")
            elif not flags & _MORE:
                yield data[body:stop]
        if start < end:
            self._parts.append(data[start:])

    def _put_together(self, data: bytes) -> bytes:
        """Empty as long as the frame that has begun is not whole."""
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return b""
        whole = b"".join(self._parts)
        self._parts.clear()
        return whole

    def _greeting(self, data: bytes) -> int:
        """Length of a whole greeting, else 0."""
        if len(data) < len(GREETING):
            return 0
        if data[0] != 0xFF or data[9] != 0x7F or data[10] < 3:
            raise ZmtpError("no ZMTP 3")
        if data[12:32] != _MECHANISM:
            raise ZmtpError(f"the other end wants {data[12:32].rstrip(bytes(1))!r}, not NULL")
        self._is_greeted = True
        return len(GREETING)

    def _on_command(self, body: bytes) -> None:
        if body.startswith(b"\x05READY"):
            self.is_ready = True
        elif body.startswith(b"\x05ERROR"):
            raise ZmtpError(f"refused: {body[7:]!r}")


class ZmtpDealer(asyncio.Protocol):
    """`services.common.rpc.Dealer`. Connects, again and again until somebody listens; is lost with its connection."""

    def __init__(self, address: str, *, on_message: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        """`address` is `tcp://HOST:PORT`."""
        parts = urlsplit(address)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader = ZmtpReader()
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        """Framed messages that wait for the end of the handshake: sooner, the library would take them for an error."""
        self._is_closed = False

    def start(self) -> None:
        self._connecting = asyncio.create_task(self._connect(), name="zmtp-connect")

    def send(self, message: bytes) -> None:
        """Raises `PeerUnreachable` when the peer takes nothing of what it is sent."""
        if self._transport is None or not self._reader.is_ready:
            self._early.append(framed(message))
            return
        if self._transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            raise PeerUnreachable("the receiver does not read: its queue is full")
        self._transport.write(framed(message))

    def drain(self) -> None:
        """What has come was handed on as it came."""

    def close(self, linger_ms: int = 0) -> None:
        """Unsent messages get `linger_ms` to leave."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(linger_ms / 1e3, self._transport.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_closed:
            self._transport.abort()
            return
        self._transport.write(GREETING + command(READY))

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                if self._is_closed:
                    return
                self._hand_on(message)
        except ZmtpError as exc:
            logger.warning("the connection to %s:%d ends: %s", self._host, self._port, exc)
            self._lose("the handshake failed")
        if self._early and self._transport is not None and self._reader.is_ready:
            self._transport.write(b"".join(self._early))
            self._early.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("the connection broke")

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.create_connection(lambda: self, self._host, self._port)
            except OSError:  # nobody listens yet: whoever waits for an answer gives up, not this
                await asyncio.sleep(_RECONNECT_S)
            else:
                return

    def _hand_on(self, message: bytes) -> None:
        try:
            self._on_message(message)
        except Exception:
            logger.exception("a received message could not be handled")

    def _lose(self, reason: str) -> None:
        if not self._is_closed:
            self.close()
            self._on_lost(reason)
