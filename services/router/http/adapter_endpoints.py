"""Serve `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's bodies and answers.

Both are refused unless the router runs with `--allow-runtime-lora-updating`.
"""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, TypeVar

from baton_serve.contracts.instance import MAX_ADAPTERS
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.cluster.adapter_folder import AdapterFolder, FoundAdapter
from baton_serve.services.router.cluster.adapter_rollout import AdapterRollout
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.protocol.asgi import Asgi, Receive, RequestContext, Scope, Send, read_body
from baton_serve.services.router.protocol.errors import BadRequestError, NotFoundError, UnavailableError
from baton_serve.services.router.protocol.openai_requests import (
    AdapterRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from baton_serve.services.router.protocol.request_parsing import parsed
from baton_serve.services.router.quota.api_keys import check_operator

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=AdapterRequest)


def adapter_endpoints(service: ModelService) -> tuple[Asgi, Asgi]:
    """Return two ASGI applications: one that loads a LoRA adapter on the instances, and one that unloads it. Also let
    the service find adapters in `--lora-resolver-folder`, if it is given.

    `service` is that of the default model; a request may name another model.
    """
    rollout = AdapterRollout(service.cluster)

    async def load_found(found: FoundAdapter) -> None:
        # With several models only the adapter's config names the one it belongs to.
        fitting = [sibling for sibling in service.siblings if found.base in sibling.view.names()]
        target = service if len(service.siblings) == 1 else next(iter(fitting), None)
        if target is None:
            return
        known = target.view.adapters()
        if len(known) >= MAX_ADAPTERS and (oldest := folder.least_recently_used(known.values())) is not None:
            await rollout.unload(_workers(target), oldest)
        await rollout.load(_workers(target), found.name, found.path)

    if service.settings.lora_resolver_folder is not None:
        service.adapter_folder = folder = AdapterFolder(Path(service.settings.lora_resolver_folder), load_found)

    async def load(target: ModelService, request: LoadAdapterRequest) -> str:
        name = request.lora_name
        in_place = bool(request.load_inplace)
        # Clients name models and adapters in the same field, so a name must be unique over all models of the router.
        if any(
            name in sibling.view.names() or (name in sibling.view.adapters() and not (in_place and sibling is target))
            for sibling in target.siblings
        ):
            raise BadRequestError(
                f"the name {name!r} is in use: choose another lora_name, or unload the adapter of that name first",
                param="lora_name",
                code="name_in_use",
            )
        await rollout.load(_workers(target), name, request.lora_path, in_place=in_place)
        return "added"

    async def unload(target: ModelService, request: UnloadAdapterRequest) -> str:
        if request.lora_name not in target.view.adapters():
            raise NotFoundError(f"no adapter is named {request.lora_name!r}", param="lora_name")
        await rollout.unload(_workers(target), request.lora_name)
        return "removed"

    return _Endpoint(service, LoadAdapterRequest, load), _Endpoint(service, UnloadAdapterRequest, unload)


class _Endpoint(Generic[R]):
    """An ASGI application that loads or unloads a LoRA adapter of a model.

    `change` does it; it gets the service of the model that the request names. It returns the verb of the success
    message: "added" or "removed".
    """

    def __init__(
        self, service: ModelService, request: type[R], change: Callable[[ModelService, R], Awaitable[str]]
    ) -> None:
        self._service = service
        self._request = request
        self._change = change

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._service.settings.allow_runtime_lora_updating:
            raise NotFoundError(
                "this router does not change adapters at run time: start it with --allow-runtime-lora-updating"
            )
        caller = RequestContext.of(scope).caller
        check_operator(caller, "change adapters")
        request = await parsed(await read_body(scope, receive), self._request)
        verb = await self._change(self._service.of(request.model), request)
        logger.info("LoRA adapter %s was %s on request of the API key %s", request.lora_name, verb, caller.name)
        # vLLM answers with this text, not with JSON; clients compare it.
        text = f"Success: LoRA adapter '{request.lora_name}' {verb} successfully.".encode()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


def _workers(service: ModelService) -> list[WorkerState]:
    """Return the connected instances of a model that generates text; pooling models have no adapters.

    Raises `UnavailableError` if no such instance is connected.
    """
    workers = [worker for worker in service.view.workers() if worker.state == "ready" and worker.record.pooling is None]
    if not workers:
        raise UnavailableError("no instance that generates text is ready: retry later", retry_after_s=1.0)
    return workers
