"""Call the router's own endpoints in this process, for the lines of batches, at the lowest priority.

Such a request takes the same way as one that came over HTTP, behind the check of its API key: the endpoint gets an ASGI
scope with the owner of the batch as its caller.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from baton_serve.services.common.logs import request_logs
from baton_serve.services.router.protocol.asgi import Asgi, RequestContext, RequestLimits, Scope
from baton_serve.services.router.protocol.byte_budget import BodyReservation
from baton_serve.services.router.protocol.caller import Caller
from baton_serve.services.router.protocol.errors import ApiError, InternalError
from baton_serve.services.router.protocol.request_bounds import MAX_INT32

logger = logging.getLogger(__name__)

LOWEST_PRIORITY = MAX_INT32
"""Priority of the requests of batches, in the router's queue and in the instances: larger values run later."""

_HEADERS = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The response to one request of a batch. `retry_after_s` is the time in seconds that the endpoint asked to wait,
    or None.
    """

    status: int
    body: bytes
    request_id: str
    retry_after_s: float | None = None


class LineClient:
    """Sends the requests of batches to the endpoints of this router, inside the process. Use it on the event loop
    only.
    """

    def __init__(
        self, endpoints: Mapping[str, Asgi], limits: RequestLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the client. `endpoints` are the ASGI applications by path; `clock` is the router's monotonic clock."""
        self._endpoints = endpoints
        self._limits = limits
        self._clock = clock

    async def post(self, path: str, body: bytes, caller: Caller, memory: BodyReservation) -> LineAnswer:
        """Send one request in the name of `caller`, at the lowest priority, and return its response, whatever its
        status.

        `memory` is the reservation for `body`, which the caller of this method releases. If this call is cancelled, the
        request ends.
        """
        request_id = secrets.token_hex(16)
        # Set here and not in the body, which stays unparsed and as the client wrote it.
        # `min_priority` is also the default of requests that ask for no priority (`api_keys.allowed`).
        caller = replace(caller, min_priority=LOWEST_PRIORITY)
        context = RequestContext(
            request_id=request_id,
            arrived_at=self._clock(),
            explain=False,
            limits=self._limits,
            trace_headers={},
            caller=caller,
            body=memory,
        )
        scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": _HEADERS, "client": None}
        context.attach(scope)
        # Without an `Exchange` of the server, endpoints use `receive` and `send` only.
        exchange = _Exchange(body)
        with request_logs(request_id):
            try:
                await self._endpoints[path](scope, exchange.receive, exchange.send)
            except ApiError as exc:
                return refusal(exc, request_id)
            except Exception:
                # A bug fails one request and not its batch. Its text may hold parts of a prompt, so that it goes to
                # the log and not into the result.
                logger.exception("a request of a batch failed with an internal error")
                error = InternalError("an internal error occurred and was logged")
                return LineAnswer(error.status, msgspec.json.encode(error.body()), request_id)
        return LineAnswer(exchange.status, b"".join(exchange.parts), request_id)


def refusal(error: ApiError, request_id: str = "") -> LineAnswer:
    """Return the response to a request of a batch that was refused with `error`."""
    return LineAnswer(error.status, msgspec.json.encode(error.body()), request_id, error.retry_after_s)


class _Exchange:
    """One request of a batch as an endpoint sees it: provides ASGI's `receive` and `send`, and collects the
    response.
    """

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 0
        self.parts: list[bytes] = []

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the body at the first call. Later calls wait forever, because this client never disconnects."""
        if (body := self._body) is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Keep `message`, one part of the endpoint's response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.parts.append(message.get("body", b""))
