"""`POST /v1/load_lora_adapter`, `/v1/unload_lora_adapter`, as vLLM's, with `--allow-runtime-lora-updating` alone."""

import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.cluster.adapter_changes import AdapterRollout
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.protocol.asgi import Asgi, Receive, RequestContext, Scope, Send, read_body
from baton_serve.services.router.protocol.errors import BadRequestError, NotFoundError, UnavailableError
from baton_serve.services.router.protocol.openai_requests import (
    AdapterRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from baton_serve.services.router.protocol.request_parsing import parsed

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=AdapterRequest)


def adapter_endpoints(service: ModelService) -> dict[str, Asgi]:
    changes = AdapterRollout(service.cluster)

    async def load(asked: ModelService, request: LoadAdapterRequest) -> str:
        name = request.lora_name
        if any(name in sibling.names() or name in sibling.adapters() for sibling in asked.siblings):
            raise BadRequestError(f"the name {name!r} is in use", param="lora_name", code="name_in_use")
        await changes.load(_workers(asked), name, request.lora_path)
        return "added"

    async def unload(asked: ModelService, request: UnloadAdapterRequest) -> str:
        if request.lora_name not in asked.adapters():
            raise NotFoundError(f"no adapter is named {request.lora_name!r}", param="lora_name")
        await changes.unload(_workers(asked), request.lora_name)
        return "removed"

    return {
        "/v1/load_lora_adapter": _Endpoint(service, LoadAdapterRequest, load),
        "/v1/unload_lora_adapter": _Endpoint(service, UnloadAdapterRequest, unload),
    }


class _Endpoint(Generic[R]):
    """`change` returns what has become of the adapter."""

    def __init__(
        self, service: ModelService, request: type[R], change: Callable[[ModelService, R], Awaitable[str]]
    ) -> None:
        self._service = service
        self._request = request
        self._change = change

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._service.settings.allow_runtime_lora_updating:
            raise NotFoundError("adapters change only where the router runs with --allow-runtime-lora-updating")
        request = await parsed(await read_body(scope, receive), self._request)
        what = await self._change(self._service.of(request.model), request)
        caller = RequestContext.of(scope).caller.name
        logger.info("adapter %s: %s on request of %s", request.lora_name, what, caller)
        text = f"Success: LoRA adapter '{request.lora_name}' {what} successfully.".encode()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


def _workers(service: ModelService) -> list[WorkerState]:
    """Raises `UnavailableError` when there is none."""
    workers = [m for m in service.workers() if m.state == "ready" and m.record.pooling is None]
    if not workers:
        raise UnavailableError("no instance is ready that writes text", retry_after_s=1.0)
    return workers
