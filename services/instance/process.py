"""The life of an instance process: bind, load, serve, register; at the end refuse, drain, leave the registry and close.

The handler that it is given decides the role: prefill, decode or unified.
"""

import gc
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import torch
import zmq
from prometheus_client import CollectorRegistry

from baton_serve.contracts.identity import new_generation
from baton_serve.contracts.instance import InstanceRecord, LinkStatus, Role
from baton_serve.contracts.messages import (
    AdapterChanged,
    EngineCommand,
    LoadAdapter,
    MigrateIn,
    MigrationTickets,
    ToInstance,
    UnloadAdapter,
)
from baton_serve.engine import Engine, EngineError
from baton_serve.engine.device import device_name
from baton_serve.engine.kernels.cpu.time_slicing import yield_to_processes
from baton_serve.engine.pooling.engine import PoolingEngine
from baton_serve.kvtransfer import NodePorts, PeerAccess, TransferError, TransferNode, TransferSettings
from baton_serve.services.common.cluster_key import ClusterKey, read_cluster_key
from baton_serve.services.common.http.server import HttpServer
from baton_serve.services.common.lifecycle import Lifecycle, run
from baton_serve.services.common.logs import configure_logs
from baton_serve.services.common.registry import check_registry_url, registry_client
from baton_serve.services.common.rpc.links import InstanceServer, RouterId
from baton_serve.services.common.settings.configuration import environment, log_notes, stop
from baton_serve.services.common.tracing import make_tracing
from baton_serve.services.common.zmq.block_events import EventPublisher
from baton_serve.services.instance.adapter_loader import AdapterLoader
from baton_serve.services.instance.addresses import (
    advertised,
    advertised_http,
    check_ports,
    for_routers,
    shared_memory_host,
    tcp,
)
from baton_serve.services.instance.components import InstanceService, MakeHandler, RoleDependencies
from baton_serve.services.instance.cpu_sharing.time_slicing import make_time_slicer
from baton_serve.services.instance.drain.drain_state import DrainController
from baton_serve.services.instance.drain.migration import DrainMigration
from baton_serve.services.instance.engine_commands import EngineCommands
from baton_serve.services.instance.engine_setup import build_engine, build_pooling_engine, model_kind
from baton_serve.services.instance.engine_thread import EngineThread
from baton_serve.services.instance.errors import EngineBroken, InstanceError, StartFailed
from baton_serve.services.instance.health import HealthStatus, create_app
from baton_serve.services.instance.kv_sharing.pulling import Puller
from baton_serve.services.instance.kv_sharing.serving import KVSharing
from baton_serve.services.instance.metrics import EngineCollector, TransferMetrics
from baton_serve.services.instance.pooling_server import PoolingServer
from baton_serve.services.instance.registration import Registration
from baton_serve.services.instance.request_server import Identity, RequestServer
from baton_serve.services.instance.settings import InstanceSettings, instance_id, model_names, peer_access
from baton_serve.services.instance.stats_log import log_stats
from baton_serve.services.instance.traced_role import TracedRole
from baton_serve.services.instance.watchdog.step_limit import StepLimit
from baton_serve.services.instance.watchdog.step_watchdog import HangReport, StepWatchdog

logger = logging.getLogger(__name__)

EXPECTED = (StartFailed, EngineError, TransferError, zmq.ZMQError)
"""Errors that can stop the start without a bug in Baton. They are printed as one line, without a traceback."""


def run_instance(
    settings: InstanceSettings, role: Role, make_handler: MakeHandler, *, notes: Sequence[str] = ()
) -> int:
    """Run an instance until SIGTERM, SIGINT or a fatal error, and return the exit status of the process.

    `make_handler` makes the role's handler once engine and transfer node exist. `notes` are those of `load_with`.
    """
    configure_logs(level=settings.log_level, format=settings.log_format, config_file=settings.log_config_file)
    log_notes(notes, settings.log_level)
    logger.debug("start: imported")
    try:
        process = InstanceProcess(settings, role, make_handler, has_exit_timer=True)
    except EXPECTED as exc:
        stop(f"baton {role}", str(exc))
    status = run(process.start, program=f"baton {role}", expected=EXPECTED)
    if process.is_loading:
        # A thread that loads weights cannot be interrupted, and it would crash if it still ran while Python shuts down
        # its modules. So end the process immediately, without Python's shutdown.
        sys.stderr.flush()
        os._exit(status)
    return status


