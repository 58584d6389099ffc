"""HTTP/1.1 for an ASGI application, with what a server on an open network needs: heads of requests are bounded in size
and time, idle connections in time; and with what a busy one wants: what one turn of the event loop writes leaves at its
end.

`httptools` parses, `Exchange` answers, uvicorn's `Server` accepts connections and waits for them when it stops.
"""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from services.common.http_exchange import EXTENSION, App, Exchange, Scope
from services.common.turn_writes import TurnWrites

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """Of the request line and the headers of one request."""

    max_bytes: int = 64 * 1024
    timeout_s: float = 10.0


class HttpProtocol(asyncio.Protocol):
    """One connection. `services.common.http_exchange.Connection`."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: HeadLimits,
        writes: TurnWrites,
    ) -> None:
        """All but `limits` and `writes` are what uvicorn's server gives."""
        self.is_write_paused = False
        self._app = cast(App, config.loaded_app)
        self._root_path = config.root_path
        self._idle_s = config.timeout_keep_alive
        self._server = server_state
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._writes = writes
        self._parser = self._new_parser()
        self._is_in_head = True
        self._num_heads = 0
        self._head_bytes = 0
        self._too_slow: asyncio.TimerHandle | None = None
        self._idle_since: float | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._url = b""
        self._target: tuple[bytes, dict[str, Any]] = (b"", {})
        self._headers: list[tuple[bytes, bytes]] = []
        self._default: tuple[object, bytes] = (None, b"")
        self._answering: Exchange | None = None
        self._receiving: Exchange | None = None
        self._waiting: deque[tuple[Exchange, Scope]] = deque()
        self._is_read_paused = False
        self._is_ending = False
        self._writability: asyncio.Event | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._unsent = self._writes.of(self._transport)
        self.write = self._unsent.add
        self._server.connections.add(cast(Any, self))
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "server": get_local_addr(self._transport),
            "client": get_remote_addr(self._transport),
            "scheme": "https" if is_ssl(self._transport) else "http",
            "root_path": self._root_path,
        }
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(cast(Any, self))
        self._head_is_over()
        if self._idle is not None:
            self._idle.cancel()
        self._waiting.clear()
        for exchange in {self._answering, self._receiving} - {None}:
            assert exchange is not None
            exchange.on_lost()
        self._answering = self._receiving = None
        self.resume_writing()
        del self._parser  # it knows this connection: there is no cycle to collect

    def data_received(self, data: bytes) -> None:
        self._idle_since = None
        num_heads, is_body = self._num_heads, not self._is_in_head
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(b"400 Bad Request", b"Invalid HTTP request received.")
            return
        if self._num_heads == num_heads and not is_body:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_bytes:
                self._refuse_head(b"431 Request Header Fields Too Large")
            elif self._too_slow is None:
                self._watch_head()

    def pause_writing(self) -> None:
        self.is_write_paused = True
        if self._answering is not None:
            self._answering.on_write_paused(True)

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if self._answering is not None:
            self._answering.on_write_paused(False)
        if self._writability is not None:
            self._writability.set()

    def shutdown(self) -> None:
        """From the server: an answer that has begun may end, then the connection does."""
        self._is_ending = True
        if self._answering is None:
            self._close()

    # What the parser finds.

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # what follows a chunked body is of no use to anybody here
        name = name.lower()
        self._headers.append((name, value))
        if name == b"expect":
            self._expects_continue = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            return  # `_feed` reads it again
        self._is_in_head = False
        self._num_heads += 1
        self._head_is_over()
        version, method = self._parser.get_http_version(), self._parser.get_method().decode("ascii")
        exchange = Exchange(
            self,
            is_http_10=version == "1.0",
            is_head=method == "HEAD",
            keeps_alive=version != "1.0" and self._parser.should_keep_alive(),
        )
        exchange.expects_continue = self._expects_continue
        scope = self._scope | self._target_of(self._url)
        scope["http_version"], scope["method"], scope["headers"] = version, method, self._headers
        scope["extensions"] = {EXTENSION: exchange}
        self._receiving = exchange
        if self._answering is None:
            self._start(exchange, scope)
        else:
            self._waiting.append((exchange, scope))
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        if self._receiving is not None:
            self._receiving.on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = True
        if self._receiving is not None:
            self._receiving.on_received()
            self._receiving = None

    # What exchanges ask for.

    def default_head(self) -> bytes:
        headers = self._server.default_headers
        if self._default[0] is not headers:
            self._default = (headers, b"".join(b"%b: %b\r\n" % (name, value) for name, value in headers))
        return self._default[1]

    async def writable(self) -> None:
        while self.is_write_paused:
            self._writability = self._writability or asyncio.Event()
            self._writability.clear()
            await self._writability.wait()

    def pause_reading(self) -> None:
        if not self._is_read_paused:
            self._is_read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_read_paused and not self._waiting:
            self._is_read_paused = False
            self._transport.resume_reading()

    def break_off(self) -> None:
        if self.is_write_paused:
            self._transport.abort()
        else:
            self._close()

    def completed(self, exchange: Exchange) -> None:
        self._answering = None
        if self._is_ending or not exchange.keeps_alive:
            self._close()
            return
        if self._waiting:
            self._start(*self._waiting.popleft())
        else:
            self._idle_since = self._loop.time()
            if self._idle is None:
                self._idle = self._loop.call_later(self._idle_s, self._look_at_idleness)
        self.resume_reading()

    def _feed(self, data: bytes) -> None:
        """Who asks for another protocol (h2c, say) is answered in this one. The parser takes what follows such a head
        for that protocol: it is given the head again without the wish. Raises `httptools.HttpParserError`."""
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as exc:
                rest = rest[exc.args[0] :]
            version, method = self._parser.get_http_version(), self._parser.get_method()
            if method == b"CONNECT":
                raise httptools.HttpParserInvalidMethodError("this is no proxy")
            fields = [b"%b: %b" % field for field in self._headers if field[0] != b"upgrade"]
            start = b"%b %b HTTP/%b" % (method, self._url, version.encode("ascii"))
            self._parser = self._new_parser()
            self._parser.feed_data(b"\r\n".join((start, *fields, b"", b"")))

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # An answer may come before the rest of what a client sends on a connection that is to be closed.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _close(self) -> None:
        self._unsent.flush()
        self._transport.close()

    def _start(self, exchange: Exchange, scope: Scope) -> None:
        self._answering = exchange
        task = self._loop.create_task(exchange.run(self._app, scope))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def _target_of(self, url: bytes) -> dict[str, Any]:
        """The same dictionary for the same address as before: clients ask for one again and again."""
        if self._target[0] != url:
            parsed = httptools.parse_url(url)
            raw = parsed.path or b""
            path = raw.decode("ascii")
            found = {
                "path": self._root_path + (unquote(path) if "%" in path else path),
                "raw_path": self._root_path.encode("ascii") + raw,
                "query_string": parsed.query or b"",
            }
            self._target = (url, found)
        return self._target[1]

    def _look_at_idleness(self) -> None:
        """One timer a connection, not one a request."""
        self._idle = None
        if self._idle_since is None:
            return
        rest_s = self._idle_since + self._idle_s - self._loop.time()
        if rest_s <= 0:
            self._close()
        else:
            self._idle = self._loop.call_later(rest_s, self._look_at_idleness)

    def _watch_head(self) -> None:
        self._too_slow = self._loop.call_later(self._limits.timeout_s, self._refuse_head, b"408 Request Timeout")

    def _head_is_over(self) -> None:
        self._head_bytes = 0
        if self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None

    def _refuse_head(self, status: bytes) -> None:
        """One that comes while an answer is on its way may wait for its end."""
        self._head_is_over()
        if self._answering is None:
            self._refuse(status)

    def _refuse(self, status: bytes, reason: bytes = b"") -> None:
        """Where an answer has begun it may end: nothing is written into it."""
        if self._answering is not None and self._answering.is_started:
            self._is_ending = True
        elif not self._transport.is_closing():
            length = str(len(reason)).encode()
            lines = (b"HTTP/1.1 " + status, b"connection: close", b"content-length: " + length, b"", reason)
            self.write(b"\r\n".join(lines))
            self._close()
