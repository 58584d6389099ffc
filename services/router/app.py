"""Assemble the HTTP application of the router: all endpoints behind the gateway.

The endpoints on a request's path are plain ASGI applications. FastAPI serves the rest, the OpenAPI document and /docs.
"""

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route

from baton_serve.services.common.version import VERSION
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.api.responses.kept_responses import KeptResponses
from baton_serve.services.router.batch.endpoints import BatchApi, batch_routes
from baton_serve.services.router.http.admin_endpoints import admin_routes
from baton_serve.services.router.http.endpoint_table import Endpoint, add_to_document, endpoints
from baton_serve.services.router.http.gateway import Gateway
from baton_serve.services.router.http.model_endpoints import model_routes, tokenizer_routes
from baton_serve.services.router.http.pages import page_routes
from baton_serve.services.router.http.status_endpoints import monitoring_routes, system_routes
from baton_serve.services.router.http.stored_response_endpoints import response_routes
from baton_serve.services.router.processes.sibling_rpc import SiblingRpc
from baton_serve.services.router.protocol.errors import ApiError, BadRequestError, ErrorBody, ErrorDetail
from baton_serve.services.router.quota.api_keys import ApiKeys
from baton_serve.services.router.quota.audit_log import AuditLog
from baton_serve.services.router.requests.metrics import RouterMetrics

logger = logging.getLogger(__name__)


def create_app(
    service: ModelService,
    *,
    api_keys: ApiKeys,
    kept: KeptResponses | None = None,
    audit: AuditLog | None = None,
    sibling_rpc: SiblingRpc | None = None,
    batches: BatchApi | None = None,
    logs_routes: bool = False,
) -> Gateway:
    """Return the router's ASGI application: all endpoints behind the `Gateway`.

    `service` is that of the default model. `kept` holds the answers of the Responses API, and the caller closes it;
    without it none are stored. `sibling_rpc` connects to the other processes behind this port and is None if there are
    none; without `audit` no audit log is written, and without `batches` no batch is accepted. `logs_routes` lists all
    endpoints in the log.
    """
    kept = kept or KeptResponses(None)
    table = endpoints(service, kept)
    app = _Documented(table)
    # Not by `include_router`, which in newer versions of FastAPI hides the routes and their paths.
    routes = app.router.routes
    routes += [*page_routes(), *monitoring_routes(service, api_keys, sibling_rpc).routes]
    further = (system_routes(service, sibling_rpc), model_routes(service), tokenizer_routes(service))
    for router in (*further, response_routes(kept), admin_routes(service), batch_routes(batches)):
        routes += router.routes
    # The gateway calls the endpoints of the table itself by path. FastAPI's routing and parsing would cost more than
    # all of the router's own work for a short request. As routes a wrong method gets status 405 instead of 404.
    routes += [Route(path, endpoint=endpoint.app, methods=["POST"]) for path, endpoint in table.items()]
    if logs_routes:
        _log_routes(routes)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, partial(_refusal, service.metrics))
    # In the gateway it would be too late: Starlette answers an unknown exception with status 500 before it raises it.
    app.add_exception_handler(ApiError, partial(_refusal, service.metrics))
    return Gateway(
        app,
        table,
        service=service,
        keys=api_keys,
        audit=audit,
    )


def _log_routes(routes: Iterable[BaseRoute]) -> None:
    """Log the path and methods of each route in the words of vLLM, which scripts search for."""
    logger.info("Available routes are:")
    for route in routes:
        if isinstance(route, Route):
            logger.info("Route: %s, Methods: %s", route.path, ", ".join(sorted(route.methods or ())))


async def _refusal(metrics: RouterMetrics, request: Request, error: Exception) -> Response:
    """Return the response to an error that an endpoint of FastAPI has raised, or to a parameter that FastAPI has
    refused, in the same form as errors of other endpoints.
    """
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        param = str(first["loc"][-1])
        error = BadRequestError(f"{param}: {first['msg']}", param=param)
    assert isinstance(error, ApiError)
    metrics.error(error.status)
    return Response(
        msgspec.json.encode(error.body()),
        status_code=error.status,
        media_type="application/json",
        headers={} if error.retry_after_s is None else {"retry-after": str(max(1, round(error.retry_after_s)))},
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Return the response to a request for an unknown path or method, in the form of OpenAI's errors."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {str(error.detail).lower()}"
    body = ErrorBody(ErrorDetail(message, "invalid_request_error", None, None))
    return Response(
        msgspec.json.encode(body),
        status_code=error.status_code,
        media_type="application/json",
        headers=dict(error.headers or {}),
    )


class _Documented(FastAPI):
    """The FastAPI application, whose OpenAPI document also has the plain ASGI endpoints, which FastAPI does not
    know.
    """

    def __init__(self, table: Mapping[str, Endpoint]) -> None:
        # FastAPI's own pages load their scripts from another host: `page_routes` replaces them.
        super().__init__(title="Baton", version=VERSION, docs_url=None, redoc_url=None)
        self._table = table

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document. It is built at the first call: most routers are never asked for it."""
        if self.openapi_schema is None:
            document = super().openapi()
            add_to_document(document, self._table)
            self.openapi_schema = document
        return self.openapi_schema
