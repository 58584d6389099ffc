"""Entry point of `baton router`: construct every part of the router process from the settings (CORS, limits), and
serve.

`processes.router_process` calls `start` too, for each process of a router with `--workers`.
"""

import gc
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

import zmq
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware

from baton_serve.services.common.cluster_key import read_cluster_key
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.connection_slots import HttpLimits
from baton_serve.services.common.http.listener import reachable_url
from baton_serve.services.common.http.server import AsgiApp, HttpServer, TlsFiles
from baton_serve.services.common.logs import configure_logs
from baton_serve.services.common.process_lifecycle import Lifecycle, run
from baton_serve.services.common.registry import registry_view
from baton_serve.services.common.settings.configuration import environment, load_with, log_notes, stop
from baton_serve.services.common.tracing import make_tracing
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.api.responses.kept_responses import KeptResponses
from baton_serve.services.router.app import create_app
from baton_serve.services.router.batch.batch_setup import Batches
from baton_serve.services.router.batch.line_client import LOWEST_PRIORITY
from baton_serve.services.router.batch.pacing import RouterLoad
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.connections import InstanceConnector
from baton_serve.services.router.cluster.readiness import ReadinessLog
from baton_serve.services.router.http.gateway import Gateway, with_middleware
from baton_serve.services.router.http.hosts import with_allowed_hosts
from baton_serve.services.router.http.status_endpoints import own_metrics, own_stats
from baton_serve.services.router.placement.admission import AdmissionRules
from baton_serve.services.router.placement.circuit_breaker import RetryBudget
from baton_serve.services.router.placement.policy import PlacementPolicy
from baton_serve.services.router.processes.router_supervisor import start_router_processes
from baton_serve.services.router.processes.sibling_rpc import RouterProcess, SiblingRpc
from baton_serve.services.router.protocol.caller import Caller
from baton_serve.services.router.protocol.errors import ModelFolderError
from baton_serve.services.router.quota.api_keys import ApiKeys
from baton_serve.services.router.quota.audit_log import AuditLog
from baton_serve.services.router.quota.usage_exchange import UsageExchange, UsageStore
from baton_serve.services.router.quota.usage_limits import UsageLedger
from baton_serve.services.router.requests.dispatcher import AdmissionControl
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.prompt_request import RequestPolicy
from baton_serve.services.router.service_builder import Models, settings_of_models, with_local_models
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.served_model import ModelNames

logger = logging.getLogger(__name__)

PROGRAM = "baton router"

