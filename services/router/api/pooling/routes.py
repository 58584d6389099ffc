"""Which path is answered by what, for models that answer with vectors."""

from pydantic import BaseModel

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
from baton_serve.services.router.protocol.asgi import Asgi

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
