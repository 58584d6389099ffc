"""Serve `POST /score` and `/rerank`: decide whether a classifier or the cosine of embeddings gives a score, and sort
documents.

A classifier with a single class (a cross-encoder) computes both texts together, and its output is the score. With an
embedding model the score is the cosine of the two embeddings.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from baton_serve.contracts.pooling import PoolingInput, PoolingSpec
from baton_serve.services.router.api.pooling.endpoint import PoolingCall
from baton_serve.services.router.api.pooling.image_inputs import lone_text
from baton_serve.services.router.api.pooling.responses import (
    PoolingAnswer,
    RankedDocument,
    RankedItem,
    RerankAnswer,
    RerankUsage,
    ScoreItem,
    TeiRank,
)
from baton_serve.services.router.api.pooling.schema import (
    Document,
    RerankRequest,
    Scored,
    ScoredParts,
    Scoreds,
    ScoreRequest,
)
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import ChatMessage, TokenizeRequest
from baton_serve.services.router.requests.pooling_dispatcher import cosine, yielding_iter

T = TypeVar("T")
Pair = tuple[Scored, Scored]


async def scores(call: PoolingCall, request: ScoreRequest) -> msgspec.Struct:
    """Answer /score with one score for each pair of texts. Raises `ApiError`."""
    pairs = paired(_as_list(request.text_1), _as_list(request.text_2))
    scoring = Scoring(call, param="text_2", settings=request.mm_processor_kwargs)
    values = await scoring.scores(pairs, activation=request.activation)
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
    scoring = Scoring(call, param=param, settings=request.mm_processor_kwargs)
    values = await scoring.scores(pairs, activation=activation)
    # Documents with equal scores stay in the order of the request.
    order = sorted(range(len(texts)), key=lambda i: (-values[i], i))
    if request.texts is not None:
        shown = list(map(_text_of, texts)) if request.return_text else None
        kept = order[: request.top_n or None]
        return [TeiRank(index=i, score=values[i], text=shown[i] if shown else msgspec.UNSET) for i in kept]
    returns_text = request.return_documents is not False
    results = [
        RankedItem(
            index=i,
            document=RankedDocument(_text_of(texts[i])) if returns_text else msgspec.UNSET,
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


def _documents(request: RerankRequest) -> Sequence[Scored]:
    """Return the texts that the request wants ranked. Raises `BadRequestError` unless it has exactly one of `documents`
    and `texts`.
    """
    if request.texts is not None and request.documents is None:
        return request.texts
    if request.documents is None or request.texts is not None:
        raise BadRequestError("documents: the texts to rank are needed, as documents or as texts", param="documents")
    if request.return_text is not None:
        raise BadRequestError("return_text belongs to texts: use return_documents", param="return_text")
    return [document.text if isinstance(document, Document) else document for document in request.documents]


def paired(first: Sequence[T], second: Sequence[T]) -> list[tuple[T, T]]:
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


class Scoring:
    """Computes the scores of one request's pairs of texts, which may have images."""

    def __init__(self, call: PoolingCall, *, param: str, settings: Mapping[str, Any] | None) -> None:
        """`param` is the request's field that errors name; `settings` are its `mm_processor_kwargs`."""
        call.inputs.check_settings(settings)
        self._call = call
        self._param = param
        self._settings = None if settings is None else dict(settings)

    async def scores(self, pairs: Sequence[Pair], *, activation: bool | None) -> list[float]:
        """Return the score of each pair: a classifier's output, or the cosine of two embeddings. `activation` says
        whether a classifier's output gets its activation function (None: as the model is configured). Raises
        `BadRequestError` if the model cannot score.
        """
        call = self._call
        call.require("classify", "embed")
        if "embed" in call.profile.tasks:
            return await self._cosines(pairs)
        if len(call.profile.labels) != 1:
            raise BadRequestError(
                f"this model has {len(call.profile.labels)} classes, but scores need a model with a single one: use"
                " /classify",
                code="unsupported_endpoint",
            )
        inputs = await self._pair_inputs(pairs)
        vectors = await call.compute(inputs, PoolingSpec(task="classify", activation=activation))
        return [vector.numbers()[0] for vector in vectors]

    async def _pair_inputs(self, pairs: Sequence[Pair]) -> list[PoolingInput]:
        """Return one tokenized input for each pair: rendered by `--chat-template` if it is given, else joined by the
        tokenizer as a pair.
        """
        call = self._call
        if call.service.settings.chat_template is None:
            texts = [(first, second) for first, second in pairs if isinstance(first, str) and isinstance(second, str)]
            if len(texts) < len(pairs):
                raise BadRequestError(
                    f"{self._param}: texts with images are joined by a chat template (--chat-template), which this"
                    " server has not",
                    param=self._param,
                )
            return await call.inputs.texts(texts, param=self._param)
        found: list[PoolingInput] = []
        rendered: list[str] = []
        for first, second in pairs:
            chat = self._chat(_message("query", first), _message("document", second))
            if isinstance(first, str) and isinstance(second, str):
                rendered.append(await call.service.model.render_chat(chat))
            else:
                found.append(await call.inputs.chat(chat, param=self._param))
            # Rendering itself never suspends this task. Without this, thousands of pairs would block the event loop.
            await asyncio.sleep(0)
        texts_of = iter(
            await call.inputs.texts(rendered, param=self._param, rules=call.inputs.rules(add_special_tokens=False))
        )
        others = iter(found)
        return [next(texts_of if isinstance(a, str) and isinstance(b, str) else others) for a, b in pairs]

    async def _cosines(self, pairs: Sequence[Pair]) -> list[float]:
        """Return the cosine of the two embeddings of each pair."""
        # Each distinct text is embedded once: /rerank has the query in every pair.
        items = {_key(item): item for pair in pairs for item in pair}
        texts = [item for item in items.values() if isinstance(item, str)]
        read = iter(await self._call.inputs.texts(texts, param=self._param))
        inputs = [
            next(read) if isinstance(item, str) else await self._call.inputs.chat(self._chat(_message("user", item)))
            for item in items.values()
        ]
        vectors = await self._call.compute(inputs, PoolingSpec(task="embed"))
        by_key = {key: vector.values() for key, vector in zip(items, vectors, strict=True)}
        size = len(vectors[0].data) if vectors else 0
        return [
            cosine(by_key[_key(first)], by_key[_key(second)])
            async for first, second in yielding_iter(pairs, lambda _: size)
        ]

    def _chat(self, *messages: ChatMessage) -> TokenizeRequest:
        return TokenizeRequest(messages=list(messages), add_generation_prompt=False, mm_processor_kwargs=self._settings)


def _key(item: Scored) -> str | int:
    """Return a key that is equal for items that are certainly equal."""
    return item if isinstance(item, str) else id(item)


def _message(role: str, item: Scored) -> ChatMessage:
    return ChatMessage(role=role, content=item if isinstance(item, str) else item.content)


def _text_of(item: Scored) -> str:
    """Return the text of an item, without its images."""
    return item if isinstance(item, str) else lone_text([_message("user", item)])


def _as_list(items: Scoreds) -> list[Scored]:
    """Return the items to compare. Of a single object with parts, each part is one."""
    if isinstance(items, ScoredParts):
        return [ScoredParts(content=[part]) for part in items.content]
    return [items] if isinstance(items, str) else items
