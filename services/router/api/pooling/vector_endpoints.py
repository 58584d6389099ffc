"""Serve `POST /v1/embeddings`, `/pooling` and `/classify`; decide whether `dimensions` (Matryoshka) is permitted."""

import msgspec

from baton_serve.contracts.pooling import PoolingProfile, PoolingSpec
from baton_serve.services.router.api.pooling.endpoint import PoolingCall
from baton_serve.services.router.api.pooling.responses import (
    ClassificationItem,
    EmbeddingItem,
    PoolingAnswer,
    PoolingItem,
)
from baton_serve.services.router.api.pooling.schema import ClassificationRequest, EmbeddingRequest, PoolingRequest
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.requests.pooling_dispatcher import Vector, encode_vectors


async def embeddings(call: PoolingCall, request: EmbeddingRequest) -> msgspec.Struct:
    """Answer /v1/embeddings with one embedding for each input. Raises `ApiError`."""
    call.require("embed")
    check_dimensions(request.dimensions, call.profile)
    inputs = await call.inputs.of(request)
    params = PoolingSpec(task="embed", dimensions=request.dimensions, normalize=request.normalize)
    vectors = await call.compute(inputs, params)
    texts = await encode_vectors(vectors, request.encoding_format or "float")
    data = [EmbeddingItem(index=i, embedding=text) for i, text in enumerate(texts)]
    return PoolingAnswer(id=call.id, created=call.created, model=call.model, data=data, usage=call.usage())


async def pooling(call: PoolingCall, request: PoolingRequest) -> msgspec.Struct:
    """Answer /pooling with the model's output for each input: an embedding, the embeddings of its tokens, or its
    classes. Raises `ApiError`.
    """
    task = request.task or call.profile.tasks[0]
    call.require(task)
    check_dimensions(request.dimensions, call.profile)
    inputs = await call.inputs.of(request)
    params = PoolingSpec(
        task=task, dimensions=request.dimensions, normalize=request.normalize, activation=request.activation
    )
    vectors = await call.compute(inputs, params)
    texts = await encode_vectors(vectors, request.encoding_format or "float")
    data = [PoolingItem(index=i, data=text) for i, text in enumerate(texts)]
    return PoolingAnswer(id=call.id, created=call.created, model=call.model, data=data, usage=call.usage())


async def classes(call: PoolingCall, request: ClassificationRequest) -> msgspec.Struct:
    """Answer /classify with the scores of all classes for each input. Raises `ApiError`."""
    call.require("classify")
    inputs = await call.inputs.of(request)
    vectors = await call.compute(inputs, PoolingSpec(task="classify", activation=request.activation))
    data = [_classification(i, vector, call.profile.labels) for i, vector in enumerate(vectors)]
    return PoolingAnswer(id=call.id, created=call.created, model=call.model, data=data, usage=call.usage())


def check_dimensions(wanted: int | None, profile: PoolingProfile) -> None:
    """Raise `BadRequestError` if a model cannot shorten its embeddings to `wanted` dimensions (Matryoshka).

    None stands for the full length and is always allowed.
    """
    if wanted is None:
        return
    sizes = profile.matryoshka_dimensions
    # A prefix of an embedding is meaningful only if the model was trained for it.
    if not profile.is_matryoshka:
        raise BadRequestError(
            "dimensions: this model was not trained for shorter embeddings (Matryoshka); if it was, its config.json"
            ' must say "is_matryoshka": true',
            param="dimensions",
        )
    if sizes and wanted not in sizes:
        raise BadRequestError(
            f"dimensions: {wanted} is not supported, use one of {', '.join(map(str, sizes))}", param="dimensions"
        )
    if wanted > profile.dimensions:
        raise BadRequestError(
            f"dimensions: {wanted} are too many, the model has {profile.dimensions}", param="dimensions"
        )


def _classification(index: int, vector: Vector, labels: list[str]) -> ClassificationItem:
    scores = vector.numbers()
    best = max(range(len(scores)), key=scores.__getitem__)
    return ClassificationItem(index=index, label=labels[best], probs=scores, num_classes=len(scores))