GC_THRESHOLD = 20_000
"""Number of new objects after which Python's garbage collector runs.

A request makes hundreds of objects and hardly any reference cycle. With Python's default of 700 the collector would run
about twice per request and find nothing.
"""


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C, then return the exit status of the process."""
    loaded = load_with(
        RouterSettings,
        (),
        argv,
        environment(),
        prefix="BATON__ROUTER__",
        program=PROGRAM,
        description="Serves the OpenAI API and sends each request to the instances that are predicted to answer first.",
    )
    try:
        settings = with_local_models(loaded.settings, environment())
        prepare(settings)
    except ConfigurationError as exc:
        stop(PROGRAM, str(exc))
    log_notes(loaded.notes, settings.log_level)
    warn_of_removed(settings)
    start_all = start if settings.workers == 1 else start_router_processes
    return run(lambda lifecycle: start_all(settings, lifecycle), program=PROGRAM, expected=(ModelFolderError,))


def prepare(settings: RouterSettings) -> None:
    """Set up what exists once per process, before anything else is created: environment variables and logging."""
    # The tokenizer gets one text at a time, so waking a pool of threads for it would cost time and gain nothing.
    # `putenv` is enough: only the tokenizers library, which is written in Rust, has to see the variable.
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    configure_logs(level=settings.log_level, format=settings.log_format, config_file=settings.log_config_file)


async def start(settings: RouterSettings, lifecycle: Lifecycle, worker: RouterProcess | None = None) -> None:
    """Create all parts of the router and return as soon as it accepts requests; `lifecycle` ends it later.

    `worker` identifies this process if several share the port (`--workers`), and is None otherwise. Raises
    `ModelFolderError` if a model's folder cannot be used, and `ConfigurationError` for other wrong settings.
    """
    # Check the settings of all models before loading the first tokenizer, so that a typo fails immediately.
    settings_of_models(settings)
    keys = api_keys(settings)
    tracing = make_tracing(
        settings.otlp_traces_endpoint,
        service="baton-router",
        instance=socket.gethostname(),
        environ=environment(),
    )
    lifecycle.on_stop("traces", tracing.close)
    metrics = RouterMetrics(CollectorRegistry(), ModelNames(settings).all([])[0])
    secret = read_cluster_key(settings.cluster_key_file)
    connector = InstanceConnector(instance_timeout_s=settings.instance_timeout_s, key=secret)
    view = registry_view(settings.registry, secret)
    # Routers that start together must not choose the same instance first: each starts its rotation at a random place.
    cluster = Cluster(
        view,
        connector,
        clock=time.monotonic,
        first_turn=secrets.randbits(32),
        prefill_fallback_after_s=prefill_fallback_after_s(settings),
    )
    admission = admission_control(settings, has_several_owners=keys.has_several_owners)
    models = Models(
        settings,
        cluster=cluster,
        rules=request_policy(settings),
        admission=admission,
        metrics=metrics,
        tracing=tracing,
    )
    sibling_rpc = sibling_rpc_of(worker, models.model_services[0], admission.ledger)
    lifecycle.on_stop("compilers of grammars", models.end_compilers)
    batches = Batches(settings.batch_folder, settings, keys, clock=time.monotonic) if settings.batch_folder else None
    # Of several processes behind one port only the first one logs what is the same for all.
    is_first = worker is None or worker.index == 0
    app = create_app(
        models.model_services[0],
        api_keys=keys,
        kept=kept_responses(settings, lifecycle),
        audit=AuditLog(settings.audit_log) if settings.audit_log else None,
        sibling_rpc=sibling_rpc,
        batches=None if batches is None else batches.api,
        logs_routes=is_first,
    )
    # The check of the host is the outermost layer: neither CORS nor a middleware of the operator may answer a request
    # that a foreign web page sent through DNS rebinding.
    server = HttpServer(
        with_allowed_hosts(
            with_middleware(with_cors(app, settings), settings.middleware),
            settings.allowed_hosts,
            bound_to=settings.host,
        ),
        host=settings.host,
        port=settings.port,
        tls=TlsFiles(settings.ssl_keyfile, settings.ssl_certfile, settings.ssl_ca_certs, settings.ssl_cert_reqs),
        root_path=settings.root_path,
        limits=http_limits(settings),
    )
    # The parts stop in reverse order of registration: the HTTP server first, so that its running requests still have
    # the connections to the instances, and ZeroMQ after everything that uses it.
    try:
        await cluster.start()
    except zmq.ZMQError as exc:
        raise ConfigurationError(f"cannot host the registry at {settings.registry}: {exc.strerror}") from exc
    lifecycle.on_stop("ZeroMQ", connector.close)
    lifecycle.on_stop("connections to instances", cluster.close)
    if sibling_rpc is not None:
        await sibling_rpc.start()
        lifecycle.on_stop("queries of other router processes", sibling_rpc.close)
    if (exchange := usage_exchange(settings, admission.ledger, sibling_rpc)) is not None:
        exchange.start()
        lifecycle.on_stop("usage of keys", exchange.close)
    await server.start(shares_port=worker is not None)
    lifecycle.on_stop(
        "http server",
        partial(_stop_serving, server, models, settings.shutdown_timeout_s),
        # Longer than the grace time, so that answers of requests that were ended then can still be sent.
        deadline_s=settings.shutdown_timeout_s + 2.0,
    )
    _start_batches(batches, partial(router_load, app, cluster, models.model_services), app, lifecycle)
    models.start_compilers()
    gc.collect()
    # Tokenizers and modules live as long as the process. Frozen objects are skipped by every later collection.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    if is_first:
        _start_readiness_log(cluster, models, settings, port=server.port)


def _start_readiness_log(cluster: Cluster, models: Models, settings: RouterSettings, *, port: int) -> None:
    url = reachable_url(settings.host, port, is_tls=settings.ssl_certfile is not None)
    names = ", ".join(name for service in models.model_services for name in service.view.names())
    ReadinessLog(cluster, url=url + settings.root_path, names=names).start()


def kept_responses(settings: RouterSettings, lifecycle: Lifecycle) -> KeptResponses:
    """Return the store for answers of the Responses API, which `lifecycle` closes."""
    kept = KeptResponses.of(settings)
    lifecycle.on_stop("stored responses", kept.close)
    return kept


def _start_batches(batches: Batches | None, load: Callable[[], RouterLoad], app: Gateway, lifecycle: Lifecycle) -> None:
    """Start to run batches, if there is a folder for them (`batches` is not None). `load` returns the present load of
    clients' requests; `lifecycle` stops the batches.
    """
    if batches is None:
        return
    # They stop before the HTTP server and the dispatchers, whose errors would otherwise become results of requests.
    lifecycle.on_stop("batches", batches.close)
    endpoints = {path: row.app for path, row in app.table.items()}
    batches.start(endpoints, load=load, owner=app.keys.named, bodies=app.bodies)


async def _stop_serving(server: HttpServer, models: Models, grace_s: float) -> None:
    """Let running requests finish for at most `grace_s` seconds, then end the others."""
    if running := sum(service.dispatcher.num_running for service in models.model_services):
        logger.info("%d running requests have up to %g s left (--shutdown-timeout-s)", running, grace_s)
    await server.close(grace_s=grace_s, on_grace_over=models.end_requests)
    # The server calls it only if requests still run after the grace time. The dispatchers must be closed in any
    # case: they own timers, and lines of the request log that are not written yet.
    models.end_requests()


def router_load(app: Gateway, cluster: Cluster, services: Sequence[ModelService]) -> RouterLoad:
    """Return how many clients' requests this process serves now. Batches run more or fewer requests according to it."""
    roles = [worker.record.role for worker in cluster.workers() if worker.state == "ready"]
    ready = [role for role in roles if role != "encode"]
    dispatchers = [service.dispatcher for service in services]
    return RouterLoad(
        num_instances=len(ready),
        num_generating=sum(role in ("decode", "unified") for role in ready),
        num_running=app.num_running,
        num_waiting=sum(one.num_without_tokens(below_priority=LOWEST_PRIORITY) for one in dispatchers),
        num_started=app.num_started,
    )


