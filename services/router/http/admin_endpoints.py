"""Serve vLLM's endpoints for operators (reset the prefix cache, profile, sleep, update weights), and decide who may
call them.

They are status 404 unless the router runs with `--enable-admin-endpoints`. Endpoints of vLLM that cannot be served here
are refused with the reason.
"""

import logging
import posixpath
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response

from baton_serve.contracts.messages import EngineAction, WeightsSource
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.cluster.cache_reset_and_profile import EngineActions
from baton_serve.services.router.cluster.sleep_and_reload import ModelActions
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.protocol.asgi import RequestContext, read_body
from baton_serve.services.router.protocol.errors import (
    BadRequestError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from baton_serve.services.router.protocol.openai_requests import UpdateWeightsRequest
from baton_serve.services.router.protocol.request_bounds import MAX_NAME_CHARS
from baton_serve.services.router.protocol.request_parsing import parsed
from baton_serve.services.router.quota.api_keys import check_operator

logger = logging.getLogger(__name__)

ModelName = Annotated[str | None, Query(max_length=MAX_NAME_CHARS)]

ACTIONS: Mapping[EngineAction, str] = {
    "reset_prefix_cache": "Forget the cached prefixes on all instances that generate text",
    "start_profile": "Start to record torch's profiler on all instances that generate text",
    "stop_profile": "Stop to record, and write a trace on the host of each instance",
}
"""The served actions with the purposes that the OpenAPI document shows."""

REFUSED: Mapping[str, str] = {
    "collective_rpc": "it would run any method of the engine by its name, which no client of a network may do",
}
"""Endpoints of vLLM and SGLang that are refused, each with the reason."""

DRAIN_S = 60.0
"""Default time in seconds that running requests have to finish before the model changes."""
MAX_DRAIN_S = 3600.0
DrainSeconds = Annotated[float, Query(ge=0.0, le=MAX_DRAIN_S)]
SleepLevel = Annotated[Literal["1", "2"], Query()]
SleepMode = Annotated[Literal["wait"], Query()]
Tags = Annotated[list[str] | None, Query(max_length=8)]
_TAGS = frozenset({"weights", "kv_cache"})
"""vLLM's names for what `/wake_up` loads."""


class ActionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an operator's action: the result of each instance, by its id."""

    instances: Mapping[str, str]


class SleepState(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `GET /is_sleeping`, as in vLLM: whether an instance sleeps."""

    is_sleeping: bool


class WeightsUpdated(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `/update_weights_from_disk`: SGLang's fields, and the result of each instance by its id."""

    success: bool = True
    message: str
    instances: Mapping[str, str]


def admin_routes(service: ModelService) -> APIRouter:
    """Return the HTTP routes for operators, such as /sleep and /reset_prefix_cache. They act on the model that the
    query parameter `model` names, or else on all models.

    `service` is that of the default model.
    """
    router = APIRouter()
    actions = EngineActions(service.cluster)

    def add_action(action: EngineAction, summary: str) -> None:
        @router.post(f"/{action}", summary=summary, operation_id=action)
        async def run(request: Request, model: ModelName = None) -> Response:
            _log_call(request, service, action)
            return _json(ActionAnswer(instances=await actions.run(_workers(service, model), action)))

    def add_refusal(name: str, reason: str) -> None:
        @router.post(f"/{name}", summary=f"Not served: {reason}", operation_id=name)
        async def refuse(request: Request) -> Response:
            check_access(request, service)
            raise BadRequestError(f"/{name} is not supported: {reason}", code="unsupported_endpoint")

    for action, summary in ACTIONS.items():
        add_action(action, summary)
    for name, reason in REFUSED.items():
        add_refusal(name, reason)

    _add_model_actions(router, service, ModelActions(service.cluster, actions))
    return router


def _add_model_actions(router: APIRouter, service: ModelService, models: ModelActions) -> None:
    """Add the routes to `router` by which an operator lets models sleep, wakes them up and replaces their weights."""

    @router.post("/sleep", summary="Free weights and KV cache of all instances; both levels do the same")
    async def sleep(
        request: Request,
        model: ModelName = None,
        level: SleepLevel = "1",
        mode: SleepMode = "wait",
        drain_timeout_s: DrainSeconds = DRAIN_S,
    ) -> Response:
        _log_call(request, service, f"sleep (level {level}, mode {mode})")
        return _json(ActionAnswer(instances=await models.sleep(_workers(service, model), drain_s=drain_timeout_s)))

    @router.post("/wake_up", summary="Load the models of all sleeping instances again")
    async def wake_up(request: Request, model: ModelName = None, tags: Tags = None) -> Response:
        _log_call(request, service, "wake_up")
        # One load brings both back, so a client that wants one of them alone would get more than it has memory for.
        if tags and set(tags) != _TAGS:
            raise BadRequestError(
                "weights and KV cache return together: leave tags out, or give tags=weights&tags=kv_cache", param="tags"
            )
        return _json(ActionAnswer(instances=await models.wake_up(_workers(service, model))))

    @router.get("/is_sleeping", summary="Return whether an instance sleeps")
    async def is_sleeping(request: Request, model: ModelName = None) -> Response:
        check_access(request, service)
        return _json(SleepState(is_sleeping=any(worker.record.sleeping for worker in _workers(service, model))))

    @router.post("/update_weights_from_disk", summary="Load other weights of the same architecture on all instances")
    async def update_weights_from_disk(request: Request, drain_timeout_s: DrainSeconds = DRAIN_S) -> Response:
        check_access(request, service)
        asked = await parsed(await read_body(request.scope, request.receive), UpdateWeightsRequest)
        _log_call(request, service, f"update_weights_from_disk ({asked.model_path})")
        path = allowed_weights(asked.model_path, service.settings.update_weights_folder)
        # Each update has its own version, so that KV of the old weights can never be used with the new ones.
        weights = WeightsSource(model=path, load_format=asked.load_format, version=secrets.token_hex(8))
        done = await models.update_weights(_workers(service, asked.model), weights, drain_s=drain_timeout_s)
        return _json(WeightsUpdated(message=f"loaded {path} on {len(done)} instances", instances=done))


def allowed_weights(path: str, folder: str | None) -> str:
    """Return `path` in normal form if it lies in `folder`. Raises `PermissionDeniedError` or `BadRequestError` if it
    does not; `folder` None permits no path.

    The path is one on the hosts of the instances, so only its text is checked. Links in the folder are followed: its
    content is the operator's.
    """
    if folder is None:
        raise PermissionDeniedError(
            "no folder is set from which weights may be loaded: start the router with --update-weights-folder"
        )
    if not posixpath.isabs(path) or "\0" in path:
        raise BadRequestError("model_path must be an absolute path", param="model_path")
    normal, root = posixpath.normpath(path), posixpath.normpath(posixpath.abspath(folder))
    if posixpath.commonpath([normal, root]) != root or normal == root:
        raise PermissionDeniedError(
            f"{path[:200]} does not lie in the folder of --update-weights-folder", param="model_path"
        )
    return normal


def _log_call(request: Request, service: ModelService, action: str) -> None:
    """Check that the caller of the request may act as an operator, and log the action. Raises as `check_access`
    does.
    """
    check_access(request, service)
    logger.info("%s on request of the API key %s", action, RequestContext.of(request.scope).caller.name)


def check_access(request: Request, service: ModelService) -> None:
    """Raise `NotFoundError` if the operators' endpoints are turned off, and `PermissionDeniedError` if the API key is
    not an operator's or a web page of another site sends the request.
    """
    settings = service.settings
    if not settings.enable_admin_endpoints:
        raise NotFoundError("this router serves no endpoints for operators: start it with --enable-admin-endpoints")
    # A browser sends a POST without a body for any web page and asks nobody before; it always adds this header.
    origin = request.headers.get("origin")
    if origin is not None and not {origin, "*"} & set(settings.allowed_origins):
        raise PermissionDeniedError(f"pages of {origin[:100]} may not call this endpoint (--allowed-origins)")
    check_operator(RequestContext.of(request.scope).caller, "call endpoints for operators")


def _workers(service: ModelService, model: str | None) -> Sequence[WorkerState]:
    """Return the ready instances that generate text, of one model or (with None) of all models. Raises
    `UnavailableError` if no instance is ready.
    """
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
