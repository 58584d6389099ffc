"""Serve vLLM's endpoints for operators: `/reset_prefix_cache`, `/start_profile`, `/stop_profile`, `/is_sleeping`.

They are status 404 unless the router runs with `--enable-admin-endpoints`. Endpoints of vLLM that cannot be served here
are refused with the reason.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from baton_serve.contracts.messages import EngineAction
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.cluster.engine_actions import EngineActions
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.protocol.asgi import RequestContext
from baton_serve.services.router.protocol.bounds import MAX_NAME_CHARS
from baton_serve.services.router.protocol.errors import (
    BadRequestError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

ModelName = Annotated[str | None, Query(max_length=MAX_NAME_CHARS)]

ACTIONS: Mapping[EngineAction, str] = {
    "reset_prefix_cache": "Forget the cached prefixes on all instances that generate text",
    "start_profile": "Start to record torch's profiler on all instances that generate text",
    "stop_profile": "Stop to record, and write a trace on the host of each instance",
}
"""The served actions with the purposes that the OpenAPI document shows."""

_RESTART = (
    "instances share KV blocks with each other, so none may change alone: restart them instead, which drains them"
)
REFUSED: Mapping[str, str] = {
    "sleep": f"an instance cannot free its memory while it runs; {_RESTART}",
    "wake_up": "instances never sleep",
    "update_weights_from_disk": f"weights cannot change while an instance runs; {_RESTART}",
    "collective_rpc": "it would run any method of the engine by its name, which no client of a network may do",
}
"""Endpoints of vLLM and SGLang that are refused, each with the reason."""


class ActionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an action: the result of each instance by its id."""

    instances: Mapping[str, str]


class SleepState(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `GET /is_sleeping`, as in vLLM. Instances never sleep."""

    is_sleeping: bool = False


def admin_routes(service: ModelService) -> APIRouter:
    """Return the routes for operators. They act on the model that the parameter `model` names, or else on all.

    `service` is that of the default model.
    """
    router = APIRouter()
    actions = EngineActions(service.cluster)

    def add_action(action: EngineAction, summary: str) -> None:
        @router.post(f"/{action}", summary=summary, operation_id=action)
        async def run(request: Request, model: ModelName = None) -> Response:
            check_operator(request, service)
            caller = RequestContext.of(request.scope).caller.name
            logger.info("%s on request of the API key %s", action, caller)
            return _json(ActionAnswer(instances=await actions.run(_workers(service, model), action)))

    def add_refusal(name: str, reason: str) -> None:
        @router.post(f"/{name}", summary=f"Not served: {reason}", operation_id=name)
        async def refuse(request: Request) -> Response:
            check_operator(request, service)
            raise BadRequestError(f"/{name} is not supported: {reason}", code="unsupported_endpoint")

    for action, summary in ACTIONS.items():
        add_action(action, summary)
    for name, reason in REFUSED.items():
        add_refusal(name, reason)

    @router.get("/is_sleeping", summary="Return whether the instances sleep, which they never do")
    async def is_sleeping(request: Request) -> Response:
        check_operator(request, service)
        return _json(SleepState())

    return router


def check_operator(request: Request, service: ModelService) -> None:
    """Raise `NotFoundError` if these endpoints are off, and `PermissionDeniedError` for a request of a foreign page."""
    settings = service.settings
    if not settings.enable_admin_endpoints:
        raise NotFoundError("this router serves no endpoints for operators: start it with --enable-admin-endpoints")
    # A browser sends a POST without a body for any web page and asks nobody before; it always adds this header.
    origin = request.headers.get("origin")
    if origin is not None and not {origin, "*"} & set(settings.allowed_origins):
        raise PermissionDeniedError(f"pages of {origin[:100]} may not call this endpoint (--allowed-origins)")


def _workers(service: ModelService, model: str | None) -> Sequence[WorkerState]:
    """Return the ready instances of a model, or of all models, that generate text. Raises `UnavailableError`."""
    services = service.siblings if model is None else [service.of(model)]
    if model is not None:
        services[0].view.model_name(model)  # called for its error, if the model does not exist
    known = {worker.record.instance: worker for one in services for worker in one.view.workers()}
    found = [worker for worker in known.values() if worker.state == "ready" and worker.record.pooling is None]
    if not found:
        raise UnavailableError("no instance that generates text is ready: retry later", retry_after_s=1.0)
    return found


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
