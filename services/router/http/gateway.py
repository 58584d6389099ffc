"""Check each request before its endpoint: API key, paths without key, middleware, SLO headers, request id; answer
errors in the API's shape.

It is plain ASGI, because it handles every request. `main` wraps it in CORS, middleware and the check of the host.
"""

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
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.http.endpoint_table import Endpoint
from baton_serve.services.router.protocol.asgi import (
    Asgi,
    Receive,
    RequestContext,
    RequestLimits,
    Scope,
    Send,
    authorization,
    exchange_of,
    send_error,
)
from baton_serve.services.router.protocol.byte_budget import BODY_WAIT_S, BodyMemory, BodyReservation
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


def with_middleware(app: AsgiApp, paths: Sequence[str]) -> AsgiApp:
    """Return `app` wrapped in the classes or functions of `--middleware`, which `paths` names; the last path is the
    outermost layer.

    A class is constructed with the application that it wraps. A coroutine function is called for each request with
    Starlette's request and the function that calls the next layer, as in vLLM. Raises `ConfigurationError` if a path
    cannot be imported or is neither a class nor a coroutine function.
    """
    if not paths:
        return app
    wrapped: AsgiApp = _Plain(app)
    for path in paths:
        middleware = _imported(path)
        if inspect.iscoroutinefunction(middleware):
            wrapped = BaseHTTPMiddleware(wrapped, dispatch=middleware)
        elif inspect.isclass(middleware):
            wrapped = cast(Callable[[AsgiApp], AsgiApp], middleware)(wrapped)
        else:
            raise ConfigurationError(f"--middleware {path}: neither a class nor a coroutine function")
    return wrapped


class _Plain:
    """An ASGI layer that hides the server's direct write (`EXTENSION`) from the application that it wraps.

    Then all parts of an answer go through ASGI's `send`, so that a middleware sees and can change them.
    """

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        others = {name: value for name, value in (scope.get("extensions") or {}).items() if name != EXTENSION}
        await self._app({**scope, "extensions": others}, receive, send)


