"""What clients may ask for by name: models, their aliases, and adapters."""

import msgspec
from fastapi import APIRouter, Response

from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.protocol.errors import ModelNotFoundError
from baton_serve.services.router.protocol.openai_responses import ModelCard, ModelList


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
