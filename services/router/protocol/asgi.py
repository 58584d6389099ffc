"""Read bodies up to their largest size, send JSON and server-sent events, and notice that a client has disconnected.

They work with every ASGI server. On this repository's own server (`services.common.http`) a request also has an
`Exchange`, which writes events and reports a disconnect without going through ASGI's `send` and `receive`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any, TypeVar

import msgspec

from baton_serve.services.common.http.exchange import EXTENSION, Exchange
from baton_serve.services.router.protocol.byte_budget import BodyReservation
from baton_serve.services.router.protocol.caller import ANONYMOUS, NO_SLO, Caller, Slo
from baton_serve.services.router.protocol.errors import (
    ApiError,
    ClientGoneError,
    MediaTypeError,
    RequestTimeoutError,
    RequestTooLargeError,
)

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Any]

_CONTEXT = "baton"
"""Key of the `RequestContext` in the ASGI scope."""

_MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""Bytes of a body that are read although it is longer than the limit. After them the error is sent in any case."""

_WATCH_AFTER_S = 0.05
"""Delay in seconds before `DisconnectWatch` starts a task."""

_EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise buffer the events and send them late.
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"
"""The event that ends a stream of OpenAI's API."""


class RequestLimits(msgspec.Struct, frozen=True):
    """Limits for one HTTP request: the size of its body, and the time in which its client must send and receive.

    `slow_client_s` is the longest time in seconds in which the body must arrive, and in which the client must accept
    each part of the response.
    """

    max_body_bytes: int
    slow_client_s: float


class RequestContext(msgspec.Struct, frozen=True):
    """Describes one HTTP request to all endpoints: its id, its caller and other values that the `Gateway` reads from
    the headers.

    `arrived_at` is a time of the router's monotonic clock, in seconds.
    """

    request_id: str
    arrived_at: float
    explain: bool
    limits: RequestLimits
    trace_headers: Mapping[str, str]
    caller: Caller = ANONYMOUS
    slo: Slo = NO_SLO
    body: BodyReservation | None = None
    """The memory of the request's body, whose creator releases it; None in tests of single endpoints."""
    exchange: Exchange | None = None
    """The request's connection, if the server is this repository's own; None on other ASGI servers."""

    def attach(self, scope: Scope) -> None:
        """Store the context in the ASGI scope of its request, where `of` finds it."""
        scope[_CONTEXT] = self

    @staticmethod
    def is_attached(scope: Scope) -> bool:
        """Return whether the request has a context. It has none if the `Gateway` has rejected its headers."""
        return _CONTEXT in scope

    @staticmethod
    def of(scope: Scope) -> "RequestContext":
        """Return the `RequestContext` that `attach` has stored in the request's ASGI scope."""
        context = scope[_CONTEXT]
        assert isinstance(context, RequestContext)
        return context


