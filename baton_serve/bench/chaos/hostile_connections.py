"""Hostile connections of `baton-bench chaos`: clients that are slow, silent, or do not follow HTTP or ZMTP.

The server must answer with status 4xx or close the connection, within its own limits of time.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from baton_serve.bench.chaos.cluster import HOSTILE_KEY

READ_BYTES = 65_536
HEAD = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {HOSTILE_KEY}\r\n".encode()
JSON = b"content-type: application/json\r\n"
LARGE = b"content-length: 8000000\r\n\r\n"
STREAM = b'{"prompt":"hello","max_tokens":400,"ignore_eos":true,"stream":true}'
CLOSED = 0
"""Stands for a connection that the server closed without an answer."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class HostileConnection:
    """A client that misbehaves. `act` is called with the open connection and returns the first bytes of the answer when
    the server has closed it. `within_s` is the longest time in which it must do so."""

    name: str
    act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]
    statuses: frozenset[int]
    within_s: float
    goes_to_instance: bool = False
    """True for a connection to a ZeroMQ port of an instance; others go to a router."""


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    """Return the first bytes of what the server sends until it closes the connection in any way."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(READ_BYTES):
            found = found or data
    return found


def _once(data: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]:
    """Return an action that sends `data`, and then waits until the server closes."""

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        return await _until_closed(reader)

    return act


def _trickled(data: bytes, piece: bytes, gap_s: float) -> Callable[..., Awaitable[bytes]]:
    """Return an action that sends `data`, and then a piece every `gap_s` until the server closes."""

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        async def send() -> None:
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                while True:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(gap_s)

        sending = asyncio.create_task(send())
        try:
            return await _until_closed(reader)
        finally:
            sending.cancel()

    return act


async def _reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Begin a stream, and reset the connection after its first bytes."""
    writer.write(HEAD + JSON + b"content-length: %d\r\n\r\n" % len(STREAM) + STREAM)
    found = await reader.read(READ_BYTES)
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return found


async def _unread(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Send many requests for a large document, and read nothing for as long as the server allows."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(UNREAD_S):
            for _ in range(400):
                writer.write(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(UNREAD_S)
    return await _until_closed(reader)


async def _old_peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Send bytes that ZeroMQ takes for a peer of ZMTP 1.0, which it need not disconnect; leave after a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(OLD_PEER_S):
            return await _once(b"GET / HTTP/1.1\r\n\r\n" * 100)(reader, writer)
    return b""


UNREAD_S, OLD_PEER_S = 70.0, 40.0
LATE = frozenset({CLOSED, 408})
NONE = frozenset({CLOSED})
NO_KEY = HEAD.replace(HOSTILE_KEY.encode(), b"none")

# The router's limits: 10 s for a head, 30 s without a byte of a body, 60 s for a body, then up to 30 s in which it
# discards what is still sent. ZeroMQ closes a connection without a handshake after 30 s. Each has 20 s more here,
# because a process may be frozen and the cores are busy.
HOSTILE_CONNECTIONS = [
    HostileConnection("silent connection", _once(b""), LATE, 30.0),
    HostileConnection("head that stops", _once(HEAD), LATE, 30.0),
    HostileConnection("trickled head", _trickled(HEAD, b"x-a: b\r\n", 0.5), LATE, 60.0),
    HostileConnection("body that stops", _once(HEAD + JSON + LARGE + b"{"), LATE, 55.0),
    HostileConnection("trickled body", _trickled(HEAD + JSON + LARGE, b" ", 0.5), LATE, 110.0),
    HostileConnection(
        "unread body after 401", _trickled(NO_KEY + JSON + LARGE, bytes(1000), 0.2), frozenset({401}), 50.0
    ),
    HostileConnection("two hosts", _once(HEAD + b"host: other\r\ncontent-length: 0\r\n\r\n"), frozenset({400}), 30.0),
    HostileConnection("no host", _once(b"GET /health HTTP/1.1\r\n\r\n"), frozenset({400}), 30.0),
    HostileConnection("no HTTP", _once(bytes(range(256)) * 40), frozenset({400}), 30.0),
    HostileConnection("endless head", _trickled(HEAD + b"x-a: ", b"a" * 60_000, 0.0), frozenset({431}), 50.0),
    HostileConnection("stream that is reset", _reset, frozenset({200, 429, 503}), 60.0),
    HostileConnection("answers that are not read", _unread, frozenset({CLOSED, 200}), UNREAD_S + 120.0),
    HostileConnection("silent ZeroMQ connection", _once(b""), NONE, 50.0, goes_to_instance=True),
    HostileConnection(
        "half of ZMTP's greeting", _once(b"\xff" + bytes(8) + b"\x7f\x03"), NONE, 50.0, goes_to_instance=True
    ),
    HostileConnection("no ZMTP", _old_peer, NONE, 60.0, goes_to_instance=True),
]


def status_of(answer: bytes) -> int:
    """Return the status of an HTTP answer, or `CLOSED` if there was none."""
    words = answer.split(b" ", 2)
    return int(words[1]) if answer.startswith(b"HTTP/1.") and len(words) > 1 and words[1].isdigit() else CLOSED
