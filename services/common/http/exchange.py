"""One request and its answer: ASGI's `receive` and `send`, and what ASGI has no word for.

The application finds it as `scope["extensions"][EXTENSION]`. An answer's head leaves with the first piece of its body,
and an answer that is sent in one piece leaves in one write.
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
_FAILED = b"Internal Server Error"


class HttpConnection(Protocol):
    """Where requests come from and answers go to."""

    is_write_paused: bool

    def default_head(self) -> bytes:
        """Lines of every answer's head."""

    def write(self, data: bytes) -> None: ...
    async def writable(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def break_off(self) -> None:
        """The end of an answer that has no end. What is not written yet leaves only if the client takes it."""

    def completed(self, exchange: "Exchange") -> None: ...


class Exchange:
    __slots__ = (
        "_connection",
        "_head",
        "_is_bodiless",
        "_is_chunked",
        "_is_http_10",
        "_is_read",
        "_is_received",
        "_is_streaming",
        "_missing",
        "_news",
        "_num_unread",
        "_on_gone",
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
        """The client sends its body only when it is told to."""
        self.is_complete = False
        self.is_gone = False
        """The connection ended before the answer."""
        self.is_writable = False
        """A body has begun whose length was not said, somebody is there, and takes what is written."""
        self._connection = connection
        self._write = connection.write
        self._is_http_10 = is_http_10
        self._is_bodiless = is_head
        self._unread: list[bytes] = []
        self._num_unread = 0
        self._is_received = False
        self._is_read = False
        self._news: asyncio.Event | None = None
        self._on_gone: Callable[[], None] | None = None
        self._head: bytes | None = None
        self.is_started = False
        self._is_streaming = False
        self._is_chunked = False
        self._missing: int | None = None

    async def run(self, app: App, scope: Scope) -> None:
        """The application's answer, or what must be said when there is none."""
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            logger.exception("an application failed")
        finally:
            if not (self.is_complete or self.is_gone):
                self._break_off()

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """`on_gone` is called when the client goes before it has got its answer; at once if it has gone."""
        self._on_gone = on_gone
        if self.is_gone and on_gone is not None:
            on_gone()

    def write(self, data: bytes) -> None:
        """A piece of the body, not empty, where `is_writable`: what `send` does, without waiting for anything."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    async def receive(self) -> Message:
        if self.expects_continue and not self.is_gone:
            self.expects_continue = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.is_complete or self.is_gone) and (self._is_read or not (self._unread or self._is_received)):
            self._connection.resume_reading()
            self._news = self._news or asyncio.Event()
            self._news.clear()
            await self._news.wait()
        if self.is_complete or self.is_gone:
            return {"type": "http.disconnect"}
        body = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread.clear()
        self._num_unread = 0
        self._is_read = self._is_received
        return {"type": "http.request", "body": body, "more_body": not self._is_received}

    async def send(self, message: Message) -> None:
        """To a client that has gone it does nothing."""
        if self._connection.is_write_paused and not self.is_gone:
            await self._connection.writable()
        if self.is_gone:
            return
        kind = message["type"]
        if kind == "http.response.body":
            self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))
        elif kind == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"no part of an HTTP answer: {kind}")

    def on_write_paused(self, is_paused: bool) -> None:
        """From the connection: the client takes less than it is sent, or again enough."""
        self.is_writable = self._is_streaming and not is_paused

    def on_body(self, body: bytes) -> None:
        """From the connection: a piece of the request's body."""
        if not self.is_complete:
            self._unread.append(body)
            self._num_unread += len(body)
            if self._num_unread > _MAX_UNREAD_BYTES:
                self._connection.pause_reading()
            self._notify()

    def on_received(self) -> None:
        """From the connection: the request is whole."""
        self._is_received = True
        self.expects_continue = False
        self._notify()

    def on_lost(self) -> None:
        """From the connection: it has ended."""
        if self.is_complete or self.is_gone:
            return
        self.is_gone = True
        self.is_writable = self._is_streaming = False
        self._notify()
        if self._on_gone is not None:
            self._on_gone()

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self._head is not None or self.is_started:
            raise RuntimeError("an answer begins once")
        if self.expects_continue:
            self.keeps_alive = False  # what comes next may be the body or not
        lines = self._lines(headers)
        self._is_bodiless = self._is_bodiless or status in (204, 304)
        if self._missing is None and not self._is_bodiless:
            self._is_chunked = not self._is_http_10
            if self._is_chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keeps_alive = False  # its end is the connection's
        if not self.keeps_alive:
            lines.append(b"connection: close\r\n")
        self._head = b"".join((_STATUS[status], self._connection.default_head(), *lines, b"\r\n"))

    def _lines(self, headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        """Those that say where the body ends are this end's own."""
        lines = []
        for name, value in headers:
            name = name.lower()
            if name == b"content-length":
                self._missing = int(value)
            elif name == b"connection":
                self.keeps_alive = self.keeps_alive and b"close" not in value.lower()
                continue
            elif name == b"transfer-encoding":
                continue
            line = b"%b: %b\r\n" % (name, value)
            if line.count(b"\n") != 1 or line.count(b"\r") != 1 or b"\0" in line:
                raise RuntimeError("a header of an answer would be more than a line")
            lines.append(line)
        return lines

    def _send_body(self, body: bytes, *, is_last: bool) -> None:
        if self.is_complete or not (self.is_started or self._head is not None):
            raise RuntimeError("a body lies between a head and its end")
        data = self._framed(body, is_last=is_last)
        if self._head is not None:
            self.is_started = True
            self._is_streaming = self._missing is None and not self._is_bodiless
            self.is_writable = self._is_streaming and not self._connection.is_write_paused
            data, self._head = self._head + data, None
        self._connection.write(data)
        if is_last:
            self.is_complete = True
            self.is_writable = self._is_streaming = False
            self._notify()
            self._connection.completed(self)

    def _framed(self, body: bytes, *, is_last: bool) -> bytes:
        if self._is_bodiless:
            return b""
        if self._missing is not None:
            self._missing -= len(body)
            if self._missing < 0 or (is_last and self._missing):
                raise RuntimeError("a body is as long as its head says")
            return body
        if not self._is_chunked:
            return body
        data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return data + b"0\r\n\r\n" if is_last else data

    def _break_off(self) -> None:
        """There will be no answer, or no end of it."""
        if self.is_started:
            self._connection.break_off()
            return
        self._head, self._missing, self.keeps_alive = None, None, False
        length = str(len(_FAILED)).encode()
        self._begin(500, [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", length)])
        self._send_body(_FAILED, is_last=True)

    def _notify(self) -> None:
        if self._news is not None:
            self._news.set()