def http_limits(settings: RouterSettings) -> HttpLimits:
    """Return the limits of the HTTP server from the settings: sizes, times and numbers of connections."""
    return HttpLimits(
        max_head_bytes=settings.max_header_bytes,
        head_timeout_s=settings.header_timeout_s,
        body_timeout_s=settings.body_timeout_s,
        keep_alive_s=settings.keep_alive_timeout_s,
        send_timeout_s=settings.slow_client_s,
        lingering_time_s=settings.lingering_time_s,
        lingering_timeout_s=settings.lingering_timeout_s,
        max_connections=settings.max_connections,
        max_connections_per_address=settings.max_connections_per_address,
    )


def warn_of_removed(settings: RouterSettings) -> None:
    """Log a warning for each given setting that is still accepted but has no effect any more."""
    if settings.joint_prefill_min_tokens is not None:
        logger.warning(
            "--joint-prefill-min-tokens has no effect any more and will be rejected by the next version: leave it out; "
            "each prompt is computed by one prefill instance"
        )


def prefill_fallback_after_s(settings: RouterSettings) -> float | None:
    """Return how many seconds after the first prefill instance such instances may generate answers if no decode
    instance has come; None: they never may.
    """
    return settings.instance_wait_s if settings.decode_fallback == "prefill" else None


