"""Define the answers of the endpoints of pooling models. Nothing here decides anything.

Their field names are those of OpenAI's, Jina's and vLLM's APIs.
"""

from typing import Literal

import msgspec

from baton_serve.services.router.protocol.openai_responses import Usage

Numbers = msgspec.Raw
"""A vector or a matrix as JSON: nested lists of numbers, or a string with base64 of little-endian float32."""


class EmbeddingItem(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: Numbers


class PoolingItem(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: Numbers


class ClassificationItem(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class PoolingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of all pooling endpoints except /rerank: one item of `data` for each input."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingItem] | list[PoolingItem] | list[ClassificationItem] | list[ScoreItem]
    usage: Usage


class RankedDocument(msgspec.Struct, frozen=True):
    text: str


class RankedItem(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class TeiRank(msgspec.Struct, frozen=True, kw_only=True):
    """One element of an answer of /rerank in the form of Text Embeddings Inference (TEI). Such an answer is a list of
    these elements.
    """

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET


class RerankUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class RerankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /rerank in the form of Jina, Cohere and vLLM. `results` are sorted by relevance, the best first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RankedItem]
