"""Serves an ASGI application over HTTP/1.1 on one connection: pipelining, keep-alive, limits.

The size of a request's head is limited, and the time for its head, its body, idle connections and data after a
response. Everything that one iteration of the event loop writes is sent together at its end. `httptools` parses
requests, `Exchange` writes responses, `Listener` accepts connections, and uvicorn's `Server` waits for running requests
when it stops.
"""

import asyncio
import logging
from collections import deque
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.server import ServerState

from baton_serve.services.common.http.client_deadlines import ClientDeadlines
from baton_serve.services.common.http.connection_slots import HttpLimits, Slot
from baton_serve.services.common.http.exchange import App, Exchange, Message, Scope
from baton_serve.services.common.http.request_parser import HeadTooLargeError, RequestHead, RequestParser, ScopeBuilder
from baton_serve.services.common.http.write_coalescer import WriteCoalescer

logger = logging.getLogger(__name__)


_REFUSAL = "baton.refusal"
"""Key of the scope for the reason why a request is answered with status 400 and not by the application."""
_MAX_PIPELINED = 64
"""Largest number of requests of a connection that wait for the answer to an earlier one."""
_NO_HOST = b"A request of HTTP/1.1 must have exactly one Host header."


class HttpProtocol(asyncio.Protocol):
    """One HTTP/1.1 connection of a client, on the event loop.

    Implements `services.common.http.exchange.HttpConnection` and `services.common.http.request_parser.RequestConsumer`.
    Clients may send several requests without waiting (pipelining); the requests are answered one after the other.
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
        """Create the protocol of one connection. `config` and `server_state` belong to uvicorn's server. `writes`
        collects what is sent. `slot` is the connection's place among the limited number; it is freed when the
        connection has ended.
        """
        self.is_write_paused = False
        self._app = cast(App, config.loaded_app)
        self._root_path = config.root_path
        self._server = server_state
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._writes = writes
        self._slot = slot
        self._parser = RequestParser(self, max_head_bytes=limits.max_head_bytes, clock=self._loop.time)
        self._deadlines = ClientDeadlines(limits, slot, self._loop)
        self._default: tuple[object, bytes] = (None, b"")
        self._answering: Exchange | None = None
        self._receiving: Exchange | None = None
        self._pipelined: deque[tuple[Exchange, Scope]] = deque()
        self._is_read_paused = False
        self._is_ending = False
        self._ignores_input = False
        """True if input is not parsed any more, because the connection is about to be closed."""
        self._writability: asyncio.Event | None = None

    # The following methods are called by asyncio's transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pending_writes = self._writes.of(self._transport)
        self.write = self._pending_writes.add
        self._server.connections.add(cast(Any, self))
        self._scopes = ScopeBuilder(self._transport, self._root_path)
        self._slot.on_evicted = self._transport.abort
        self._deadlines.await_first_head(self._on_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(cast(Any, self))
        self._deadlines.close()
        self._give_up_exchanges()
        # Tasks that wait in `writable` must wake up, to find that the client is gone.
        self.resume_writing()
        self._parser.close()

    def data_received(self, data: bytes) -> None:
        if self._deadlines.is_lingering and not self._deadlines.discard(len(data)):
            self._close()
            return
        if not self._ignores_input:
            try:
                self._parser.feed(data)
            except httptools.HttpParserError:
                self._refuse(b"400 Bad Request", b"Invalid HTTP request received.")
                return
            except HeadTooLargeError:
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

    # The following methods are called by the parser.

    def on_head(self, head: RequestHead) -> None:
        exchange = Exchange(
            self, is_http_10=head.version == "1.0", is_head=head.method == "HEAD", keeps_alive=head.keeps_alive
        )
        exchange.expects_continue = head.expects_continue
        scope = self._scopes.scope(head, exchange)
        self._receiving = exchange
        if not head.has_valid_host:
            exchange.keeps_alive = False
            scope[_REFUSAL] = _NO_HOST
        if self._answering is None:
            self._start(exchange, scope)
        else:
            # A pipelined request. Reading pauses, so that a client cannot queue requests without end. The bytes
            # that have arrived already may hold thousands of short heads, which would block the event loop.
            if len(self._pipelined) >= _MAX_PIPELINED:
                raise ValueError("too many requests before the first answer")
            self._pipelined.append((exchange, scope))
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        if self._receiving is not None:
            self._receiving.on_body(body)

    def on_request_complete(self) -> None:
        if self._receiving is not None:
            self._receiving.on_received()
            self._receiving = None
            if self._deadlines.is_lingering:
                self._deadlines.end_lingering()

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

    def keep_response(self, num_bytes: int, since: float) -> bool:
        limits = self._limits
        # Each piece has its own deadline (`writable`), but a client that takes one just in time could keep a long
        # response in memory for hours.
        limit_s = limits.send_timeout_s + num_bytes / limits.min_receive_bytes_per_s
        if num_bytes and self._loop.time() - since > limit_s:
            logger.info(
                "closed the connection from %s, which had not received %d bytes of a response within %d s",
                self._slot.address,
                num_bytes,
                limit_s,
            )
            self._transport.abort()
        self._slot.keeps_response(num_bytes)
        return not self._transport.is_closing()

    def pause_reading(self) -> None:
        if not self._is_read_paused:
            self._is_read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_read_paused and not self._pipelined:
            self._is_read_paused = False
            self._transport.resume_reading()
        if self._receiving is not None and not self._deadlines.is_set:
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
            # The rest of an answered request is discarded as it comes.
            self._deadlines.begin_lingering()
        self.resume_reading()
        self._await_input()

    def _close(self) -> None:
        """Close the connection. Data that is not written yet is still sent, for at most `send_timeout_s`."""
        self._pending_writes.flush()
        self._transport.close()
        self._deadlines.await_close(self._transport.abort)

    def _linger_and_close(self) -> None:
        """Close the connection of a client that still sends data, after discarding its data for a while (see
        `HttpLimits`).

        If it were closed immediately, TCP would reset it, and the client would lose the response.
        """
        self._pending_writes.flush()
        if self._transport.is_closing():
            return
        self._ignores_input = True
        self._deadlines.begin_lingering()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._pipelined.clear()
        self.resume_reading()
        self._await_input()

    def _await_input(self) -> None:
        """Set the deadline for what the client must send or read next, and record in the connection's slot what it is
        doing.
        """
        deadlines = self._deadlines
        if self._receiving is None and self._answering is not None:
            deadlines.await_server()
        elif self._transport.is_closing():
            pass  # `_close` has set the deadline.
        elif deadlines.is_lingering:
            deadlines.await_discarded(self._close)
        elif self._receiving is not None:
            # Here the client waits for the server and not the server for the client.
            if self._is_read_paused or self._receiving.expects_continue:
                deadlines.await_server()
            else:
                deadlines.await_body(self._on_slow_body)
        elif self._parser.head_since is not None:
            deadlines.await_rest_of_head(self._parser.head_since, self._on_slow_head)
        else:
            deadlines.await_request(self._close)

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

    def _refuse(self, status: bytes, reason: bytes = b"") -> None:
        """Answer a bad request with an error (`status` line, `reason` as body) and close the connection.

        If an earlier request is still being answered, its response is completed instead, and the error is not sent.
        """
        if self._answering is not None and self._answering is not self._receiving:
            self._is_ending = self._ignores_input = True
            self._receiving = None
            self._deadlines.await_server()
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
