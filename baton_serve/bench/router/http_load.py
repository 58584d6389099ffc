"""A minimal HTTP/1.1 client, to load a server from Python: one connection, one request at a time, no parsing beyond
what is needed.
"""

import asyncio
import time
from collections.abc import Callable
from typing import cast

_END_OF_HEAD = b"\r\n\r\n"
_END_OF_STREAM = b"0\r\n\r\n"


class HttpError(Exception):
    """The server answered with an error or closed the connection."""


class LoadConnection(asyncio.Protocol):
    """One connection. `on_chunk` of `ask` receives the body of a streamed answer as it arrives, with the time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._done: asyncio.Future[bytes] | None = None
        self._on_chunk: Callable[[bytes, float], None] | None = None
        self._length: int | None = None
        self._in_body = False

    @classmethod
    async def open(cls, port: int) -> "LoadConnection":
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def close(self) -> None:
        self._transport.close()

    async def ask(self, request: bytes, on_chunk: Callable[[bytes, float], None] | None = None) -> bytes:
        """Send a request (head and body) and return the body of an answer that has a length; a streamed body goes to
        `on_chunk`. Raises `HttpError`."""
        self._done = asyncio.get_running_loop().create_future()
        self._on_chunk = on_chunk
        self._buffer.clear()
        self._in_body = False
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        if self._in_body and self._length is None:
            self._stream(data)
            return
        self._buffer += data
        if not self._in_body:
            end = self._buffer.find(_END_OF_HEAD)
            if end < 0:
                return
            self._read_head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
            self._in_body = True
        if self._length is None:
            self._stream(bytes(self._buffer))
        elif len(self._buffer) >= self._length:
            self._end(bytes(self._buffer))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(HttpError(f"the connection broke: {exc}"))

    def _read_head(self, head: bytes) -> None:
        status = int(head[9:12])
        self._length = None
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                self._length = int(value)
        if status != 200 and self._done is not None and not self._done.done():
            self._done.set_exception(HttpError(f"status {status}"))

    def _stream(self, data: bytes) -> None:
        if data and self._on_chunk is not None:
            self._on_chunk(data, time.perf_counter())
        if data.endswith(_END_OF_STREAM):
            self._end(b"")

    def _end(self, body: bytes) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(body)


def post(path: str, body: bytes, *, headers: str = "") -> bytes:
    """Return a whole POST request with a JSON body."""
    fields = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode() + body
