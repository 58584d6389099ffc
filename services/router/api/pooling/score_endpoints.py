"""Serve `POST /score` and `/rerank`: compute how well two texts match.

A classifier with a single class (a cross-encoder) computes both texts together, and its output is the score. With an
embedding model the score is the cosine of the two embeddings.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from baton_serve.contracts.pooling import PoolingInput, PoolingSpec
from baton_serve.services.router.api.pooling.endpoint import PoolingCall
from baton_serve.services.router.api.pooling.responses import (
    PoolingAnswer,
    RankedDocument,
    RankedItem,
    RerankAnswer,
    RerankUsage,
    ScoreItem,
    TeiRank,
)
from baton_serve.services.router.api.pooling.schema import RerankRequest, ScoreRequest
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import ChatMessage, TokenizeRequest
from baton_serve.services.router.requests.pooling_dispatcher import cosine, yielding_iter


async def scores(call: PoolingCall, request: ScoreRequest) -> msgspec.Struct:
    """Answer /score with one score for each pair of texts. Raises `ApiError`."""
    pairs = paired(_as_list(request.text_1), _as_list(request.text_2))
    values = await _scores(call, pairs, activation=request.activation, param="text_2")
    data = [ScoreItem(index=i, score=score) for i, score in enumerate(values)]
    return PoolingAnswer(id=call.id, created=call.created, model=call.model, data=data, usage=call.usage())


async def ranks(call: PoolingCall, request: RerankRequest) -> msgspec.Struct | list[TeiRank]:
    """Answer /rerank with the documents sorted by their score. A request with `texts` gets the form of Text Embeddings
    Inference, one with `documents` that of Jina and Cohere. Raises `ApiError`.
    """
    # Which of the two fields holds the texts decides the form of the answer, as in llama.cpp's server.
    texts = _documents(request)
    pairs = [(request.query, text) for text in texts]
    activation = request.activation if request.raw_scores is None else not request.raw_scores
    param = "documents" if request.texts is None else "texts"
    values = await _scores(call, pairs, activation=activation, param=param)
    # Documents with equal scores stay in the order of the request.
    order = sorted(range(len(texts)), key=lambda i: (-values[i], i))
    if request.texts is not None:
        shown = texts if request.return_text else None
        kept = order[: request.top_n or None]
        return [TeiRank(index=i, score=values[i], text=shown[i] if shown else msgspec.UNSET) for i in kept]
    returns_text = request.return_documents is not False
    results = [
        RankedItem(
            index=i,
            document=RankedDocument(texts[i]) if returns_text else msgspec.UNSET,
            relevance_score=values[i],
        )
        for i in order[: request.top_n or None]
    ]
    usage = call.usage()
    return RerankAnswer(
        id=call.id,
        model=call.model,
        usage=RerankUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens),
        results=results,
    )


def _documents(request: RerankRequest) -> list[str]:
    """Return the texts that the request wants ranked. Raises `BadRequestError` unless it has exactly one of `documents`
    and `texts`.
    """
    if request.texts is not None and request.documents is None:
        return request.texts
    if request.documents is None or request.texts is not None:
        raise BadRequestError("documents: the texts to rank are needed, as documents or as texts", param="documents")
    if request.return_text is not None:
        raise BadRequestError("return_text belongs to texts: use return_documents", param="return_text")
    return [document if isinstance(document, str) else document.text for document in request.documents]


def paired(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of texts to score: the only text of `first` with each of `second`, or the two lists element by
    element.

    Raises `BadRequestError` if the lists have different lengths and `first` has more than one text.
    """
    if len(first) == 1:
        return [(first[0], text) for text in second]
    if len(first) == len(second):
        return list(zip(first, second, strict=True))
    raise BadRequestError(
        f"text_1 has {len(first)} texts and text_2 has {len(second)}: they must be 1 and 1, 1 and N, or N and N",
        param="text_2",
    )


async def _scores(
    call: PoolingCall, pairs: Sequence[tuple[str, str]], *, activation: bool | None, param: str
) -> list[float]:
    """Return the score of each pair of texts: a classifier's output, or the cosine of two embeddings. `activation` says
    whether a classifier's output gets its activation function (None: as the model is configured); `param` is the field
    that errors name. Raises `BadRequestError` if the model cannot score.
    """
    call.require("classify", "embed")
    if "embed" in call.profile.tasks:
        return await _cosines(call, pairs, param)
    if len(call.profile.labels) != 1:
        raise BadRequestError(
            f"this model has {len(call.profile.labels)} classes, but scores need a model with a single one: use"
            " /classify",
            code="unsupported_endpoint",
        )
    inputs = await _pair_inputs(call, pairs, param)
    vectors = await call.compute(inputs, PoolingSpec(task="classify", activation=activation))
    return [vector.numbers()[0] for vector in vectors]


async def _pair_inputs(call: PoolingCall, pairs: Sequence[tuple[str, str]], param: str) -> list[PoolingInput]:
    """Return one tokenized input for each pair of texts: rendered by `--chat-template` if it is given, else joined by
    the tokenizer as a pair.
    """
    if call.service.settings.chat_template is None:
        return await call.texts(pairs, param=param)
    rendered = []
    for first, second in pairs:
        chat = TokenizeRequest(
            messages=[ChatMessage(role="query", content=first), ChatMessage(role="document", content=second)],
            add_generation_prompt=False,
        )
        rendered.append(await call.service.model.render_chat(chat))
        # Rendering itself never suspends this task. Without this, thousands of pairs would block the event loop.
        await asyncio.sleep(0)
    return await call.texts(rendered, param=param, rules=call.rules(add_special_tokens=False))


async def _cosines(call: PoolingCall, pairs: Sequence[tuple[str, str]], param: str) -> list[float]:
    """Return the cosine of the two embeddings of each pair of texts. `param` is the request's field that errors
    name.
    """
    # Each distinct text is embedded once: /rerank has the query in every pair.
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    vectors = await call.compute(await call.texts(texts, param=param), PoolingSpec(task="embed"))
    by_text = {text: vector.values() for text, vector in zip(texts, vectors, strict=True)}
    size = len(vectors[0].data) if vectors else 0
    return [cosine(by_text[first], by_text[second]) async for first, second in yielding_iter(pairs, lambda _: size)]


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
