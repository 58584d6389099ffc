"""What clients may ask for by name: models, their aliases, and adapters."""

from typing import Any

import msgspec
from fastapi import APIRouter, Response

from baton_serve.contracts.model_path import model_folder
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.protocol.errors import ModelNotFoundError
from baton_serve.services.router.protocol.openai_responses import ModelCard, ModelList
from baton_serve.services.router.text.chat_template import ChatTemplates
from baton_serve.services.router.text.tokenization import read_json


def tokenizer_routes(service: ModelService) -> APIRouter:
    """Raises `ModelFolderError`."""
    router = APIRouter()
    if not service.settings.enable_tokenizer_info_endpoint:
        return router
    body = msgspec.json.encode(tokenizer_info(service))

    @router.get("/tokenizer_info", summary="The tokenizer's configuration and chat template")
    async def get_tokenizer_info() -> Response:
        return Response(body, media_type="application/json")

    return router


def tokenizer_info(service: ModelService) -> dict[str, Any]:
    """The folder's tokenizer_config.json with tokens as their texts, and the chat template that is in force."""
    settings = service.settings
    folder = model_folder(settings.tokenizer or settings.model)
    stated = read_json(folder / "tokenizer_config.json", dict[str, Any]) or {}
    info = {name: _texts(value) for name, value in stated.items()} | dict(service.model.tokenizer.special_tokens)
    info.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    info.pop("chat_template", None)
    if (template := ChatTemplates.from_folder(folder, {}, settings.chat_template).source) is not None:
        info["chat_template"] = template
    return info


def _texts(value: Any) -> Any:
    """Tokens, which have a `content` beside how they are cut, as that text."""
    if isinstance(value, list):
        return [_texts(one) for one in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("content"), str):
        return value["content"]
    return {name: _texts(one) for name, one in value.items()}


def model_routes(service: ModelService) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", summary="Names under which models and adapters are served")
    async def models() -> Response:
        return _json(ModelList(data=_cards(service)))

    @router.get("/v1/models/{name:path}", summary="One of them", responses={404: {"description": "No such model"}})
    async def model(name: str) -> Response:
        for card in _cards(service):
            if card.id == name:
                return _json(card)
        error = ModelNotFoundError(f"the model {name!r} does not exist", param="model")
        return _json(error.body(), status=error.status)

    return router


def _cards(service: ModelService) -> list[ModelCard]:
    """Models first, then their adapters."""
    cards = [
        ModelCard(id=name, created=sibling.started_at, root=sibling.model.path, max_model_len=sibling.max_model_len())
        for sibling in service.siblings
        for name in sibling.names()
    ]
    return cards + [
        ModelCard(
            id=adapter.name,
            created=sibling.started_at,
            root=adapter.path,
            parent=sibling.names()[0],
            max_model_len=sibling.max_model_len(),
        )
        for sibling in service.siblings
        for adapter in sibling.adapters().values()
        if adapter.name not in sibling.names()
    ]


def _json(body: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