def header(scope: Scope, name: bytes) -> str | None:
    """Return the value of the request's first header called `name`, or None without such a header. `name` must be in
    lower case, as in ASGI.
    """
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def authorization(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the value of the Authorization header, or of `x-api-key` in the form `Bearer KEY`; None if the request
    carries no API key.
    """
    # Anthropic's clients send the bare key in a header of their own.
    key = headers.get(b"x-api-key")
    value = headers.get(b"authorization") if key is None else b"Bearer " + key
    return None if value is None else value.decode("latin-1")


def exchange_of(scope: Scope) -> Exchange | None:
    """Return the connection of a request, to which Baton's own HTTP server lets endpoints write directly, or None on
    other servers.
    """
    exchange = scope.get("extensions", {}).get(EXTENSION)
    assert exchange is None or isinstance(exchange, Exchange)
    return exchange


def check_media_type(scope: Scope) -> None:
    """Raise `MediaTypeError` unless the request's Content-Type header says that the body is JSON."""
    # Any web page can make a browser send a body as text, as a form or without a type to this server, without a CORS
    # preflight. Requiring JSON forces the preflight, so such pages cannot use a server on the user's own network.
    given = header(scope, b"content-type")
    if given == "application/json":
        return
    kind = (given or "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    found = f"it is {given[:100]!r}" if given else "the request has none"
    raise MediaTypeError(
        f"the Content-Type header must be application/json, but {found}: send it (curl: -H 'Content-Type: "
        "application/json')"
    )


def read_body(scope: Scope, receive: Receive) -> Awaitable[bytes]:
    """Read the whole body of a request, which must be JSON. If the client disconnects, return the part that arrived.

    Raises `MediaTypeError` if the Content-Type is not JSON, `RequestTooLargeError` if the body is longer than the
    limit, `RateLimitError` if the bodies of other requests leave too little memory, and `RequestTimeoutError` if it
    does not arrive in time.
    """
    check_media_type(scope)
    limit = RequestContext.of(scope).limits.max_body_bytes
    return _read_whole(scope, receive, limit, flag="--max-request-bytes")


async def read_form(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Read the whole body of a request that sends a form, of at most `max_bytes`. The caller checks its type and
    origin. Raises the same errors as `read_body`, except `MediaTypeError`.
    """
    return await _read_whole(scope, receive, max_bytes, flag="--max-audio-bytes")


async def _read_whole(scope: Scope, receive: Receive, limit: int, *, flag: str) -> bytes:
    """Read the request's body of at most `limit` bytes. `flag` is the router's flag that sets this limit, for the
    error. Raises the errors of `read_body`.
    """
    context = RequestContext.of(scope)
    limits = context.limits
    chunks: list[bytes] = []
    size = 0
    deadline = asyncio.get_running_loop().time() + limits.slow_client_s
    while True:
        # This repository's own server limits the time until the first piece itself. That piece is usually the whole
        # body and has usually arrived, so that no timer is needed for most requests.
        is_timed = context.exchange is not None and not chunks
        message = await receive() if is_timed else await _receive_in_time(receive, deadline, limits)
        if message["type"] == "http.disconnect":
            break
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= limit:
            if context.body is not None:
                await context.body.grow(size)
            chunks.append(chunk)
        else:
            # Go on reading but keep nothing: a client that is still sending would not see an early error response.
            chunks.clear()
        if not message.get("more_body", False) or size > _MAX_DISCARDED_BYTES:
            break
    if size > limit:
        raise RequestTooLargeError(f"the body has more than {limit} bytes, the limit of this server ({flag})")
    return b"".join(chunks)


async def _receive_in_time(receive: Receive, deadline: float, limits: RequestLimits) -> MutableMapping[str, Any]:
    try:
        async with asyncio.timeout_at(deadline):
            return await receive()
    except TimeoutError:
        raise RequestTimeoutError(
            f"the body of the request did not arrive within {limits.slow_client_s:g} s (--slow-client-s)"
        ) from None


async def send_json(
    send: Send, body: object, *, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Send a whole response with `body` encoded as JSON. `headers` are sent beside the content type and length."""
    await send_encoded(send, msgspec.json.encode(body), status=status, headers=headers)


async def send_encoded(
    send: Send, content: bytes, *, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Send a whole response whose body is the JSON `content`.

    A slow client keeps it in memory for minutes, so callers keep no second copy of a long one.
    """
    fields = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": fields + (headers or [])})
    await send({"type": "http.response.body", "body": content})


async def send_error(send: Send, error: ApiError, body: object = None) -> None:
    """Send an error response. `body` is its body in the format of another API; None: OpenAI's format."""
    headers = []
    if error.retry_after_s is not None:
        # HTTP knows whole seconds only, and 0 would make clients retry immediately.
        headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send_json(send, error.body() if body is None else body, status=error.status, headers=headers)


class EventStream:
    """Sends one response as server-sent events (SSE).

    The response headers are sent with the first event, so a request that fails before it still gets an HTTP status.
    After that, on Baton's own HTTP server, events are written directly to `exchange`, the connection, while the client
    keeps up.
    """

    def __init__(self, send: Send, *, slow_client_s: float, exchange: Exchange | None = None) -> None:
        self._send = send
        self._slow_client_s = slow_client_s
        self.exchange = exchange
        self.is_started = False

    async def write(self, events: bytes) -> None:
        """Send one or more whole events, each of which is `data: ...` followed by an empty line.

        Raises `ClientGoneError` if the client accepts no data for `slow_client_s` seconds.
        """
        if self.exchange is not None and self.exchange.is_writable:
            self.exchange.write(events)
        else:
            await self._send_in_time(events, is_last=False)

    async def end(self, last: bytes = DONE) -> None:
        """Send the events in `last` and end the response. Raises `ClientGoneError` as `write` does."""
        await self._send_in_time(last, is_last=True)

    async def _send_in_time(self, events: bytes, *, is_last: bool) -> None:
        # While the connection is writable the send returns immediately. Setting a timer would take longer than the
        # send.
        if self.exchange is not None and self.exchange.is_writable:
            await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})
            return
        try:
            async with asyncio.timeout(self._slow_client_s):
                if not self.is_started:
                    self.is_started = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
                await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})
        except TimeoutError:
            raise ClientGoneError(
                f"the client accepted no data for {self._slow_client_s:g} s (--slow-client-s)"
            ) from None


async def while_connected(work: Coroutine[Any, Any, T], exchange: Exchange | None) -> T:
    """Run `work` and return its result, but cancel it if the client of the connection `exchange` disconnects.

    Raises `ClientGoneError` if it was cancelled for that reason. With `exchange` None a disconnect is not detected.
    """
    if exchange is None:
        return await work
    task = asyncio.ensure_future(work)

    def leave() -> None:
        task.cancel()

    exchange.watch(leave)
    try:
        return await task
    except asyncio.CancelledError:
        # The cancellation may also come from above, for example when the server shuts down: only a disconnect of the
        # client is translated.
        if exchange.is_gone:
            raise ClientGoneError("the client disconnected before its request was prepared") from None
        raise
    finally:
        # `work` is over. `DisconnectWatch` detects a disconnect during the answer.
        exchange.watch(None)


class DisconnectWatch:
    """A context manager that calls `on_disconnect` if the client of a request disconnects before the `with` block ends.

    Use it after the body has been read: on other servers than Baton's it consumes the messages of ASGI's `receive`.
    """

    def __init__(self, receive: Receive, on_disconnect: Callable[[], None], exchange: Exchange | None = None) -> None:
        self._receive = receive
        self._on_disconnect = on_disconnect
        self._exchange = exchange
        self._begin: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        if self._exchange is not None:
            self._exchange.watch(self._on_disconnect)
        else:
            # Most short answers end within this delay. Starting a task for each of them would cost more than the few
            # disconnects that it would find.
            self._begin = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._start)

    def __exit__(self, *exc_info: object) -> None:
        if self._exchange is not None:
            self._exchange.watch(None)
        if self._begin is not None:
            self._begin.cancel()
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._on_disconnect()