class InstanceProcess:
    """Wires the parts of one instance process and owns them from `start` until shutdown."""

    def __init__(
        self, settings: InstanceSettings, role: Role, make_handler: MakeHandler, *, has_exit_timer: bool = False
    ) -> None:
        """`has_exit_timer` is for a process that runs nothing else (see `StepWatchdog`)."""
        self._settings = settings
        self._role: Role = role
        self._make_handler = make_handler
        self._identity = Identity(instance_id(settings, role), new_generation())
        self._metrics = CollectorRegistry()
        self._counter = TransferMetrics(self._metrics)
        limit = StepLimit(settings.engine_step_timeout_s)
        self._watchdog = StepWatchdog(limit, program=f"baton {role}", has_exit_timer=has_exit_timer)
        self._engine_thread = engine_thread(settings, role, self._watchdog)
        self._transfer: TransferNode | None = None
        self._drain_migration: DrainMigration | None = None
        self._adapter_loader: AdapterLoader | None = None
        self._renew_record: Callable[[], Awaitable[None]] = _do_nothing
        self._started_at = time.monotonic()

    @property
    def is_loading(self) -> bool:
        """Return whether the engine thread is still alive after the shutdown: it is loading then, and cannot be
        stopped."""
        return self._engine_thread.is_alive

    async def start(self, lifecycle: Lifecycle) -> None:
        """Start all parts in order. Each is registered for shutdown right after its start, so that they stop in reverse
        order."""
        check_transport(self._settings, self._role)
        check_ports(self._settings)
        if self._settings.registry:
            check_registry_url(self._settings.registry)
        self._key = read_cluster_key(self._settings.cluster_key_file)
        service, endpoint = f"baton-{self._role}", self._settings.otlp_traces_endpoint
        self._tracing = make_tracing(endpoint, service=service, instance=self._identity.instance, environ=environment())
        lifecycle.on_stop("traces", self._tracing.close)
        # Everything above is checked first: loading takes minutes, and a wrong flag should stop the process
        # immediately.
        engine = await self._engine_thread.start()
        self._engine = engine
        lifecycle.on_stop("engine", self._engine_thread.stop)
        await self._start_events(lifecycle)
        self._rpc = InstanceServer(for_routers(self._settings), key=self._key)
        if isinstance(engine, Engine):
            self._serving: InstanceService = await self._generation(lifecycle, engine)
        else:
            self._serving = self._pooling(engine)
        self._engine_commands = engine_commands(engine, self._engine_thread, self._rpc)
        lifecycle.on_stop("engine commands", self._engine_commands.close)
        await self._start_serving(lifecycle)
        await self._start_http(lifecycle)
        # Only now can routers find this instance: every port answers already.
        self._renew_record = self._join(lifecycle)
        self._prepare_drain(lifecycle, self._renew_record)
        gc.collect()
        # Objects made by loading live as long as the process. Frozen, they are not scanned by each later collection,
        # whose pauses would add to the inter-token latency.
        gc.freeze()
        self._announce()

    async def _start_http(self, lifecycle: Lifecycle) -> None:
        """Open the port of /health, /metrics and /admin/drain."""
        app = create_app(self._health, self._metrics, drain=self._drain, key=self._key)
        self._http = HttpServer(app, host=self._settings.host, port=self._settings.http_port)
        await self._http.start()
        lifecycle.on_stop("http", self._http.close)

    async def _start_events(self, lifecycle: Lifecycle) -> None:
        """Open the port on which changes of the KV cache are published."""
        settings, identity = self._settings, self._identity
        self._events = EventPublisher(
            instance=identity.instance,
            generation=identity.generation,
            bind_address=tcp(settings, settings.events_port),
            key=self._key,
        )
        await self._events.start()
        lifecycle.on_stop("events", self._events.close)

    async def _generation(self, lifecycle: Lifecycle, engine: Engine) -> RequestServer:
        """Start the parts that only a generating model needs (KV transfer, drain migration, LoRA changes) and return
        its server."""
        settings, identity = self._settings, self._identity
        self._transfer = transfer = TransferNode(
            instance=identity.instance,
            generation=identity.generation,
            layout=engine.layout,
            memory=engine.kv,
            settings=transfer_settings(settings, self._key, peer_access(environment()), parts=engine.tail_parts),
            ports=NodePorts(observer=self._counter),
        )
        await transfer.start()
        # The thread has just built this `engine`, so its type is known here.
        thread = cast("EngineThread[Engine]", self._engine_thread)
        sharing = KVSharing(thread, transfer)
        # Registered before the transfer node, so it stops after it: closing the node ends all transfers, for which
        # `sharing.close` then waits.
        lifecycle.on_stop("sharing", sharing.close)
        lifecycle.on_stop("transfer", transfer.close)
        puller = Puller(thread, transfer, block_tokens=engine.layout.block_tokens, counter=self._counter)
        self._drain_migration = DrainMigration(
            identity,
            engine=thread,
            router=self._rpc,
            sharing=sharing,
            puller=puller,
            timeout_s=settings.drain_handover_s,
            max_blocks=int(settings.drain_handover_gb * (1 << 30)) // engine.layout.block_bytes,
        )
        # Stops before the transfer node: fetches of a drain migration write to the KV cache and use the node.
        lifecycle.on_stop("drain migration", self._drain_migration.close)
        parts = RoleDependencies(thread, transfer, self._rpc, self._counter, puller, engine.image_reader)
        serving = RequestServer(
            identity,
            role=TracedRole(self._make_handler(parts), self._tracing),
            engine=thread,
            stats=engine.stats(),
            router=self._rpc,
            events=self._events,
            links=transfer,
        )
        serving.adapters = engine.adapters.records
        self._adapter_loader = AdapterLoader(
            engine.adapters, engine=thread, router=self._rpc, announce=self._adapters_changed
        )
        lifecycle.on_stop("adapters", self._adapter_loader.close)
        # The engine calls this from another thread: `deliver` passes it on to the event loop.
        engine.on_layer_groups(lambda tail: thread.deliver(serving.on_layer_groups, tail))
        return serving

    def _pooling(self, engine: PoolingEngine) -> PoolingServer:
        """Return the server of an engine that computes vectors."""
        thread = cast("EngineThread[PoolingEngine]", self._engine_thread)
        return PoolingServer(self._identity, engine=thread, stats=engine.stats(), router=self._rpc, events=self._events)

    async def _start_serving(self, lifecycle: Lifecycle) -> None:
        """Connect engine, server and metrics, and open the port for routers."""
        settings, serving = self._settings, self._serving
        collector = EngineCollector(
            model=model_names(settings)[0],
            stats=lambda: serving.stats,
            load=serving.load,
            links=self._links,
        )
        self._metrics.register(collector)

        def on_broken(error: EngineBroken) -> None:
            # Routers get `Failed` for their requests before the shutdown closes the connections, so that they replay at
            # once.
            serving.fail_all(str(error))
            lifecycle.fail(error)

        log_stats(settings, lambda: serving.stats, lifecycle)
        self._engine_thread.attach(
            on_step_result=serving.on_step_result, on_stats=serving.on_stats, on_broken=on_broken
        )
        await self._rpc.start(self._on_message, serving.on_router_lost)
        lifecycle.on_stop("rpc", self._rpc.close)
        # Only now: warm-up compiles kernels and captures graphs for minutes, and has no limit.
        self._watchdog.device = device_label(settings, device_of(self._engine))
        self._hang_report = HangReport(serving, self._rpc, self._watchdog.reported)
        self._watchdog.start(
            lambda: self._engine_thread.deliver(self._hang_report.begin, None),
            self._engine.kill_ranks if isinstance(self._engine, Engine) else None,
        )
        lifecycle.on_stop("step watchdog", self._watchdog.stop)

    def _on_message(self, router: RouterId, message: ToInstance) -> None:
        """Pass a router's message to the part of the process that handles it."""
        match message:
            case MigrateIn() if self._drain_migration is not None:
                self._drain_migration.on_migrate_in(message, is_draining=self._serving.is_draining)
            case MigrationTickets() if self._drain_migration is not None:
                self._drain_migration.on_migration_tickets(message)
            case EngineCommand():
                self._engine_commands.on_message(router, message)
            case LoadAdapter() | UnloadAdapter() if self._adapter_loader is not None:
                self._adapter_loader.on_message(router, message)
            case LoadAdapter() | UnloadAdapter():
                refused = "this model computes vectors; LoRA adapters are only supported for models that generate text"
                self._rpc.send(
                    router, AdapterChanged(request_id=message.request_id, refusal="invalid", message=refused)
                )
            # Pooling engines have no KV blocks to fetch or to hand to others.
            case MigrateIn() | MigrationTickets():
                return
            case _:
                self._serving.on_message(router, message)

    async def _adapters_changed(self) -> None:
        """Publish a changed list of LoRA adapters to the routers and the registry."""
        self._serving.send_load_reports()
        await self._renew_record()

    def _join(self, lifecycle: Lifecycle) -> Callable[[], Awaitable[None]]:
        """Register this instance in the registry and return a function that renews the record immediately."""
        if not self._settings.registry:
            logger.warning("--registry is not set: no router will find this instance")
            return _do_nothing
        superseded = InstanceError(
            f"a newer process has registered as {self._record().instance}; give each instance a different --instance-id"
        )
        membership = Registration(
            registry_client(self._settings.registry, self._key),
            record=self._record,
            ttl_s=self._settings.registry_ttl_s,
            on_superseded=lambda: lifecycle.fail(superseded),
        )
        membership.start()
        lifecycle.on_stop("membership", membership.leave, deadline_s=3.0)
        self._hang_report.leave_registry = membership.leave
        return membership.announce

    def _prepare_drain(self, lifecycle: Lifecycle, announce: Callable[[], Awaitable[None]]) -> None:
        """Register the drain for the shutdown, in which it comes first.

        The last registered action runs first: refuse new requests, wait for the running ones, then leave the registry.
        """
        settings = self._settings
        self._draining = draining = DrainController(
            self._serving,
            announce=announce,
            request_stop=lifecycle.request_stop,
            timeout_s=settings.drain_timeout_s,
            migrate_out=self._drain_migration.migrate_out if self._drain_migration is not None else _do_nothing,
        )
        # The sum of all phases that `finish` waits for, and 5 s for ending what is left.
        deadline_s = settings.drain_timeout_s + settings.kv_lease_s + settings.drain_handover_s + 5.0
        lifecycle.on_stop("requests", draining.finish, deadline_s=deadline_s)
        lifecycle.on_stop("admission", draining.begin, deadline_s=3.0)

    async def _drain(self, exit_afterwards: bool) -> None:
        """Start a drain that was requested over HTTP."""
        await self._draining.ask(exit_afterwards=exit_afterwards)

    def _record(self) -> InstanceRecord:
        """Return the registry record of this instance, with its current load."""
        settings, engine = self._settings, self._engine
        name, *aliases = model_names(settings)
        return InstanceRecord(
            instance=self._identity.instance,
            generation=self._identity.generation,
            role=self._role,
            model=name,
            model_aliases=aliases,
            layout=engine.layout,
            max_model_len=engine.max_model_len,
            rpc_address=advertised(settings, self._rpc.address),
            transfer_address=advertised(settings, self._transfer.address) if self._transfer is not None else "",
            events_address=advertised(settings, self._events.address),
            http_address=advertised_http(settings, self._http.port),
            host=shared_memory_host(),
            load=self._serving.load(),
            draining=self._serving.is_draining,
            adapters=engine.adapters.records() if isinstance(engine, Engine) else [],
            reads_images=isinstance(engine, Engine) and engine.image_reader is not None,
            can_generate=isinstance(engine, Engine),
            pooling=engine.profile if isinstance(engine, PoolingEngine) else None,
        )

    def _links(self) -> Sequence[LinkStatus]:
        """Return the links to other instances; empty for a pooling engine, which has no KV transfer."""
        return self._transfer.links() if self._transfer is not None else []

    def _health(self) -> HealthStatus:
        """Return the answer of `GET /health`."""
        serving = self._serving
        return HealthStatus(
            status="failed" if self._watchdog.has_expired else self._draining.state,
            role=self._role,
            instance=self._identity.instance,
            generation=self._identity.generation,
            pid=os.getpid(),
            model=model_names(self._settings)[0],
            device=str(device_of(self._engine)),
            uptime_s=time.monotonic() - self._started_at,
            load=serving.load(),
            links=list(self._links()),
            routers=len(self._rpc.routers()),
            requests=serving.num_requests,
            step_age_s=self._watchdog.step_age_s(),
        )

    def _announce(self) -> None:
        """Write one line to stdout that this instance is ready, with its addresses. `baton serve` and tests read it."""
        record = self._record()
        fields = {
            "instance": record.instance,
            "generation": record.generation,
            "rpc": record.rpc_address,
            "transfer": record.transfer_address,
            "events": record.events_address,
            "http": record.http_address,
            "kv_tokens": record.load.total_blocks * record.layout.block_tokens,
        }
        if record.pooling is not None:
            fields |= {"tasks": ",".join(record.pooling.tasks)}
        sys.stdout.write(f"ready {self._role} " + " ".join(f"{key}={value}" for key, value in fields.items()) + "\n")
        sys.stdout.flush()


