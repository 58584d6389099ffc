"""Serve `/v1/models` (models, aliases, adapters) and `/tokenizer_info`."""

from typing import Any

import msgspec
from fastapi import APIRouter, Response

from baton_serve.contracts.model_path import model_folder
from baton_serve.contracts.vision import default_template
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.protocol.errors import ModelNotFoundError
from baton_serve.services.router.protocol.openai_responses import ModelCard, ModelList
from baton_serve.services.router.text.chat_template import ChatTemplates
from baton_serve.services.router.text.tokenization import read_json


def tokenizer_routes(service: ModelService) -> APIRouter:
    """Return the HTTP route `GET /tokenizer_info`, or none without `--enable-tokenizer-info-endpoint`.

    Raises `ModelFolderError` if the tokenizer's files cannot be read.
    """
    router = APIRouter()
    if not service.settings.enable_tokenizer_info_endpoint:
        return router
    # Encoded once: neither the folder nor the template changes while the router runs.
    body = msgspec.json.encode(tokenizer_info(service))

    @router.get("/tokenizer_info", summary="The tokenizer's configuration and chat template")
    async def get_tokenizer_info() -> Response:
        return Response(body, media_type="application/json")

    return router


def tokenizer_info(service: ModelService) -> dict[str, Any]:
    """Return the content of the model's tokenizer_config.json, with special tokens as plain texts, and the chat
    template in use.

    The chat template is that of `--chat-template` if it is given.
    """
    settings = service.settings
    folder = model_folder(settings.tokenizer or settings.model)
    stated = read_json(folder / "tokenizer_config.json", dict[str, Any]) or {}
    info = {name: _texts(value) for name, value in stated.items()} | dict(service.model.tokenizer.special_tokens)
    info.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    info.pop("chat_template", None)
    default = default_template(ModelFacts.of(model_folder(settings.model)))
    if (template := ChatTemplates.from_folder(folder, {}, settings.chat_template, default).source) is not None:
        info["chat_template"] = template
    return info


def _texts(value: Any) -> Any:
    """Return a JSON value in which each token object is replaced by its `content`; the other fields of such an object
    only control how text is split.
    """
    if isinstance(value, list):
        return [_texts(one) for one in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("content"), str):
        return value["content"]
    return {name: _texts(one) for name, one in value.items()}


def model_routes(service: ModelService) -> APIRouter:
    """Return the HTTP routes that list the models and adapters: all of them, or one by its name."""
    router = APIRouter()

    @router.get("/v1/models", summary="List the names under which models and adapters are served")
    async def models() -> Response:
        return _json(ModelList(data=_cards(service)))

    # `:path`, because names often contain a slash: Qwen/Qwen3-8B.
    @router.get(
        "/v1/models/{name:path}",
        summary="Describe one model or adapter",
        responses={404: {"description": "The model does not exist"}},
    )
    async def model(name: str) -> Response:
        for card in _cards(service):
            if card.id == name:
                return _json(card)
        error = ModelNotFoundError(f"the model {name!r} does not exist", param="model")
        return _json(error.body(), status=error.status)

    return router


def _cards(service: ModelService) -> list[ModelCard]:
    """Return the entries of /v1/models: all models of the router under each of their names, then their LoRA
    adapters.
    """
    cards = [
        ModelCard(
            id=name,
            created=sibling.started_at,
            root=sibling.model.path,
            max_model_len=sibling.view.max_model_len(),
            tasks=sibling.view.tasks(),
            inputs=sibling.model.inputs,
        )
        for sibling in service.siblings
        for name in sibling.view.names()
    ]
    return cards + [
        ModelCard(
            id=adapter.name,
            created=sibling.started_at,
            root=adapter.path,
            parent=adapter.base_model_name or sibling.view.names()[0],
            max_model_len=sibling.view.max_model_len(),
            tasks=sibling.view.tasks(),
            inputs=sibling.model.inputs,
        )
        for sibling in service.siblings
        for adapter in sibling.view.adapters().values()
        # A request by such a name reaches the model itself (`ModelView.model_name`), so it must not appear twice.
        if adapter.name not in sibling.view.names()
    ]


def _json(body: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
