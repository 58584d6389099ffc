"""The little of HTTP that the hot path needs, on ASGI: read a body, answer, stream, notice a client that left."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any, TypeVar

import msgspec

from baton_serve.services.common.http.exchange import EXTENSION, Exchange
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
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024
_WATCH_AFTER_S = 0.05
_EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"


class RequestLimits(msgspec.Struct, frozen=True):
    """`slow_client_s`: for a body to arrive, and for a client to take what it is sent."""

    max_body_bytes: int
    slow_client_s: float


class RequestContext(msgspec.Struct, frozen=True):
    """What the outermost layer found in the headers. `arrived_at` is of the router's monotonic clock."""

    request_id: str
    arrived_at: float
    explain: bool
    limits: RequestLimits
    trace_headers: Mapping[str, str]
    caller: Caller = ANONYMOUS
    slo: Slo = NO_SLO
    exchange: Exchange | None = None
    """Where the server is this repository's own."""

    def attach(self, scope: Scope) -> None:
        scope[_CONTEXT] = self

    @staticmethod
    def is_attached(scope: Scope) -> bool:
        """False where the headers were refused."""
        return _CONTEXT in scope

    @staticmethod
    def of(scope: Scope) -> "RequestContext":
        context = scope[_CONTEXT]
        assert isinstance(context, RequestContext)
        return context


def header(scope: Scope, name: bytes) -> str | None:
    """`name` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def exchange_of(scope: Scope) -> Exchange | None:
    exchange = scope.get("extensions", {}).get(EXTENSION)
    assert exchange is None or isinstance(exchange, Exchange)
    return exchange


def check_media_type(scope: Scope) -> None:
    """Raise `MediaTypeError` for a body that is not said to be JSON: one that is said to be a text, a form or nothing
    is what any web page may have a browser send here without asking first (CORS)."""
    given = header(scope, b"content-type")
    kind = (given or "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    found = f"{given[:100]!r} is no JSON" if given else "there is none"
    raise MediaTypeError(f"the body's Content-Type must be application/json, and {found}: send that header (curl: -H)")


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Raises `MediaTypeError`; and `RequestTooLargeError`, after reading to the end: a client that still sends would
    not see the answer."""
    check_media_type(scope)
    context = RequestContext.of(scope)
    limits = context.limits
    limit = limits.max_body_bytes
    chunks: list[bytes] = []
    size = 0
    deadline = asyncio.get_running_loop().time() + limits.slow_client_s
    while True:
        # The server itself waits only so long for the first piece, which is mostly all and mostly there.
        is_timed = context.exchange is not None and not chunks
        message = await receive() if is_timed else await _receive_in_time(receive, deadline, limits)
        if message["type"] == "http.disconnect":
            break
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        else:
            chunks.clear()
        if not message.get("more_body", False) or size > _MAX_DISCARDED_BYTES:
            break
    if size > limit:
        raise RequestTooLargeError(f"the body has more than {limit} bytes, the limit of this server")
    return b"".join(chunks)


async def _receive_in_time(receive: Receive, deadline: float, limits: RequestLimits) -> MutableMapping[str, Any]:
    try:
        async with asyncio.timeout_at(deadline):
            return await receive()
    except TimeoutError:
        raise RequestTimeoutError(f"the body did not arrive within {limits.slow_client_s:g} s") from None


async def send_json(
    send: Send, body: object, *, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    content = msgspec.json.encode(body)
    fields = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": fields + (headers or [])})
    await send({"type": "http.response.body", "body": content})


async def send_error(send: Send, error: ApiError, body: object = None) -> None:
    """`body` is one in another shape than OpenAI's."""
    headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send_json(send, error.body() if body is None else body, status=error.status, headers=headers)


class EventStream:
    """Server-sent events. The head of the response leaves with the first of them; then `exchange`, where there is one,
    takes events at once as long as the client keeps up."""

    def __init__(self, send: Send, *, slow_client_s: float, exchange: Exchange | None = None) -> None:
        self._send = send
        self._slow_client_s = slow_client_s
        self.exchange = exchange
        self.is_started = False

    async def write(self, events: bytes) -> None:
        """`events` is one or more whole events, each `data: ...` and an empty line. Raises `ClientGoneError` when
        the client takes nothing for a long time."""
        if self.exchange is not None and self.exchange.is_writable:
            self.exchange.write(events)
        else:
            await self._send_in_time(events, is_last=False)

    async def end(self, last: bytes = DONE) -> None:
        """Raises `ClientGoneError`, as `write`."""
        await self._send_in_time(last, is_last=True)

    async def _send_in_time(self, events: bytes, *, is_last: bool) -> None:
        if self.exchange is not None and self.exchange.is_writable:  # a timer takes longer than this does
            await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})
            return
        try:
            async with asyncio.timeout(self._slow_client_s):
                if not self.is_started:
                    self.is_started = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
                await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})
        except TimeoutError:
            raise ClientGoneError("the client takes nothing of what it is sent") from None


async def while_connected(work: Coroutine[Any, Any, T], exchange: Exchange | None) -> T:
    """Return what `work` returns. Where the server can tell that the client has left, `work` is cancelled then.
    Raises `ClientGoneError`."""
    if exchange is None:
        return await work
    task = asyncio.ensure_future(work)

    def leave() -> None:
        task.cancel()

    exchange.watch(leave)
    try:
        return await task
    except asyncio.CancelledError:
        if exchange.is_gone:
            raise ClientGoneError("the client left before its request was read") from None
        raise
    finally:
        exchange.watch(None)


class DisconnectWatch:
    """Calls `on_disconnect` when the client goes away before the `with` block ends. The body has been read.

    Where only `receive` can tell, it begins a little late: most short answers are over by then, and a task for each
    would cost more than it finds.
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
