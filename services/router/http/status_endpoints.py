"""Serve /health, /ping, /metrics, /version, /recent, /tokenize and /detokenize; metrics are counted in
`requests/metrics.py`.

None of these endpoints sends work to an instance.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from baton_serve.services.common.version import VERSION
from baton_serve.services.router.api.chat_preparation import counted_tokens, processor_settings_of
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.cluster.readiness import (
    count_pools,
    empty_pools_reason,
    fallback_warning,
    sleep_warning,
    unready_reason,
)
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.processes.sibling_rpc import ProcessStats, SiblingRpc, join_metrics, newest_requests
from baton_serve.services.router.protocol.asgi import (
    Receive,
    RequestContext,
    Scope,
    Send,
    authorization,
    read_body,
    send_json,
)
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import DetokenizeRequest, TokenizeRequest
from baton_serve.services.router.protocol.openai_responses import DetokenizeAnswer, TokenizeAnswer
from baton_serve.services.router.protocol.request_parsing import is_long, parsed
from baton_serve.services.router.quota.api_keys import ApiKeys
from baton_serve.services.router.requests.handoff_counts import HandoffStats, joined, warning_of
from baton_serve.services.router.text.multimodal.media_parts import media_of
from baton_serve.services.router.text.tokenization import beside_loop


class LinkHealth(msgspec.Struct, frozen=True):
    """Describes one KV transfer link of an instance in the body of /health."""

    peer: str
    transport: str
    gigabytes_per_second: float
    choice: str
    """The reason for this transport: `rule`, `proved` (by a probe), `forced` (by a setting), or `fallback`, if a better
    transport was demoted or is not available."""
    reason: str
    """The result of each transport that was tried, best first."""


class InstanceHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one connected instance in the body of /health, from its registry record and its last load report."""

    instance: str
    generation: int
    role: str
    host: str
    http_address: str
    draining: bool
    sleeping: bool
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    host_used_blocks: int
    host_total_blocks: int
    prefill_tokens_per_s: float
    wrong_kernels: list[str]
    """Operations whose kernels were wrong on the instance's device, so that slower ones serve."""
    links: list[LinkHealth]


class UnreachableInstance(msgspec.Struct, frozen=True):
    """Describes an instance in the body of /health that is registered but not connected to this router."""

    instance: str
    role: str
    http_address: str


class RouterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /health for a client without an accepted API key: the fields that health probes need, without names
    and addresses of instances.
    """

    status: str
    reason: str | None
    """Why no request can be served; None if requests can be served."""
    pools: Mapping[str, int]
    """Number of instances of each role that accept requests."""
    registry_connected: bool


class RouterHealth(RouterStatus, frozen=True, kw_only=True):
    """The body of /health for a client with an accepted API key, and for every client if the router has no keys."""

    requests_in_flight: int
    generated_tokens: int
    """Number of tokens generated since the start of the router's processes."""
    handoffs: dict[str, HandoffStats]
    """Due and completed KV handoffs of the last minute, by name of the model."""
    warning: str | None
    """A problem that an operator should look into although requests can be served; None without one."""
    instances: list[InstanceHealth]
    unreached: list[UnreachableInstance]
    """Instances that are registered but not connected: just started, just lost, or not reachable from here."""


def own_metrics(service: ModelService) -> str:
    """Return the metrics of this router process in Prometheus' text format."""
    # The request log counts in batches. Flush it, so that the metrics contain the requests that have just ended.
    for sibling in service.siblings:
        sibling.dispatcher.request_log.flush()
    return generate_latest(service.metrics.registry).decode()


def own_stats(service: ModelService) -> ProcessStats:
    """Return the counters and the recent requests of this router process, of all its models together."""
    recent = [request for sibling in service.siblings for request in sibling.dispatcher.request_log.recent()]
    return ProcessStats(
        requests_in_flight=sum(sibling.dispatcher.num_running for sibling in service.siblings),
        generated_tokens=sum(sibling.metrics.generated_tokens for sibling in service.siblings),
        handoffs=_own_handoffs(service),
        recent=[(ended_at, caller, msgspec.Raw(msgspec.json.encode(request))) for ended_at, caller, request in recent],
    )


def _own_handoffs(service: ModelService) -> dict[str, HandoffStats]:
    return {one.metrics.model_name: one.dispatcher.handoff_counts.stats() for one in service.siblings}


def public_status(service: ModelService) -> RouterStatus:
    """Return those parts of the body of /health that a client without an API key may see."""
    cluster = service.cluster
    reason = empty_pools_reason(cluster)
    return RouterStatus(
        status="ok" if reason is None else "unavailable",
        reason=reason,
        pools=count_pools(cluster),
        registry_connected=cluster.is_registry_connected(),
    )


def health(service: ModelService, others: Sequence[ProcessStats] = ()) -> RouterHealth:
    """Return the body of /health: the state of the cluster as this router process sees it.

    `others` are the counters of the sibling processes behind this port; the result has their sum with this process's
    counters.
    """
    cluster = service.cluster
    ready = [worker for worker in cluster.workers() if worker.state == "ready"]
    unreached = [worker.record for worker in cluster.workers() if worker.state != "ready"]
    reason = unready_reason(cluster)
    handoffs = joined([_own_handoffs(service), *(other.handoffs for other in others)])
    return RouterHealth(
        status="ok" if reason is None else "unavailable",
        reason=reason,
        pools=count_pools(cluster),
        registry_connected=cluster.is_registry_connected(),
        requests_in_flight=sum(sibling.dispatcher.num_running for sibling in service.siblings)
        + sum(other.requests_in_flight for other in others),
        generated_tokens=sum(sibling.metrics.generated_tokens for sibling in service.siblings)
        + sum(other.generated_tokens for other in others),
        handoffs=handoffs,
        warning=sleep_warning(cluster) or fallback_warning(cluster) or warning_of(handoffs),
        instances=[_instance_health(worker) for worker in ready],
        unreached=[UnreachableInstance(record.instance, record.role, record.http_address) for record in unreached],
    )


