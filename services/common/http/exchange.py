"""Implements ASGI's `receive` and `send` for one HTTP request, and functions that ASGI lacks.

The application finds the exchange in `scope["extensions"][EXTENSION]`. The head of a response is written together with
the first piece of its body, so a response with one piece takes one write.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any, Protocol

logger = logging.getLogger(__name__)

EXTENSION = "baton.exchange"

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
App = Callable[[Any, Any, Any], Awaitable[None]]

_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_MAX_UNREAD_BYTES = 64 * 1024
"""Bytes of a body that wait for the application before reading from the connection pauses."""
_FAILED = b"Internal Server Error"


class HttpConnection(Protocol):
    """The interface of an HTTP connection that its `Exchange` objects use. Implemented by
    `services.common.http.protocol.HttpProtocol`.
    """

    is_write_paused: bool
    """True while the client takes data more slowly than it is written."""

    def default_head(self) -> bytes:
        """Return the header lines that this server adds to every response, such as Date."""

    def write(self, data: bytes) -> None:
        """Send `data` to the client at the end of this iteration of the event loop."""

    async def writable(self) -> None:
        """Wait until the client has received most of the data that was written (`is_write_paused` is False). A client
        that reads nothing for too long loses its connection.
        """

    def keep_response(self, num_bytes: int, since: float) -> bool:
        """Record that a response of `num_bytes`, which began at `since` (time of the event loop), stays in memory until
        the client has received most of it; 0 bytes at the end.

        Return False if the client receives it too slowly; then its connection is closed.
        """

    def pause_reading(self) -> None:
        """Stop reading from the client until `resume_reading`, because the application has not taken the body yet."""

    def resume_reading(self) -> None:
        """Read from the client again, unless reading is also paused for another reason."""

    def break_off(self) -> None:
        """Close the connection while a response is not complete, so that the client notices that it is incomplete.

        Data that is not written yet is still sent if the client takes it.
        """

    def completed(self, exchange: "Exchange") -> None:
        """Go on with the client's next request, or close the connection: the whole response of `exchange` has been
        written.
        """


_PIECE_BYTES = 128 * 1024
"""Largest part of a response that is written at once."""


class Exchange:
    """One HTTP request and its response, with ASGI's `receive` and `send`. It belongs to a connection, which calls the
    methods `on_…`.

    All methods run on the event loop.
    """

    __slots__ = (
        "_changed",
        "_connection",
        "_head",
        "_is_bodiless",
        "_is_chunked",
        "_is_http_10",
        "_is_read",
        "_is_received",
        "_is_streaming",
        "_num_unread",
        "_on_gone",
        "_remaining_bytes",
        "_unread",
        "_write",
        "expects_continue",
        "is_complete",
        "is_gone",
        "is_started",
        "is_writable",
        "keeps_alive",
    )

    def __init__(self, connection: HttpConnection, *, is_http_10: bool, is_head: bool, keeps_alive: bool) -> None:
        self.keeps_alive = keeps_alive
        self.expects_continue = False
        """True if the client waits for "100 Continue" before it sends its body."""
        self.is_complete = False
        self.is_gone = False
        """True if the connection was lost before the response was complete."""
        self.is_writable = False
        """True while `write` may be called: a streamed response has begun, and the client takes data fast enough."""
        self._connection = connection
        self._write = connection.write
        self._is_http_10 = is_http_10
        self._is_bodiless = is_head
        self._unread: list[bytes] = []
        self._num_unread = 0
        self._is_received = False
        self._is_read = False
        self._changed: asyncio.Event | None = None
        self._on_gone: Callable[[], None] | None = None
        self._head: bytes | None = None
        self.is_started = False
        self._is_streaming = False
        self._is_chunked = False
        self._remaining_bytes: int | None = None
        """Bytes of the body that are still to be written; None if its length is not known before its end."""

    async def run(self, app: App, scope: Scope) -> None:
        """Run the ASGI application for this request. If it raises or sends no complete response, answer with status
        500, or close the connection if a part of the response was sent already.
        """
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            logger.exception("the HTTP application failed with an unexpected error")
        finally:
            if not (self.is_complete or self.is_gone):
                self._break_off()

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """Set the callback that is called if the connection is lost before the response is complete; it is called at
        once if the connection is lost already. There is one callback; None removes it.
        """
        self._on_gone = on_gone
        if self.is_gone and on_gone is not None:
            on_gone()

    def write(self, data: bytes) -> None:
        """Write a piece of a response's body whose length is not known before. `data` must not be empty, and
        `is_writable` must be True.

        It does the same as `send`, but without a coroutine: a router calls it for every token.
        """
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    async def receive(self) -> Message:
        """Return the next piece of the request's body, or `http.disconnect` if the client is gone or the response is
        complete. It is the `receive` of ASGI.
        """
        if self.expects_continue and not self.is_gone:
            self.expects_continue = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.is_complete or self.is_gone) and (self._is_read or not (self._unread or self._is_received)):
            self._connection.resume_reading()
            self._changed = self._changed or asyncio.Event()
            self._changed.clear()
            await self._changed.wait()
        if self.is_complete or self.is_gone:
            return {"type": "http.disconnect"}
        body = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread.clear()
        self._is_read = self._is_received
        # `on_body` has paused reading. After the last piece too: otherwise a disconnect would remain unnoticed, and the
        # answer would be computed for nobody.
        if self._num_unread > _MAX_UNREAD_BYTES:
            self._connection.resume_reading()
        self._num_unread = 0
        return {"type": "http.request", "body": body, "more_body": not self._is_received}

    async def send(self, message: Message) -> None:
        """Send a part of the response: the start or a piece of the body. It is the `send` of ASGI. Do nothing if the
        connection is lost.

        Raises `RuntimeError` if the application sends parts in a wrong order or a body of a wrong length.
        """
        kind = message["type"]
        if kind == "http.response.body":
            body = message.get("body", b"")
            if len(body) > _PIECE_BYTES and not self._is_bodiless:
                body = await self._send_but_last_piece(body)
            elif self._connection.is_write_paused and not self.is_gone:
                await self._connection.writable()
            if self.is_gone:
                return
            self._send_body(body, is_last=not message.get("more_body", False))
        elif self.is_gone:
            return
        elif kind == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"the message type {kind!r} is not part of an HTTP response")

    def on_write_paused(self, is_paused: bool) -> None:
        """Update `is_writable`. The connection calls this with True when the client takes data too slowly, and with
        False when it takes data fast enough again.
        """
        self.is_writable = self._is_streaming and not is_paused

    def on_body(self, body: bytes) -> None:
        """Store a piece of the request's body for `receive`, or discard it if the response is complete. The connection
        calls this.
        """
        if not self.is_complete:
            self._unread.append(body)
            self._num_unread += len(body)
            if self._num_unread > _MAX_UNREAD_BYTES:
                self._connection.pause_reading()
            self._notify()

    def on_received(self) -> None:
        """Record that the whole request has arrived. The connection calls this."""
        self._is_received = True
        self.expects_continue = False
        self._notify()

    def on_lost(self) -> None:
        """Record that the connection is lost: wake up `receive`, and call the callback of `watch`. The connection calls
        this.
        """
        if self.is_complete or self.is_gone:
            return
        self.is_gone = True
        self.is_writable = self._is_streaming = False
        self._notify()
        if self._on_gone is not None:
            self._on_gone()

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self._head is not None or self.is_started:
            raise RuntimeError("the response has begun already")
        if self.expects_continue:
            # The client was never asked for its body. Its next data may be the body or another request.
            self.keeps_alive = False
        lines = self._lines(headers)
        self._is_bodiless = self._is_bodiless or status in (204, 304)
        if self._remaining_bytes is None and not self._is_bodiless:
            self._is_chunked = not self._is_http_10
            if self._is_chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keeps_alive = False  # HTTP/1.0 has no chunks: closing the connection marks the end of the body.
        if not self.keeps_alive:
            lines.append(b"connection: close\r\n")
        self._head = b"".join((_STATUS[status], self._connection.default_head(), *lines, b"\r\n"))

    def _lines(self, headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        """Return the application's header lines, except Connection and Transfer-Encoding, which this class decides
        itself.

        Raises `RuntimeError` for a header that contains a line break.
        """
        lines = []
        for name, value in headers:
            name = name.lower()
            if name == b"content-length":
                self._remaining_bytes = int(value)
            elif name == b"connection":
                self.keeps_alive = self.keeps_alive and b"close" not in value.lower()
                continue
            elif name == b"transfer-encoding":
                continue
            # A line break in a value, for example from a client's text, would let that client write headers (response
            # splitting).
            line = b"%b: %b\r\n" % (name, value)
            if line.count(b"\n") != 1 or line.count(b"\r") != 1 or b"\0" in line:
                raise RuntimeError(f"the response header {name!r} contains a line break or a NUL")
            lines.append(line)
        return lines

    def _send_body(self, body: bytes, *, is_last: bool) -> None:
        if self.is_complete or not (self.is_started or self._head is not None):
            raise RuntimeError("a body must come after the head of the response and before its end")
        data = self._framed(body, is_last=is_last)
        if self._head is not None:
            self.is_started = True
            self._is_streaming = self._remaining_bytes is None and not self._is_bodiless
            self.is_writable = self._is_streaming and not self._connection.is_write_paused
            data, self._head = self._head + data, None
        self._connection.write(data)
        if is_last:
            self.is_complete = True
            self.is_writable = self._is_streaming = False
            self._notify()
            self._connection.completed(self)

    async def _send_but_last_piece(self, body: bytes) -> bytes:
        """Send a long body in pieces, each when the client has taken most of the one before. Return the last piece,
        which is not sent yet.

        The connection would otherwise hold a copy of all of it, for thousands of clients that do not read.
        """
        connection, start, since = self._connection, 0, asyncio.get_running_loop().time()
        while not self.is_gone:
            if connection.is_write_paused and connection.keep_response(len(body), since):
                await connection.writable()
            elif len(body) - start <= _PIECE_BYTES:
                break
            else:
                # A connection that is being closed discards it.
                self._send_body(body[start : start + _PIECE_BYTES], is_last=False)
                start += _PIECE_BYTES
            # Data is written at the end of the loop's iteration. Only then is it known whether the client takes it.
            await asyncio.sleep(0)
        connection.keep_response(0, since)
        return body[start:]

    def _framed(self, body: bytes, *, is_last: bool) -> bytes:
        """Return a piece of the response's body in the form in which it is sent: unchanged, as a chunk of the chunked
        encoding, or empty if the response has no body. `is_last` says that no piece follows. Raises `RuntimeError` if
        the body's length differs from its Content-Length.
        """
        if self._is_bodiless:
            return b""
        if self._remaining_bytes is not None:
            self._remaining_bytes -= len(body)
            if self._remaining_bytes < 0 or (is_last and self._remaining_bytes):
                raise RuntimeError("the length of the body differs from its Content-Length")
            return body
        if not self._is_chunked:
            return body
        data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return data + b"0\r\n\r\n" if is_last else data

    def _break_off(self) -> None:
        """End a response that the application has not completed: answer with status 500 or, if a part was sent already,
        close the connection.
        """
        # Once bytes are written, an error status is impossible. Closing without an end shows that it is incomplete.
        if self.is_started:
            self._connection.break_off()
            return
        self._head, self._remaining_bytes, self.keeps_alive = None, None, False
        length = str(len(_FAILED)).encode()
        self._begin(500, [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", length)])
        self._send_body(_FAILED, is_last=True)

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