def request_policy(settings: RouterSettings) -> RequestPolicy:
    """Return the settings that apply to a single request: its placement, its time limits and its replays."""
    return RequestPolicy(
        policy=PlacementPolicy(
            disaggregation_min_tokens=settings.disaggregation_min_tokens,
            name=settings.placement_policy,
            pull=settings.kv_pull,
        ),
        request_timeout_s=settings.request_timeout_s,
        handoff_timeout_s=settings.handoff_timeout_s,
        encode_timeout_s=settings.encode_timeout_s,
        max_replays=settings.max_replays,
        instance_wait_s=settings.instance_wait_s,
        expected_blocks_ttl_s=settings.expected_blocks_ttl_s,
        first_token_hold=settings.first_token_hold,
        logs_requests=settings.enable_log_requests,
    )


def with_cors(app: Gateway, settings: RouterSettings) -> AsgiApp:
    """Return `app` wrapped in a layer that answers browsers' CORS requests, or `app` itself without
    `--allowed-origins`.
    """
    if not settings.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
    )


def admission_control(settings: RouterSettings, *, has_several_owners: Callable[[], bool]) -> AdmissionControl:
    """Return the limits on all requests of the router together, of which no owner of API keys may take everything
    while `has_several_owners` returns True. All models of the router share the returned object.
    """
    return AdmissionControl(
        AdmissionRules(
            max_queued_tokens=settings.max_queued_tokens,
            dispatch_ahead_s=settings.dispatch_ahead_s,
        ),
        max_requests=settings.max_concurrent_requests,
        has_several_owners=has_several_owners,
        retries=RetryBudget(settings.retry_budget),
    )


def api_keys(settings: RouterSettings) -> ApiKeys:
    """Return the accepted API keys with their limits.

    Raises `ConfigurationError` if `--api-key-file` cannot be read or holds no key.
    """
    defaults = Caller(
        requests_per_minute=settings.requests_per_minute,
        tokens_per_minute=settings.tokens_per_minute,
        tokens_per_day=settings.tokens_per_day,
        min_priority=settings.min_priority,
    )
    return ApiKeys(
        settings.api_key,
        file=settings.api_key_file,
        defaults=defaults,
        sharing=settings.prefix_cache_sharing,
        clock=time.monotonic,
    )


def usage_exchange(
    settings: RouterSettings, ledger: UsageLedger, sibling_rpc: SiblingRpc | None
) -> UsageExchange | None:
    """Return the object that exchanges the usage of API keys with other routers, or None if no other router can share
    this registry.

    With Redis as the registry, Redis stores the usage too. With a `memory:` registry the only other routers are the
    sibling processes of this one.
    """
    store: UsageStore | None = sibling_rpc
    if not settings.registry.startswith("memory:"):
        # Importing the Redis client takes 0.1 s. A router without Redis should not pay for it at its start.
        from baton_serve.services.router.quota.usage_redis import RedisUsageStore

        store = RedisUsageStore(settings.registry)
    return None if store is None else UsageExchange(ledger, store, wall_clock=time.time)


def sibling_rpc_of(worker: RouterProcess | None, service: ModelService, ledger: UsageLedger) -> SiblingRpc | None:
    """Return the connection to the other router processes behind the same port (`--workers`), or None if this process
    has the port alone.
    """
    if worker is None:
        return None
    return SiblingRpc(
        worker,
        stats=lambda: own_stats(service),
        metrics=lambda: own_metrics(service),
        usage=lambda: ledger.own(time.time()),
    )
