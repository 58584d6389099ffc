"""An instance process from start to end: bind, load, serve, announce; then leave, drain, close.

Which role it plays is decided by the handler it is given.
"""

import gc
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import zmq
from prometheus_client import CollectorRegistry

from contracts.identity import new_generation
from contracts.instance import InstanceRecord, Role
from engine import Engine, EngineError
from kvtransfer import NodePorts, TransferError, TransferNode, TransferSettings
from services.common.cluster_key import ClusterKey, read_cluster_key
from services.common.events import EventPublisher
from services.common.http_server import HttpServer
from services.common.lifecycle import Lifecycle, run
from services.common.logs import configure_logs
from services.common.registry import registry_client
from services.common.rpc import InstanceServer
from services.common.tracing import tracing_to
from services.instance.addresses import advertised, advertised_http, check_ports, shared_memory_host, tcp
from services.instance.draining import Draining
from services.instance.engine_setup import build_engine
from services.instance.engine_thread import EngineThread
from services.instance.errors import EngineBroken, InstanceError, StartFailed
from services.instance.health import Health, create_app
from services.instance.membership import Membership
from services.instance.metrics import EngineCollector, TransferMetrics
from services.instance.observed import ObservedRole
from services.instance.serving import Identity, RoleHandler, Serving
from services.instance.settings import InstanceSettings, instance_id, model_names

logger = logging.getLogger(__name__)

EXPECTED = (StartFailed, EngineError, TransferError, zmq.ZMQError)
"""What can stop a start without a bug of ours: told in one line."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a role's handler is made of."""

    engine: EngineThread
    transfer: TransferNode
    router: InstanceServer
    counter: TransferMetrics


MakeHandler = Callable[[Parts], RoleHandler]


def run_instance(settings: InstanceSettings, role: Role, make_handler: MakeHandler) -> int:
    """Serves until a signal. Returns the exit status."""
    configure_logs(level=settings.log_level, format=settings.log_format)
    process = InstanceProcess(settings, role, make_handler)
    status = run(process.start, program=f"baton {role}", expected=EXPECTED)
    if process.is_loading:
        # Nobody can interrupt a thread that loads weights, and it must not run while Python shuts down.
        sys.stderr.flush()
        os._exit(status)
    return status