def _instance_health(worker: WorkerState) -> InstanceHealth:
    record, load = worker.record, worker.record.load
    return InstanceHealth(
        instance=record.instance,
        generation=record.generation,
        role=record.role,
        host=record.host,
        http_address=record.http_address,
        draining=not worker.takes_work,
        sleeping=record.sleeping,
        running=load.running,
        waiting=load.waiting,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        host_used_blocks=load.host_used_blocks,
        host_total_blocks=load.host_total_blocks,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        wrong_kernels=record.wrong_kernels,
        links=[
            LinkHealth(link.peer, link.transport, link.bytes_per_second / 1e9, link.choice, link.reason)
            for link in worker.links
        ],
    )


def monitoring_routes(service: ModelService, api_keys: ApiKeys, sibling_rpc: SiblingRpc | None = None) -> APIRouter:
    """Return the HTTP routes for health probes and metrics. They need no API key, but without one /health leaves out
    the details.

    Counters and metrics include those of the sibling processes if `sibling_rpc` is given.
    """
    router = APIRouter()

    @router.get("/health", summary="Report pools, instances and links; status 503 if no request can be served")
    async def get_health(request: Request) -> Response:
        # The gateway checks no key here, because probes have none.
        has_key = api_keys.caller(authorization(dict(request.scope["headers"]))) is not None
        state = health(service, await _siblings(sibling_rpc)) if has_key else public_status(service)
        return _json(state, status=200 if state.reason is None else 503)

    # Load balancers call /ping often: it does not query the sibling processes, whose counters do not change the status.
    ping_summary = "Return the status of /health without its body"

    @router.post("/ping", summary=ping_summary, operation_id="post_ping", response_class=Response)
    @router.get("/ping", summary=ping_summary, operation_id="get_ping", response_class=Response)
    async def ping() -> Response:
        return Response(status_code=200 if health(service).reason is None else 503)

    @router.get("/metrics", summary="Return the metrics in Prometheus' format", response_class=PlainTextResponse)
    async def metrics() -> Response:
        text = own_metrics(service) if sibling_rpc is None else join_metrics(await sibling_rpc.metrics())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router


def system_routes(service: ModelService, sibling_rpc: SiblingRpc | None = None) -> APIRouter:
    """Return the HTTP routes that show Baton's version and the recent requests of all router processes behind this
    port.
    """
    router = APIRouter()

    @router.get("/version", summary="Return Baton's version")
    async def get_version() -> Response:
        return _json({"version": VERSION})

    @router.get("/recent", summary="Report how long each phase of the caller's last requests took, newest first")
    async def recent(request: Request) -> Response:
        caller = RequestContext.of(request.scope).caller.name
        return _json(newest_requests([own_stats(service), *await _siblings(sibling_rpc)], caller))

    return router


async def _siblings(sibling_rpc: SiblingRpc | None) -> list[ProcessStats]:
    return [] if sibling_rpc is None else await sibling_rpc.siblings()


class TokenizeEndpoint:
    """Serves `POST /tokenize`, as in vLLM: the token ids of a prompt or of a rendered chat."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        body = await read_body(scope, receive)
        request = await parsed(body, TokenizeRequest)
        service = service.of(request.model)
        service.view.model_name(request.model)  # called for its error, if the model does not exist
        if (request.prompt is None) == (request.messages is None):
            raise BadRequestError("give either prompt or messages", param="prompt")
        if request.prompt is None:
            text = await service.model.render_chat(request, shows_images=True, is_long=is_long(body))
            # Chat templates write the special tokens themselves, so the default differs from that of a prompt.
            add_special_tokens = bool(request.add_special_tokens)
        else:
            text, add_special_tokens = request.prompt, request.add_special_tokens is not False
        media = media_of(request.messages or ())
        settings = processor_settings_of(service, request)
        tokens = await counted_tokens(service, text, media, settings=settings, add_special_tokens=add_special_tokens)
        strings = None
        if request.return_token_strs:
            token = service.model.tokenizer.token
            strings = await beside_loop(len(tokens), lambda: [token(token_id) or "" for token_id in tokens])
        answer = TokenizeAnswer(
            count=len(tokens), max_model_len=service.view.max_model_len(), tokens=tokens, token_strs=strings
        )
        await send_json(send, answer)


class DetokenizeEndpoint:
    """Serves `POST /detokenize`, as in vLLM: the text of token ids, special tokens included."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await parsed(await read_body(scope, receive), DetokenizeRequest)
        service = self._service.of(request.model)
        service.view.model_name(request.model)
        model = service.model
        if request.tokens and max(request.tokens) >= model.vocab_size:
            raise BadRequestError(f"tokens: ids must be from 0 to {model.vocab_size - 1}", param="tokens")
        if len(request.tokens) > (limit := service.max_tokenised()):
            raise BadRequestError(f"tokens: {len(request.tokens)} ids exceed the limit of {limit}", param="tokens")
        text = partial(model.detokenizer.text, request.tokens, skip_special_tokens=False)
        await send_json(send, DetokenizeAnswer(prompt=await beside_loop(len(request.tokens), text)))


def _json(body: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
