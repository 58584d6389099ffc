"""`POST /score` and `/rerank`: how well two texts match.

A classifier with a single class reads both at once; of an embedding model it is the cosine of the two embeddings.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from baton_serve.contracts.pooling import PoolingInput, PoolingParams
from baton_serve.services.router.api.pooling.endpoint import PoolingCall
from baton_serve.services.router.api.pooling.responses import (
    PoolingAnswer,
    RankedDocument,
    RankedItem,
    RerankAnswer,
    RerankUsage,
    ScoreItem,
)
from baton_serve.services.router.api.pooling.schema import RerankRequest, ScoreRequest
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import ChatMessage, TokenizeRequest
from baton_serve.services.router.requests.pooling_dispatcher import cosine, yielding_iter


async def scores(call: PoolingCall, request: ScoreRequest) -> msgspec.Struct:
    pairs = paired(_as_list(request.text_1), _as_list(request.text_2))
    found = await _scores(call, pairs, activation=request.activation, param="text_2")
    data = [ScoreItem(index=i, score=score) for i, score in enumerate(found)]
    return PoolingAnswer(id=call.id, created=call.created, model=call.model, data=data, usage=call.usage())


async def ranks(call: PoolingCall, request: RerankRequest) -> msgspec.Struct:
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    pairs = [(request.query, text) for text in texts]
    found = await _scores(call, pairs, activation=request.activation, param="documents")
    order = sorted(range(len(texts)), key=lambda i: (-found[i], i))
    shows = request.return_documents is not False
    results = [
        RankedItem(index=i, document=RankedDocument(texts[i]) if shows else msgspec.UNSET, relevance_score=found[i])
        for i in order[: request.top_n or None]
    ]
    usage = call.usage()
    return RerankAnswer(
        id=call.id,
        model=call.model,
        usage=RerankUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens),
        results=results,
    )


def paired(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """One to one, one to many, or in pairs. Raises `BadRequestError`."""
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
    call.require("classify", "embed")
    if "embed" in call.profile.tasks:
        return await _cosines(call, pairs, param)
    if len(call.profile.labels) != 1:
        raise BadRequestError(
            f"this model tells {len(call.profile.labels)} classes apart; scores need a model with a single one: ask"
            " /classify",
            code="unsupported_endpoint",
        )
    inputs = await _pair_inputs(call, pairs, param)
    vectors = await call.compute(inputs, PoolingParams(task="classify", activation=activation))
    return [vector.numbers()[0] for vector in vectors]


async def _pair_inputs(call: PoolingCall, pairs: Sequence[tuple[str, str]], param: str) -> list[PoolingInput]:
    """Through the template that the server was given, else as the tokenizer frames a pair."""
    if call.service.settings.chat_template is None:
        return await call.texts(pairs, param=param)
    rendered = []
    for first, second in pairs:
        chat = TokenizeRequest(
            messages=[ChatMessage(role="query", content=first), ChatMessage(role="document", content=second)],
            add_generation_prompt=False,
        )
        rendered.append(await call.service.model.render_chat(chat))
        await asyncio.sleep(0)  # rendering waits for nothing, and there may be thousands
    return await call.texts(rendered, param=param, rules=call.rules(add_special_tokens=False))


async def _cosines(call: PoolingCall, pairs: Sequence[tuple[str, str]], param: str) -> list[float]:
    """Each distinct text is embedded once."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    vectors = await call.compute(await call.texts(texts, param=param), PoolingParams(task="embed"))
    of_text = {text: vector.values() for text, vector in zip(texts, vectors, strict=True)}
    size = len(vectors[0].data) if vectors else 0
    return [cosine(of_text[first], of_text[second]) async for first, second in yielding_iter(pairs, lambda _: size)]


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
