"""Assemble the HTTP application of the router from its endpoints.

The endpoints on a request's path are plain ASGI applications. FastAPI serves the rest, the OpenAPI document and /docs.
"""

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.routing import Route

from baton_serve.services.common.version import VERSION
from baton_serve.services.router.api.chat import ChatEndpoint
from baton_serve.services.router.api.completions import CompletionEndpoint
from baton_serve.services.router.api.messages.endpoint import CountTokensEndpoint, MessagesEndpoint
from baton_serve.services.router.api.messages.schema import CountTokensRequest, MessagesRequest
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.api.pooling.endpoint import PoolingEndpoint
from baton_serve.services.router.api.pooling.schema import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from baton_serve.services.router.api.pooling.score_endpoints import ranks, scores
from baton_serve.services.router.api.pooling.vector_endpoints import classes, embeddings, pooling
from baton_serve.services.router.api.responses.endpoint import InputTokensEndpoint, ResponsesEndpoint
from baton_serve.services.router.api.responses.schema import InputTokensRequest, ResponsesRequest
from baton_serve.services.router.http.adapter_endpoints import adapter_endpoints
from baton_serve.services.router.http.gateway import Gateway
from baton_serve.services.router.http.invocations import InvocationsEndpoint
from baton_serve.services.router.http.model_endpoints import model_routes, tokenizer_routes
from baton_serve.services.router.http.status_endpoints import DetokenizeEndpoint, TokenizeEndpoint, system_routes
from baton_serve.services.router.processes.sibling_rpc import SiblingRpc
from baton_serve.services.router.protocol.asgi import Asgi, RequestLimits
from baton_serve.services.router.protocol.errors import ErrorBody, ErrorDetail
from baton_serve.services.router.protocol.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from baton_serve.services.router.quota.api_keys import ApiKeys
from baton_serve.services.router.quota.audit_log import AuditLog

POOLING_DOCUMENTED: dict[str, tuple[str, type[BaseModel]]] = {
    "/v1/embeddings": ("Compute an embedding of each input", EmbeddingRequest),
    "/pooling": ("Compute the pooled output of each input, or the output of each of its tokens", PoolingRequest),
    "/classify": ("Compute the scores of all classes for each input", ClassificationRequest),
    "/score": ("Score how well pairs of texts match", ScoreRequest),
    "/v1/score": ("Score how well pairs of texts match", ScoreRequest),
    "/rerank": ("Sort documents by how well they answer a query", RerankRequest),
    "/v1/rerank": ("Sort documents by how well they answer a query", RerankRequest),
    "/v2/rerank": ("Sort documents by how well they answer a query", RerankRequest),
}
"""Summary and request schema of each endpoint of pooling models, for the OpenAPI document."""


def pooling_endpoints(service: ModelService) -> dict[str, Asgi]:
    """Return the endpoints of pooling models by path. Paths that vLLM serves under two names share one endpoint."""
    score = PoolingEndpoint(service, ScoreRequest, scores, prefix="score")
    rerank = PoolingEndpoint(service, RerankRequest, ranks, prefix="rerank")
    return {
        "/v1/embeddings": PoolingEndpoint(service, EmbeddingRequest, embeddings, prefix="embd"),
        "/pooling": PoolingEndpoint(service, PoolingRequest, pooling, prefix="pool"),
        "/classify": PoolingEndpoint(service, ClassificationRequest, classes, prefix="classify"),
        "/score": score,
        "/v1/score": score,
        "/rerank": rerank,
        "/v1/rerank": rerank,
        "/v2/rerank": rerank,
    }


_SCHEMAS = "#/components/schemas/{model}"


