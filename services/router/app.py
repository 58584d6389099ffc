"""The HTTP application: FastAPI for routing, the OpenAPI document and /docs, around endpoints that are plain ASGI."""

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
    "/v1/embeddings": ("A vector for each input", EmbeddingRequest),
    "/pooling": ("What the model makes of each input, or of each of its tokens", PoolingRequest),
    "/classify": ("Scores of classes for each input", ClassificationRequest),
    "/score": ("How well pairs of texts match", ScoreRequest),
    "/v1/score": ("How well pairs of texts match", ScoreRequest),
    "/rerank": ("Documents by how well they answer a query", RerankRequest),
    "/v1/rerank": ("Documents by how well they answer a query", RerankRequest),
    "/v2/rerank": ("Documents by how well they answer a query", RerankRequest),
}


def pooling_endpoints(service: ModelService) -> dict[str, Asgi]:
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
    """`sibling_rpc`: the other processes behind this port."""
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
    """Unknown paths and methods, in OpenAI's shape too."""
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
    """Adds the endpoints that FastAPI does not parse to its OpenAPI document."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            documented: dict[str, tuple[str, type[BaseModel]]] = {
                "/v1/chat/completions": ("Answer a chat, streamed or whole", ChatCompletionRequest),
                "/v1/completions": ("Continue prompts, streamed or whole", CompletionRequest),
                "/tokenize": ("Token ids of a prompt or a chat", TokenizeRequest),
                "/detokenize": ("Text of token ids", DetokenizeRequest),
                "/v1/responses": ("Answer a conversation, as OpenAI's Responses API", ResponsesRequest),
                "/v1/responses/input_tokens": ("Tokens of a conversation, as OpenAI's API", InputTokensRequest),
                "/v1/messages": ("Answer a conversation, as Anthropic's Messages API", MessagesRequest),
                "/v1/messages/count_tokens": ("Tokens of a conversation, as Anthropic's API", CountTokensRequest),
                "/invocations": ("Any of the other requests", ChatCompletionRequest),
                "/v1/load_lora_adapter": ("Load an adapter on all instances of a model", LoadAdapterRequest),
                "/v1/unload_lora_adapter": ("Unload an adapter", UnloadAdapterRequest),
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
        "400": "What is wrong with the request",
        "401": "No valid API key",
        "403": "The Host is not allowed, or the key may not have that priority",
        "404": "No such model",
        "408": "The body did not arrive in time",
        "413": "The body is too long",
        "415": "The Content-Type is not JSON",
        "429": "Too much at once; Retry-After says when",
        "500": "An internal error",
        "503": "No instance can serve it now",
        "504": "The request's time is over",
    }
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
        "responses": {status: {"description": text} for status, text in statuses.items()},
    }
