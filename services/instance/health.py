"""The HTTP side of an instance: /health for people and probes, /metrics for Prometheus. Knows no request."""

from collections.abc import Callable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contracts.identity import Generation, InstanceId
from contracts.instance import LinkStatus, Load, Role


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`links` name the transport in use with each peer and its measured speed: a silent slow path is a bug."""

    status: str
    role: Role
    instance: InstanceId
    generation: Generation
    pid: int
    model: str
    device: str
    uptime_s: float
    load: Load
    links: list[LinkStatus]
    routers: int


def create_app(health: Callable[[], Health], metrics: CollectorRegistry) -> Starlette:
    async def show_health(_: Request) -> Response:
        return Response(msgspec.json.encode(health()), media_type="application/json")

    async def show_metrics(_: Request) -> Response:
        return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)

    routes = [Route("/health", show_health), Route("/ping", show_health), Route("/metrics", show_metrics)]
    return Starlette(routes=routes)