def _imported(path: str) -> Any:
    """Return the object at an import path such as `package.module.name`. Raises `ConfigurationError` if it cannot be
    imported.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigurationError(f"--middleware {path} is not an import path: give it as package.module.Name")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as exc:
        raise ConfigurationError(f"--middleware {path}: {exc}") from exc


logger = logging.getLogger(__name__)

_random = random.Random()
"""Generates request ids. They must differ but need not be secret, and `secrets` would cost a system call for each."""

_MAX_REQUEST_ID_CHARS = 200
_MIN_SLO_MS, _MAX_SLO_MS = 1e-6, 1e9
"""Bounds of an SLO header in milliseconds. Placement divides by an SLO and multiplies it: results must stay finite."""

Headers = Mapping[bytes, bytes]
NO_TRACE: Mapping[str, str] = {}
OPEN_PATHS = frozenset(
    (
        "/",
        "/docs",
        "/docs/swagger-ui.js",
        "/docs/swagger-ui.css",
        "/health",
        "/metrics",
        "/openapi.json",
        "/ping",
        "/redoc",
    )
)
"""Paths that need no API key: probes and scrapers have none, and the pages ask their user for one."""


class Gateway:
    """The outermost ASGI application of the router: it checks API keys, and passes a request to its endpoint.

    POST requests to a path of `table` go directly to that endpoint, without the routing of FastAPI, which would cost
    more than the endpoint's own work. All other requests go to `app`. Requests to `OPEN_PATHS` need no API key, and
    they are not written to the audit log.
    """

    def __init__(
        self,
        app: Asgi,
        table: Mapping[str, Endpoint],
        *,
        service: ModelService,
        keys: ApiKeys,
        audit: AuditLog | None = None,
    ) -> None:
        """Create the gateway. `service` is that of the default model; `audit` is the audit log, or None without
        `--audit-log`.
        """
        self._audit = audit
        self._app = app
        self.table = table
        self.keys = keys
        self._limits = RequestLimits(service.settings.max_request_bytes, service.settings.slow_client_s)
        self.bodies = BodyMemory(
            service.settings.max_body_memory_bytes,
            wait_s=BODY_WAIT_S,
            max_body_bytes=service.settings.max_request_bytes,
            has_several_owners=keys.has_several_owners,
        )
        self._metrics = service.metrics
        self._clock = service.clock
        self.num_running = 0
        """Number of requests to endpoints of the table that run now."""
        self.num_started = 0
        """Number of requests to endpoints of the table since the start."""

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
        if self._audit is not None and path not in OPEN_PATHS:
            # The context is missing if the key or a header was refused: then the caller is not known.
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
        body = BodyReservation(self.bodies)
        try:
            caller = self._caller(path, headers)
            body.owner = caller.name
            context = RequestContext(
                request_id=response.request_id,
                arrived_at=arrived_at,
                explain=headers.get(b"x-baton-explain") in (b"1", b"true"),
                limits=self._limits,
                body=body,
                trace_headers=_trace_headers(headers),
                caller=caller,
                slo=_slo(headers),
                exchange=exchange_of(scope),
            )
            context.attach(scope)
            # A wrong method goes to FastAPI, which answers it with status 405.
            endpoint = self.table.get(path) if scope["method"] == "POST" else None
            if endpoint is None:
                await self._app(scope, receive, response.send)
                return
            # Batches choose their pace by these counts. Their own requests do not come through the gateway.
            self.num_started += 1
            self.num_running += 1
            try:
                await endpoint.app(scope, receive, response.send)
            finally:
                self.num_running -= 1
        except ClientGoneError:
            # The connection is closed: an answer would reach no client, and the router made no error to count.
            return
        except ApiError as exc:
            await self._send_error(exc, path, response)
        except Exception:
            # A request ends here whatever happened, so a bug fails one request and not the process. Its text may hold
            # parts of a prompt: it goes to the log and not to the client.
            logger.exception("request failed with an internal error")
            await self._send_error(InternalError("an internal error occurred and was logged"), path, response)
        finally:
            body.release()

    def _caller(self, path: str, headers: Headers) -> Caller:
        """Return the owner of the request's API key, or an anonymous caller for a path that needs no key.

        Raises `AuthenticationError` if the key is missing or unknown.
        """
        if path in OPEN_PATHS:
            return ANONYMOUS
        caller = self.keys.caller(authorization(headers))
        if caller is None:
            raise AuthenticationError("a valid API key is required: send it as 'Authorization: Bearer KEY'")
        return caller

    async def _send_error(self, error: ApiError, path: str, response: "_Response") -> None:
        self._metrics.error(error.status)
        # After the head of a response no other status can be sent. A stream reports its error as an event instead.
        if not response.is_started:
            endpoint = self.table.get(path)
            body = endpoint.error_body(error) if endpoint is not None and endpoint.error_body is not None else None
            await send_error(response.send, error, body)


class _Response:
    """Wraps ASGI's `send` of one request: it adds the request id to the response's headers and remembers the status.

    `status` stays 0 if the client left before a response began.
    """

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
    """Return the request's path without `--root-path`.

    A reverse proxy strips that prefix, and the server puts it back, because ASGI wants the full path in the scope.
    """
    path: str = scope["path"]
    root_path: str = scope.get("root_path", "")
    rest = path.removeprefix(root_path)
    # Only whole segments, as in Starlette's routing: with the prefix /llm, the path /llmfoo is not /foo.
    return rest if rest in ("", path) or rest.startswith("/") else path


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _trace_headers(headers: Headers) -> Mapping[str, str]:
    if b"traceparent" not in headers:
        return NO_TRACE
    return trace_headers(lambda name: _text(headers.get(name.encode())))


def _request_id(value: bytes | None) -> str:
    """Return the id that the client chose (x-request-id), or a random one."""
    chosen_id = _text(value)
    # The id goes into logs and response headers: control characters could forge log lines or headers there.
    if chosen_id and len(chosen_id) <= _MAX_REQUEST_ID_CHARS and chosen_id.isascii() and chosen_id.isprintable():
        return chosen_id
    return f"{_random.getrandbits(128):032x}"


def _slo(headers: Headers) -> Slo:
    """Return the SLO that the request's headers ask for (`x-baton-ttft-ms`, `x-baton-itl-ms`). Raises `BadRequestError`
    if a value is not a valid number.
    """
    ttft, itl = headers.get(b"x-baton-ttft-ms"), headers.get(b"x-baton-itl-ms")
    if ttft is None and itl is None:
        return NO_SLO
    return Slo(_seconds(ttft, "x-baton-ttft-ms"), _seconds(itl, "x-baton-itl-ms"))


def _seconds(value: bytes | None, name: str) -> float | None:
    """Return the value of a header, which is in milliseconds, in seconds; None without the header. Raises
    `BadRequestError` with the header's `name` for a value that is not valid.
    """
    if value is None:
        return None
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = math.nan
    # One comparison also refuses NaN, infinity and negative values, all of which `float` accepts.
    if not _MIN_SLO_MS <= milliseconds <= _MAX_SLO_MS:
        raise BadRequestError(
            f"the header {name} must be a number of milliseconds from {_MIN_SLO_MS:g} to {_MAX_SLO_MS:g}", param=name
        )
    return milliseconds / 1e3