def check_transport(settings: InstanceSettings, role: Role) -> None:
    """Raise `StartFailed` if the configured transport cannot reach any peer of this role."""
    if settings.kv_transport == "memory" and role != "unified":
        raise StartFailed(
            "--kv-transport memory only works within one process, and every instance is a separate process: use it for"
            f" unified instances, which hand nothing off. For a {role} instance use auto, usm, zeromq or oneccl"
        )


def engine_commands(
    engine: Engine | PoolingEngine, thread: EngineThread[Engine] | EngineThread[PoolingEngine], rpc: InstanceServer
) -> EngineCommands:
    """Return the part that executes the commands of operators, in the thread that has built this `engine`."""
    generating = cast("EngineThread[Engine]", thread) if isinstance(engine, Engine) else None
    return EngineCommands(generating, router=rpc, profile_folder=environment().get("VLLM_TORCH_PROFILER_DIR", ""))


async def _do_nothing() -> None:
    """Stand in for the renewal of the record, or for drain migration, where there is none."""


def device_of(engine: Engine | PoolingEngine) -> torch.device:
    """Return the device of an engine, or of its first rank."""
    return engine.device if isinstance(engine, PoolingEngine) else engine.kv.device


def device_label(settings: InstanceSettings, device: torch.device) -> str:
    """Return the name of the engine's device for messages, such as `device 1 (xpu:0, Intel Arc B580)`.

    With `--device-index` the process sees one device only, which is number 0 for it.
    """
    index = "" if settings.device_index is None else f" {settings.device_index}"
    name = device_name(device)
    return f"device{index} ({device}{f', {name}' if name else ''})"