class InstanceProcess:
    def __init__(self, settings: InstanceSettings, role: Role, make_handler: MakeHandler) -> None:
        self._settings = settings
        self._role: Role = role
        self._make_handler = make_handler
        self._identity = Identity(instance_id(settings, role), new_generation())
        self._metrics = CollectorRegistry()
        self._counter = TransferMetrics(self._metrics)
        self._engine_thread = EngineThread(lambda: build_engine(settings))
        self._started_at = time.monotonic()

    @property
    def is_loading(self) -> bool:
        return self._engine_thread.is_alive

    async def start(self, lifecycle: Lifecycle) -> None:
        """Everything in order; how to stop each thing is registered right after it, so it stops in reverse."""
        check_ports(self._settings)
        self._key = read_cluster_key(self._settings.cluster_key_file)
        service, endpoint = f"baton-{self._role}", self._settings.otlp_traces_endpoint
        self._tracing = tracing_to(endpoint, service=service, instance=self._identity.instance)
        lifecycle.on_stop("traces", self._tracing.close)
        engine = await self._engine_thread.start()
        assert isinstance(engine, Engine)
        self._engine = engine
        lifecycle.on_stop("engine", self._engine_thread.stop)
        await self._start_links(lifecycle, engine)
        await self._start_serving(lifecycle, engine)
        await self._start_http(lifecycle)
        announce = self._join(lifecycle)
        self._prepare_drain(lifecycle, announce)
        gc.collect()
        gc.freeze()  # what was loaded stays: no collection needs to look at it again
        self._announce()

    async def _start_http(self, lifecycle: Lifecycle) -> None:
        app = create_app(self._health, self._metrics, drain=self._drain, key=self._key)
        self._http = HttpServer(app, host=self._settings.host, port=self._settings.http_port)
        await self._http.start()
        lifecycle.on_stop("http", self._http.close)

    async def _start_links(self, lifecycle: Lifecycle, engine: Engine) -> None:
        settings, identity = self._settings, self._identity
        self._events = EventPublisher(
            instance=identity.instance,
            generation=identity.generation,
            bind_address=tcp(settings, settings.events_port),
            key=self._key,
        )
        await self._events.start()
        lifecycle.on_stop("events", self._events.close)
        self._transfer = TransferNode(
            instance=identity.instance,
            generation=identity.generation,
            layout=engine.layout,
            memory=engine.kv,
            settings=transfer_settings(settings, self._key),
            ports=NodePorts(observer=self._counter),
        )
        await self._transfer.start()
        lifecycle.on_stop("transfer", self._transfer.close)

    async def _start_serving(self, lifecycle: Lifecycle, engine: Engine) -> None:
        settings = self._settings
        self._rpc = InstanceServer(tcp(settings, settings.rpc_port), key=self._key)
        parts = Parts(self._engine_thread, self._transfer, self._rpc, self._counter)
        self._serving = serving = Serving(
            self._identity,
            role=ObservedRole(self._make_handler(parts), self._tracing),
            engine=self._engine_thread,
            stats=engine.stats(),
            router=self._rpc,
            events=self._events,
            links=self._transfer,
        )
        collector = EngineCollector(
            model=model_names(settings)[0],
            stats=lambda: serving.stats,
            load=serving.load,
            links=self._transfer.links,
        )
        self._metrics.register(collector)

        def on_broken(error: EngineBroken) -> None:
            serving.fail_all(str(error))
            lifecycle.fail(error)

        self._engine_thread.attach(on_turn=serving.on_turn, on_broken=on_broken)
        await self._rpc.start(serving.on_message, serving.on_router_lost)
        lifecycle.on_stop("rpc", self._rpc.close)

    def _join(self, lifecycle: Lifecycle) -> Callable[[], Awaitable[None]]:
        """Returns what renews the record at once."""
        if not self._settings.registry:
            return _nobody_to_tell
        superseded = InstanceError("a newer process has this instance's name")
        membership = Membership(
            registry_client(self._settings.registry, self._key),
            record=self._record,
            ttl_s=self._settings.registry_ttl_s,
            on_superseded=lambda: lifecycle.fail(superseded),
        )
        membership.start()
        lifecycle.on_stop("membership", membership.leave, deadline_s=3.0)
        return membership.announce

    def _prepare_drain(self, lifecycle: Lifecycle, announce: Callable[[], Awaitable[None]]) -> None:
        """Stopping begins with what is registered last: refuse, let end, and only then leave the registry."""
        settings = self._settings
        self._draining = draining = Draining(
            self._serving,
            announce=announce,
            request_stop=lifecycle.request_stop,
            timeout_s=settings.drain_timeout_s,
        )
        deadline_s = settings.drain_timeout_s + settings.kv_lease_s + 5.0
        lifecycle.on_stop("requests", draining.finish, deadline_s=deadline_s)
        lifecycle.on_stop("admission", draining.begin, deadline_s=3.0)

    async def _drain(self, exit_afterwards: bool) -> None:
        await self._draining.ask(exit_afterwards=exit_afterwards)

    def _record(self) -> InstanceRecord:
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
            transfer_address=advertised(settings, self._transfer.address),
            events_address=advertised(settings, self._events.address),
            http_address=advertised_http(settings, self._http.port),
            host=shared_memory_host(),
            load=self._serving.load(),
            draining=self._serving.is_draining,
        )

    def _health(self) -> Health:
        serving = self._serving
        return Health(
            status=self._draining.state,
            role=self._role,
            instance=self._identity.instance,
            generation=self._identity.generation,
            pid=os.getpid(),
            model=model_names(self._settings)[0],
            device=str(self._engine.kv.device),
            uptime_s=time.monotonic() - self._started_at,
            load=serving.load(),
            links=self._transfer.links(),
            routers=len(self._rpc.routers()),
            requests=serving.num_requests,
        )

    def _announce(self) -> None:
        """One line on stdout: this instance serves."""
        record = self._record()
        words = {
            "instance": record.instance,
            "generation": record.generation,
            "rpc": record.rpc_address,
            "transfer": record.transfer_address,
            "events": record.events_address,
            "http": record.http_address,
            "kv_tokens": record.load.total_blocks * record.layout.block_tokens,
        }
        sys.stdout.write(f"ready {self._role} " + " ".join(f"{key}={value}" for key, value in words.items()) + "\n")
        sys.stdout.flush()


async def _nobody_to_tell() -> None:
    """Without a registry there is no record."""


def transfer_settings(settings: InstanceSettings, key: ClusterKey | None = None) -> TransferSettings:
    return TransferSettings(
        bind=tcp(settings, settings.transfer_port, any_port="*"),
        advertise_host=settings.advertise_host,
        transports=(settings.kv_transport,),
        run_dir=settings.kv_run_dir,
        checksum=settings.kv_checksum,
        lease_s=settings.kv_lease_s,
        curve_secret_key=key.secret if key is not None else b"",
        curve_public_key=key.public if key is not None else b"",
    )
