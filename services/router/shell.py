"""The outermost layer: request ids, API keys, the way to the endpoints, and errors in OpenAI's shape. Plain ASGI."""

import hmac
import logging
import secrets
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from hashlib import sha256
from typing import Any

from services.common.logs import request_logs
from services.common.tracing import trace_headers
from services.router.asgi import Receive, RequestContext, Scope, Send, header, send_error
from services.router.errors import ApiError, AuthenticationError, ClientGoneError, InternalError
from services.router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

Asgi = Callable[[Scope, Receive, Send], Any]

_OPEN_PATHS = frozenset(
    {"/", "/health", "/ping", "/metrics", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}
)
_LONGEST_REQUEST_ID = 200


class ApiKeys:
    """Compares digests in constant time, and always all of them."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys if key]

    def accepts(self, authorization: str | None) -> bool:
        if not self._digests:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        digest = sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class Shell:
    """`direct` endpoints are called without the framework's routing; everything else goes to `app`."""

    def __init__(
        self,
        app: Asgi,
        direct: Mapping[str, Asgi],
        *,
        keys: ApiKeys,
        max_body_bytes: int,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._app = app
        self._direct = direct
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(header(scope, b"x-request-id"))
        context = RequestContext(
            request_id=request_id,
            arrived_at=self._clock(),
            explain=header(scope, b"x-baton-explain") in ("1", "true"),
            max_body_bytes=self._max_body_bytes,
            trace_headers=trace_headers(lambda name: header(scope, name.encode())),
        )
        context.attach(scope)
        response = _Response(send, request_id)
        with request_logs(request_id):
            await self._answer(scope, receive, response)

    async def _answer(self, scope: Scope, receive: Receive, response: "_Response") -> None:
        try:
            await self._serve(scope, receive, response.send)
        except ClientGoneError:
            return
        except ApiError as exc:
            await self._refuse(exc, response)
        except Exception:
            logger.exception("request failed")
            await self._refuse(InternalError("an internal error has been logged"), response)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path not in _OPEN_PATHS and not self._keys.accepts(header(scope, b"authorization")):
            raise AuthenticationError("a valid API key is required: send it as 'Authorization: Bearer KEY'")
        endpoint = self._direct.get(path) if scope["method"] == "POST" else None
        await (endpoint or self._app)(scope, receive, send)

    async def _refuse(self, error: ApiError, response: "_Response") -> None:
        self._metrics.error(error.status)
        if not response.is_started:
            await send_error(response.send, error)


class _Response:
    """Adds the request id to the head of the response."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self.is_started = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
        await self._send(message)


def _request_id(given: str | None) -> str:
    if given and len(given) <= _LONGEST_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(16)
