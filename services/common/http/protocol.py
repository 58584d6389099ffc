"""Serves an ASGI application over HTTP/1.1, with the limits that a server on an open network needs.

The size of a request's head is limited, and the time for its head, its body, idle connections and data after a
response. Everything that one iteration of the event loop writes is sent together at its end. `httptools` parses
requests, `Exchange` writes responses, `Listener` accepts connections, and uvicorn's `Server` waits for running requests
when it stops.
"""

import asyncio
import logging
from collections import deque
from typing import Any, cast
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from baton_serve.services.common.http.exchange import EXTENSION, App, Exchange, Message, Scope
from baton_serve.services.common.http.late_timer import LateTimer
from baton_serve.services.common.http.slots import HttpLimits, Slot
from baton_serve.services.common.http.write_coalescer import WriteCoalescer

logger = logging.getLogger(__name__)


_REFUSAL = "baton.refusal"
"""Key of the scope for the reason why a request is answered with status 400 and not by the application."""
_NO_HOST = b"A request of HTTP/1.1 must have exactly one Host header."


class HttpProtocol(asyncio.Protocol):
    """One connection, on the event loop. Implements `services.common.http.exchange.HttpConnection`.

    Clients may send several requests without waiting (pipelining). They are answered one after the other.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        *,
        limits: HttpLimits,
        writes: WriteCoalescer,
        slot: Slot,
    ) -> None:
        """`config` and `server_state` belong to uvicorn's server. `slot` is released when the connection has ended."""
        self.is_write_paused = False
        self._app = cast(App, config.loaded_app)
        self._root_path = config.root_path
        self._server = server_state
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._writes = writes
        self._slot = slot
        self._parser = self._new_parser()
        self._is_in_head = True
        self._num_parsed = 0
        """Number of heads, pieces of bodies and ends of requests that the parser has found so far."""
        self._num_hosts = 0
        self._head_bytes = 0
        self._head_since = 0.0
        self._timer = LateTimer(self._loop)
        """The deadline for the next action of the client."""
        self._url = b""
        self._target: tuple[bytes, dict[str, Any]] = (b"", {})
        self._headers: list[tuple[bytes, bytes]] = []
        self._default: tuple[object, bytes] = (None, b"")
        self._answering: Exchange | None = None
        self._receiving: Exchange | None = None
        self._pipelined: deque[tuple[Exchange, Scope]] = deque()
        self._is_read_paused = False
        self._is_ending = False
        self._ignores_input = False
        """True if input is not parsed any more, because the connection is about to be closed."""
        self._lingers_until: float | None = None
        """Time until which input is discarded after a response that was sent before its request was complete."""
        self._lingering_bytes = 0
        self._writability: asyncio.Event | None = None

    # The following methods are called by asyncio's transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pending_writes = self._writes.of(self._transport)
        self.write = self._pending_writes.add
        self._server.connections.add(cast(Any, self))
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "server": get_local_addr(self._transport),
            "client": get_remote_addr(self._transport),
            "scheme": "https" if is_ssl(self._transport) else "http",
            "root_path": self._root_path,
        }
        self._slot.on_evicted = self._transport.abort
        self._timer.set(self._loop.time() + self._limits.head_timeout_s, self._on_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(cast(Any, self))
        self._slot.release()
        self._timer.close()
        self._give_up_exchanges()
        # Tasks that wait in `writable` must wake up, to find that the client is gone.
        self.resume_writing()
        # The parser refers to this object. Without the cycle its memory is freed at once, not by the collector.
        del self._parser

    def data_received(self, data: bytes) -> None:
        if self._lingers_until is not None:
            self._lingering_bytes += len(data)
            if self._lingering_bytes > self._limits.lingering_bytes:
                self._close()
                return
        if self._ignores_input:
            self._await_input()
            return
        num_parsed = self._num_parsed
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(b"400 Bad Request", b"Invalid HTTP request received.")
            return
        # If the parser has found nothing, all of `data` belongs to an incomplete head, or in a chunked body to the
        # extension of a chunk or to trailers. All are limited: the parser keeps an incomplete line in memory and copies
        # it with each piece of data.
        if self._num_parsed == num_parsed:
            if not self._head_bytes:
                self._head_since = self._loop.time()
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse(b"431 Request Header Fields Too Large")
                return
        self._await_input()

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
        """Close the connection after the response that is being written. Called by uvicorn's server when it stops."""
        self._is_ending = True
        if self._answering is None:
            self._close()

    # The following methods are called by httptools' parser.

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._num_hosts = 0
        self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # Trailers after a chunked body are ignored.
        name = name.lower()
        self._headers.append((name, value))
        if name == b"host":
            self._num_hosts += 1
        elif name == b"expect":
            self._expects_continue = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            return  # `_feed` parses this head again, without the upgrade.
        self._is_in_head = False
        self._num_parsed += 1
        self._head_bytes = 0
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
        # RFC 9112, section 3.2: two Host headers can make a proxy and this server see different hosts.
        if self._num_hosts != 1 and (self._num_hosts or version != "1.0"):
            exchange.keeps_alive = False
            scope[_REFUSAL] = _NO_HOST
        if self._answering is None:
            self._start(exchange, scope)
        else:
            # A pipelined request. Reading pauses, so that a client cannot queue requests without end.
            self._pipelined.append((exchange, scope))
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._num_parsed += 1
        self._head_bytes = 0
        if self._receiving is not None:
            self._receiving.on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = True
        self._num_parsed += 1
        self._head_bytes = 0
        if self._receiving is not None:
            self._receiving.on_received()
            self._receiving = None
            self._lingers_until = None

    # The following methods are called by exchanges; `HttpConnection` describes them.

    def default_head(self) -> bytes:
        # uvicorn replaces the list once a second, because of the Date header.
        headers = self._server.default_headers
        if self._default[0] is not headers:
            self._default = (headers, b"".join(b"%b: %b\r\n" % (name, value) for name, value in headers))
        return self._default[1]

    async def writable(self) -> None:
        while self.is_write_paused:
            self._writability = self._writability or asyncio.Event()
            self._writability.clear()
            try:
                async with asyncio.timeout(self._limits.send_timeout_s):
                    await self._writability.wait()
            except TimeoutError:
                # Waiting without end would keep the connection and its slot for a client that never reads.
                self._transport.abort()
                return

    def pause_reading(self) -> None:
        if not self._is_read_paused:
            self._is_read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_read_paused and not self._pipelined:
            self._is_read_paused = False
            self._transport.resume_reading()
        if self._receiving is not None and not self._timer.is_set:
            self._await_input()

    def break_off(self) -> None:
        # A client that does not read would keep a closing connection open, so its connection is aborted.
        if self.is_write_paused:
            self._transport.abort()
        else:
            self._close()

    def completed(self, exchange: Exchange) -> None:
        self._answering = None
        if self._is_ending or not exchange.keeps_alive:
            if self._receiving is None and not self._ignores_input:
                self._close()
            else:
                self._linger_and_close()
            return
        if self._pipelined:
            self._start(*self._pipelined.popleft())
        elif self._receiving is not None:
            self._linger()
        self.resume_reading()
        self._await_input()

    def _feed(self, data: bytes) -> None:
        """Parse `data`. Raises `httptools.HttpParserError`.

        A request to switch to another protocol, such as h2c, is answered in HTTP/1.1, as RFC 9110 allows.
        """
        # The parser would take everything after such a head for the other protocol. So a new parser gets the head again
        # without the Upgrade header, and then the rest of the data.
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as exc:
                rest = rest[exc.args[0] :]
            version, method = self._parser.get_http_version(), self._parser.get_method()
            if method == b"CONNECT":
                raise httptools.HttpParserInvalidMethodError("this server is not a proxy")
            fields = [b"%b: %b" % field for field in self._headers if field[0] != b"upgrade"]
            start = b"%b %b HTTP/%b" % (method, self._url, version.encode("ascii"))
            self._parser = self._new_parser()
            self._parser.feed_data(b"\r\n".join((start, *fields, b"", b"")))

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # A response may be sent before the client has sent everything. After "connection: close" the parser must not
        # treat that rest as an error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _close(self) -> None:
        """Close the connection. Data that is not written yet is still sent, for at most `send_timeout_s`."""
        self._pending_writes.flush()
        self._transport.close()
        self._slot.idles()
        self._timer.set(self._loop.time() + self._limits.send_timeout_s, self._transport.abort)

    def _linger(self) -> None:
        """Discard input from now on: it belongs to a request that was answered before it was complete."""
        self._lingers_until = self._loop.time() + self._limits.lingering_time_s
        self._lingering_bytes = 0

    def _linger_and_close(self) -> None:
        """Close the connection of a client that still sends, after discarding its data for a while.

        If it were closed at once, TCP would reset it, and the client would lose the response.
        """
        self._pending_writes.flush()
        if self._transport.is_closing():
            return
        self._ignores_input = True
        self._linger()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._pipelined.clear()
        self.resume_reading()
        self._await_input()

    def _await_input(self) -> None:
        """Set the deadline for the client's next data, and report to the slot what the connection is doing."""
        if self._receiving is None and self._answering is not None:
            self._slot.works()
            self._timer.clear()
            return
        if self._transport.is_closing():
            return
        now, limits = self._loop.time(), self._limits
        if self._lingers_until is not None:
            self._slot.idles()
            self._timer.set(min(now + limits.lingering_timeout_s, self._lingers_until), self._close)
        elif self._receiving is not None:
            self._slot.works()
            # Here the client waits for the server and not the server for the client.
            if self._is_read_paused or self._receiving.expects_continue:
                self._timer.clear()
            else:
                self._timer.set(now + limits.body_timeout_s, self._on_slow_body)
        elif self._head_bytes:
            self._slot.opens()
            self._timer.set(self._head_since + limits.head_timeout_s, self._on_slow_head)
        else:
            self._slot.idles()
            self._timer.set(now + limits.keep_alive_s, self._close)

    def _on_slow_head(self) -> None:
        self._refuse(b"408 Request Timeout")

    def _on_slow_body(self) -> None:
        self._refuse(
            b"408 Request Timeout",
            b"The client sent no data of the request's body for %g seconds." % self._limits.body_timeout_s,
        )

    def _give_up_exchanges(self) -> None:
        self._pipelined.clear()
        for exchange in {self._answering, self._receiving} - {None}:
            assert exchange is not None
            exchange.on_lost()
        self._answering = self._receiving = None

    def _start(self, exchange: Exchange, scope: Scope) -> None:
        self._answering = exchange
        app = _refuse_head if _REFUSAL in scope else self._app
        task = self._loop.create_task(exchange.run(app, scope))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def _target_of(self, url: bytes) -> dict[str, Any]:
        """Return the parts of the scope that depend on the URL.

        The last result is kept, because a client mostly requests the same path on a connection.
        """
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

    def _refuse(self, status: bytes, reason: bytes = b"") -> None:
        """Answer a bad request with an error status and close the connection.

        If an earlier request is still being answered, its response is completed in place of the error.
        """
        if self._answering is not None and self._answering is not self._receiving:
            self._is_ending = self._ignores_input = True
            self._receiving = None
            self._timer.clear()
        elif self._answering is not None and self._answering.is_started:
            self._transport.abort()  # A response that has begun cannot become an error.
        elif not self._transport.is_closing():
            length = str(len(reason)).encode()
            lines = (b"HTTP/1.1 " + status, b"connection: close", b"content-length: " + length, b"", reason)
            self.write(b"\r\n".join(lines))
            self._give_up_exchanges()
            self._linger_and_close()


async def _refuse_head(scope: Scope, receive: Any, send: Any) -> None:
    reason: bytes = scope[_REFUSAL]
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(reason)).encode())]
    start: Message = {"type": "http.response.start", "status": 400, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": reason})