def create_app(
    service: ModelService, *, api_keys: ApiKeys, audit: AuditLog | None = None, sibling_rpc: SiblingRpc | None = None
) -> Gateway:
    """Return the router's ASGI application: all endpoints behind the `Gateway`.

    `service` is that of the default model. `sibling_rpc` connects to the other processes behind this port and is None
    if there are none; without `audit` no audit log is written.
    """
    # The gateway calls these endpoints itself by path. FastAPI's routing and parsing would cost more than all of the
    # router's own work for a short request. They are also added as routes below, so that a wrong method gets status 405
    # instead of 404.
    direct: dict[str, Asgi] = {
        "/v1/chat/completions": ChatEndpoint(service),
        "/v1/completions": CompletionEndpoint(service),
        "/tokenize": TokenizeEndpoint(service),
        "/detokenize": DetokenizeEndpoint(service),
        "/v1/responses": ResponsesEndpoint(service),
        "/v1/responses/input_tokens": InputTokensEndpoint(service),
        "/v1/messages": MessagesEndpoint(service),
        "/v1/messages/count_tokens": CountTokensEndpoint(service),
        **pooling_endpoints(service),
    }
    # A copy made here: `/invocations` must reach neither itself nor the endpoints that change adapters.
    invocable = dict(direct)
    direct |= adapter_endpoints(service)
    direct["/invocations"] = InvocationsEndpoint(service, invocable)
    app = _Documented(title="Baton", version=VERSION)
    app.include_router(system_routes(service, sibling_rpc))
    app.include_router(model_routes(service))
    app.include_router(tokenizer_routes(service))
    for path, endpoint in direct.items():
        app.router.routes.append(Route(path, endpoint=endpoint, methods=["POST"]))
    app.add_exception_handler(HTTPException, _http_error)
    return Gateway(
        app,
        direct,
        keys=api_keys,
        limits=RequestLimits(service.settings.max_request_bytes, service.settings.slow_client_s),
        metrics=service.metrics,
        clock=service.clock,
        audit=audit,
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer requests for unknown paths and methods in the shape of OpenAI's errors, as all other errors."""
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
    """Adds the plain ASGI endpoints, whose schemas FastAPI does not know, to its OpenAPI document."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document. It is built at the first call: most routers are never asked for it."""
        if self.openapi_schema is None:
            document = super().openapi()
            documented: dict[str, tuple[str, type[BaseModel]]] = {
                "/v1/chat/completions": ("Answer a chat, streamed or whole", ChatCompletionRequest),
                "/v1/completions": ("Complete prompts, streamed or whole", CompletionRequest),
                "/tokenize": ("Convert a prompt or a chat to token ids", TokenizeRequest),
                "/detokenize": ("Convert token ids to text", DetokenizeRequest),
                "/v1/responses": ("Answer a conversation (OpenAI's Responses API)", ResponsesRequest),
                "/v1/responses/input_tokens": ("Count input tokens (OpenAI's Responses API)", InputTokensRequest),
                "/v1/messages": ("Answer a conversation (Anthropic's Messages API)", MessagesRequest),
                "/v1/messages/count_tokens": ("Count input tokens (Anthropic's Messages API)", CountTokensRequest),
                "/invocations": ("Serve any other request, chosen by its body (SageMaker)", ChatCompletionRequest),
                "/v1/load_lora_adapter": ("Load a LoRA adapter on all instances of a model", LoadAdapterRequest),
                "/v1/unload_lora_adapter": ("Unload a LoRA adapter from all instances", UnloadAdapterRequest),
                **POOLING_DOCUMENTED,
            }
            _, schemas = models_json_schema(
                [(model, "validation") for _, model in documented.values()], ref_template=_SCHEMAS
            )
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components |= schemas["$defs"]
            for path, (summary, model) in documented.items():
                document["paths"][path] = {"post": _operation(summary, model)}
            self.openapi_schema = document
        return self.openapi_schema


def _operation(summary: str, model: type[BaseModel]) -> dict[str, Any]:
    reference = {"$ref": _SCHEMAS.format(model=model.__name__)}
    statuses = {
        "200": "The answer",
        "400": "The request is not valid; the message says why",
        "401": "The API key is missing or not valid",
        "403": "The Host header is not allowed, or the API key may not ask for this priority",
        "404": "The model does not exist",
        "408": "The request body did not arrive in time",
        "413": "The request body is too large",
        "415": "The Content-Type of the request body is not JSON",
        "429": "A limit or an SLO does not allow the request now; Retry-After says when to try again",
        "500": "An internal error occurred and was logged",
        "503": "No instance can serve the request now",
        "504": "The request was not finished within its time limit",
    }
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
        "responses": {status: {"description": text} for status, text in statuses.items()},
    }
