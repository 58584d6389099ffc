"""List all endpoints with a request body in one table: routing, OpenAPI document and the shape of errors follow from
it.

To add an endpoint, add a row to `endpoints`. Endpoints without a body are declared where they are implemented, with
FastAPI's decorators, which document them too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from baton_serve.services.router.api.audio.endpoint import TranscriptionEndpoint
from baton_serve.services.router.api.audio.schema import TranscriptionRequest, TranslationRequest
from baton_serve.services.router.api.chat import ChatEndpoint, ChatInputTokensEndpoint
from baton_serve.services.router.api.completions import CompletionEndpoint
from baton_serve.services.router.api.messages.answer_schema import error_answer
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
from baton_serve.services.router.api.responses.kept_responses import KeptResponses
from baton_serve.services.router.api.responses.schema import InputTokensRequest, ResponsesRequest
from baton_serve.services.router.http.adapter_endpoints import adapter_endpoints
from baton_serve.services.router.http.invocations import InvocationsEndpoint
from baton_serve.services.router.http.status_endpoints import DetokenizeEndpoint, TokenizeEndpoint
from baton_serve.services.router.protocol.asgi import Asgi
from baton_serve.services.router.protocol.errors import ApiError
from baton_serve.services.router.protocol.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)

FORM = "multipart/form-data"
"""Media type of requests with a file."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table of endpoints: an ASGI application that answers POST requests, and how the OpenAPI document
    describes it.
    """

    summary: str
    """The purpose of the endpoint, as the OpenAPI document shows it."""
    schema: type[BaseModel]
    """The schema of the request body."""
    app: Asgi
    error_body: Callable[[ApiError], object] | None = None
    """Returns the body of an error; None: in the shape of OpenAI's errors."""
    media_type: str = "application/json"


def endpoints(service: ModelService, kept: KeptResponses) -> dict[str, Endpoint]:
    """Return the table of the router's POST endpoints, by path. `service` is that of the default model; `kept` holds
    the answers of the Responses API.
    """
    score = Endpoint(
        "Score how well pairs of texts match",
        ScoreRequest,
        PoolingEndpoint(service, ScoreRequest, scores, prefix="score"),
    )
    rerank = Endpoint(
        "Sort documents by how well they answer a query",
        RerankRequest,
        PoolingEndpoint(service, RerankRequest, ranks, prefix="rerank"),
    )
    chat_tokens = Endpoint(
        "Count the prompt tokens of a chat (llama.cpp)", ChatCompletionRequest, ChatInputTokensEndpoint(service)
    )
    table = {
        "/v1/chat/completions": Endpoint(
            "Answer a chat, streamed or whole", ChatCompletionRequest, ChatEndpoint(service)
        ),
        "/v1/chat/completions/input_tokens": chat_tokens,
        "/chat/completions/input_tokens": chat_tokens,
        "/v1/completions": Endpoint(
            "Complete prompts, streamed or whole", CompletionRequest, CompletionEndpoint(service)
        ),
        "/tokenize": Endpoint("Convert a prompt or a chat to token ids", TokenizeRequest, TokenizeEndpoint(service)),
        "/detokenize": Endpoint("Convert token ids to text", DetokenizeRequest, DetokenizeEndpoint(service)),
        "/v1/responses": Endpoint(
            "Answer a conversation (OpenAI's Responses API)", ResponsesRequest, ResponsesEndpoint(service, kept)
        ),
        "/v1/responses/input_tokens": Endpoint(
            "Count input tokens (OpenAI's Responses API)", InputTokensRequest, InputTokensEndpoint(service, kept)
        ),
        "/v1/messages": Endpoint(
            "Answer a conversation (Anthropic's Messages API)", MessagesRequest, MessagesEndpoint(service), error_answer
        ),
        "/v1/messages/count_tokens": Endpoint(
            "Count input tokens (Anthropic's Messages API)",
            CountTokensRequest,
            CountTokensEndpoint(service),
            error_answer,
        ),
        "/v1/embeddings": Endpoint(
            "Compute an embedding of each input",
            EmbeddingRequest,
            PoolingEndpoint(service, EmbeddingRequest, embeddings, prefix="embd"),
        ),
        "/pooling": Endpoint(
            "Compute the pooled output of each input, or the output of each of its tokens",
            PoolingRequest,
            PoolingEndpoint(service, PoolingRequest, pooling, prefix="pool"),
        ),
        "/classify": Endpoint(
            "Compute the scores of all classes for each input",
            ClassificationRequest,
            PoolingEndpoint(service, ClassificationRequest, classes, prefix="classify"),
        ),
        "/v1/audio/transcriptions": Endpoint(
            "Transcribe audio, streamed or whole",
            TranscriptionRequest,
            TranscriptionEndpoint(service, TranscriptionRequest, "transcribe"),
            media_type=FORM,
        ),
        "/v1/audio/translations": Endpoint(
            "Translate audio to English text, streamed or whole",
            TranslationRequest,
            TranscriptionEndpoint(service, TranslationRequest, "translate"),
            media_type=FORM,
        ),
        # vLLM serves these under several names.
        "/score": score,
        "/v1/score": score,
        "/rerank": rerank,
        "/v1/rerank": rerank,
        "/v2/rerank": rerank,
    }
    # Made of the rows so far: `/invocations` must reach neither itself nor the endpoints that change adapters.
    # They choose by the fields of JSON, which a form does not have.
    of_json = {path: endpoint.app for path, endpoint in table.items() if endpoint.media_type != FORM}
    invocations = InvocationsEndpoint(service, of_json)
    load, unload = adapter_endpoints(service)
    return table | {
        "/invocations": Endpoint(
            "Serve any other request, chosen by its body (SageMaker)", ChatCompletionRequest, invocations
        ),
        "/v1/load_lora_adapter": Endpoint("Load a LoRA adapter on all instances of a model", LoadAdapterRequest, load),
        "/v1/unload_lora_adapter": Endpoint("Unload a LoRA adapter from all instances", UnloadAdapterRequest, unload),
    }


_SCHEMAS = "#/components/schemas/{model}"
_STATUSES = {
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


def add_to_document(document: dict[str, Any], table: Mapping[str, Endpoint]) -> None:
    """Add the endpoints of a table, with the schemas of their bodies, to the OpenAPI document `document`."""
    _, definitions = models_json_schema(
        [(endpoint.schema, "validation") for endpoint in table.values()], ref_template=_SCHEMAS
    )
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(definitions["$defs"])
    # The empty object says that a router without keys needs none.
    components["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"ApiKey": []}, {}]
    for path, endpoint in table.items():
        reference = {"$ref": _SCHEMAS.format(model=endpoint.schema.__name__)}
        operation = {
            "summary": endpoint.summary,
            "requestBody": {"required": True, "content": {endpoint.media_type: {"schema": reference}}},
            "responses": {status: {"description": text} for status, text in _STATUSES.items()},
        }
        document["paths"][path] = {"post": operation}