def engine_thread(
    settings: InstanceSettings, role: Role, watchdog: StepWatchdog
) -> "EngineThread[Engine] | EngineThread[PoolingEngine]":
    """Return the thread that builds and runs the engine for this kind of model.

    Raises `StartFailed` if a flag or the role does not fit the model.
    """
    kind, slicer = model_kind(settings), make_time_slicer(settings, role, yield_to_processes)
    if kind == "generate":
        thread: EngineThread[Engine] = EngineThread(
            lambda: build_engine(settings, role, thread.give_up), slicer, watchdog
        )
        return thread
    if settings.tensor_parallel_size > 1:
        raise StartFailed(
            f"{settings.model} computes vectors (--task {kind}), which is supported on one device only: remove"
            " --tensor-parallel-size and start more instances instead"
        )
    if settings.enable_lora:
        raise StartFailed(
            f"--enable-lora is only supported for models that generate text, and {settings.model} computes vectors"
        )
    if role == "decode":
        raise StartFailed(
            f"{settings.model} computes vectors (--task {kind}), which only prefill and unified instances do:"
            " start a unified instance instead, or set --runner generate"
        )
    return EngineThread(lambda: build_pooling_engine(settings, role, kind), slicer, watchdog)


def transfer_settings(
    settings: InstanceSettings, key: ClusterKey | None = None, access: PeerAccess = "", *, parts: int = 1
) -> TransferSettings:
    """Return the settings of the transfer node. `parts` is the number of layer groups that the engine reports."""
    return TransferSettings(
        bind=tcp(settings, settings.transfer_port, any_port="*"),
        advertise_host=settings.advertise_host,
        transports=(settings.kv_transport,),
        peer_access=access,
        run_dir=settings.kv_run_dir,
        parts=parts,
        checksum=settings.kv_checksum,
        zeromq_connections=settings.kv_zeromq_connections,
        lease_s=settings.kv_lease_s,
        curve_secret_key=key.secret if key is not None else b"",
        curve_public_key=key.public if key is not None else b"",
    )
