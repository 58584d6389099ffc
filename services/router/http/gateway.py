"""The outermost layer: request ids, API keys, the way to the endpoints, and errors in OpenAI's shape. Plain ASGI."""

import importlib
import inspect
import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, cast

from starlette.middleware.base import BaseHTTPMiddleware

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.exchange import EXTENSION
from baton_serve.services.common.http.server import AsgiApp
from baton_serve.services.common.logs import request_logs
from baton_serve.services.common.tracing import trace_headers
from baton_serve.services.router.api.messages.answer import MESSAGES_PATHS as MESSAGES_PATHS
from baton_serve.services.router.api.messages.answer import error_answer
from baton_serve.services.router.protocol.asgi import (
    Asgi,
    Receive,
    RequestContext,
    RequestLimits,
    Scope,
    Send,
    exchange_of,
    send_error,
)
from baton_serve.services.router.protocol.caller import ANONYMOUS, NO_SLO, Caller, Slo
from baton_serve.services.router.protocol.errors import (
    ApiError,
    AuthenticationError,
    BadRequestError,
    ClientGoneError,
    InternalError,
)
from baton_serve.services.router.quota.api_keys import ApiKeys
from baton_serve.services.router.quota.audit_log import AuditLog
from baton_serve.services.router.requests.metrics import RouterMetrics


def with_middleware(app: AsgiApp, paths: Sequence[str]) -> AsgiApp:
    """The last one is the outermost. A class is called with the application, a coroutine function for each request with
    Starlette's request and what calls the next one. Raises `ConfigurationError`."""
    if not paths:
        return app
    wrapped: AsgiApp = _Plain(app)
    for path in paths:
        found = _imported(path)
        if inspect.iscoroutinefunction(found):
            wrapped = BaseHTTPMiddleware(wrapped, dispatch=found)
        elif inspect.isclass(found):
            wrapped = cast(Callable[[AsgiApp], AsgiApp], found)(wrapped)
        else:
            raise ConfigurationError(f"--middleware {path}: neither a class nor a coroutine function")
    return wrapped


class _Plain:
    """All of an answer goes through `send`, so that a middleware sees it."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        others = {name: value for name, value in (scope.get("extensions") or {}).items() if name != EXTENSION}
        await self._app({**scope, "extensions": others}, receive, send)


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigurationError(f"--middleware {path}: an import path is wanted, package.module.Name")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as exc:
        raise ConfigurationError(f"--middleware {path}: {exc}") from exc


logger = logging.getLogger(__name__)

_random = random.Random()
"""Ids must differ, not be secret: the system's generator costs a system call each."""


_OPEN_PATHS = frozenset(
    {"/", "/health", "/ping", "/metrics", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}
)
_MAX_REQUEST_ID_CHARS = 200
_LEAST_MS, _MOST_MS = 1e-6, 1e9
"""Of a promised time: what is divided by it, or multiplied with it, stays finite."""

Headers = Mapping[bytes, bytes]
NO_TRACE: Mapping[str, str] = {}


class Gateway:
    """`direct` endpoints are called without the framework's routing; everything else goes to `app`."""

    def __init__(
        self,
        app: Asgi,
        direct: Mapping[str, Asgi],
        *,
        keys: ApiKeys,
        limits: RequestLimits,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        audit: AuditLog | None = None,
    ) -> None:
        self._audit = audit
        self._app = app
        self._direct = direct
        self.keys = keys
        self._limits = limits
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived_at = self._clock()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id"))
        response = _Response(send, request_id)
        path = _path(scope)
        with request_logs(request_id):
            await self._answer(scope, receive, response, headers, path, arrived_at)
        if self._audit is not None and path not in _OPEN_PATHS:
            caller = RequestContext.of(scope).caller.name if RequestContext.is_attached(scope) else None
            self._audit.request(
                request_id=request_id,
                client=(scope.get("client") or ("",))[0],
                caller=caller,
                method=scope["method"],
                path=path,
                status=response.status,
            )

    async def _answer(
        self, scope: Scope, receive: Receive, response: "_Response", headers: Headers, path: str, arrived_at: float
    ) -> None:
        try:
            context = RequestContext(
                request_id=response.request_id,
                arrived_at=arrived_at,
                explain=headers.get(b"x-baton-explain") in (b"1", b"true"),
                limits=self._limits,
                trace_headers=_trace_headers(headers),
                caller=self._caller(path, headers),
                slo=_slo(headers),
                exchange=exchange_of(scope),
            )
            context.attach(scope)
            endpoint = self._direct.get(path) if scope["method"] == "POST" else None
            await (endpoint or self._app)(scope, receive, response.send)
        except ClientGoneError:
            return
        except ApiError as exc:
            await self._refuse(exc, path, response)
        except Exception:
            logger.exception("request failed")
            await self._refuse(InternalError("an internal error has been logged"), path, response)

    def _caller(self, path: str, headers: Headers) -> Caller:
        """Raises `AuthenticationError`."""
        if path in _OPEN_PATHS:
            return ANONYMOUS
        caller = self.keys.caller(_authorization(headers))
        if caller is None:
            raise AuthenticationError("a valid API key is required: send it as 'Authorization: Bearer KEY'")
        return caller

    async def _refuse(self, error: ApiError, path: str, response: "_Response") -> None:
        self._metrics.error(error.status)
        if not response.is_started:
            body = error_answer(error) if path in MESSAGES_PATHS else None
            await send_error(response.send, error, body)


class _Response:
    """Adds the request id to the head of the response."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.is_started = False
        self.status = 0

    def send(self, message: MutableMapping[str, Any]) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.is_started = True
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
        return self._send(message)


def _path(scope: Scope) -> str:
    """Without the prefix that a proxy in front strips: the server has put it back (`--root-path`)."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _trace_headers(headers: Headers) -> Mapping[str, str]:
    if b"traceparent" not in headers:
        return NO_TRACE
    return trace_headers(lambda name: _text(headers.get(name.encode())))


def _authorization(headers: Headers) -> str | None:
    """Anthropic's clients send the bare key in a header of their own."""
    key = _text(headers.get(b"x-api-key"))
    return _text(headers.get(b"authorization")) if key is None else f"Bearer {key}"


def _request_id(value: bytes | None) -> str:
    given = _text(value)
    if given and len(given) <= _MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return f"{_random.getrandbits(128):032x}"


def _slo(headers: Headers) -> Slo:
    """Raises `BadRequestError`."""
    ttft, itl = headers.get(b"x-baton-ttft-ms"), headers.get(b"x-baton-itl-ms")
    if ttft is None and itl is None:
        return NO_SLO
    return Slo(_seconds(ttft, "x-baton-ttft-ms"), _seconds(itl, "x-baton-itl-ms"))


def _seconds(value: bytes | None, name: str) -> float | None:
    if value is None:
        return None
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = math.nan
    if not _LEAST_MS <= milliseconds <= _MOST_MS:
        raise BadRequestError(
            f"{name}: a number of milliseconds from {_LEAST_MS:g} to {_MOST_MS:g} is wanted", param=name
        )
    return milliseconds / 1e3
