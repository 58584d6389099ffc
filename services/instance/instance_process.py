"""Runs an instance process from start to end: bind, load the model, serve, register; then drain, leave the registry,
close.

The handler that it is given decides the role: prefill, decode or unified; an encode instance has no handler.
"""

import gc
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

import torch
import zmq
from prometheus_client import CollectorRegistry

from baton_serve.contracts.instance import InstanceRecord, Role
from baton_serve.contracts.messages import (
    EngineCommand,
    ToInstance,
)
from baton_serve.engine import EngineError
from baton_serve.engine.device import device_name
from baton_serve.engine.kernels.cpu.time_slicing import yield_to_processes
from baton_serve.engine.parallel.channel import ChannelError
from baton_serve.kvtransfer import TransferError
from baton_serve.services.common.cluster_key import read_cluster_key
from baton_serve.services.common.http.server import HttpServer
from baton_serve.services.common.logs import configure_logs
from baton_serve.services.common.process_lifecycle import Lifecycle, run
from baton_serve.services.common.registry import check_registry_url, registry_client
from baton_serve.services.common.rpc.instance_link import InstanceServer, RouterId
from baton_serve.services.common.settings.configuration import environment, log_notes, stop
from baton_serve.services.common.tracing import make_tracing
from baton_serve.services.instance.addresses import (
    advertised,
    advertised_http,
    check_ports,
    for_routers,
)
from baton_serve.services.instance.cpu_sharing.time_slicing import make_time_slicer
from baton_serve.services.instance.drain.drain_state import DrainController
from baton_serve.services.instance.engine_commands import EngineCommands
from baton_serve.services.instance.errors import InstanceError, StartFailed
from baton_serve.services.instance.health import HealthStatus, create_app
from baton_serve.services.instance.metrics import EmbeddingMetrics, EngineCollector, TransferMetrics
from baton_serve.services.instance.model_parts import ModelConnections, ProcessParts
from baton_serve.services.instance.nodes.agreement import check_nodes
from baton_serve.services.instance.nodes.meeting import NodeMeeting
from baton_serve.services.instance.registration import Registration
from baton_serve.services.instance.replaceable_model import Addresses, InstanceModel
from baton_serve.services.instance.request_server import RoleHandler
from baton_serve.services.instance.role_interface import MakeHandler, RoleDependencies
from baton_serve.services.instance.settings import InstanceSettings, instance_id, model_names
from baton_serve.services.instance.sleep_and_reload import ModelSwitch
from baton_serve.services.instance.stats_log import log_stats
from baton_serve.services.instance.watchdog.step_limit import StepLimit
from baton_serve.services.instance.watchdog.step_watchdog import HangReport, StepWatchdog

logger = logging.getLogger(__name__)

MODEL_CLOSE_TIMEOUT_S = 35.0
"""Seconds for closing the model: the sum of the deadlines of its parts."""
EXPECTED = (StartFailed, EngineError, TransferError, zmq.ZMQError)
"""Errors that can stop the start without a bug in Baton. They are printed as one line, without a traceback."""


def run_instance(
    settings: InstanceSettings, role: Role, make_handler: MakeHandler, *, notes: Sequence[str] = ()
) -> int:
    """Run an instance process of `role` until SIGTERM, SIGINT or a fatal error, and return its exit status.

    `make_handler` makes the role's request handler once engine and transfer node exist. `notes` are sentences for the
    log about vLLM's flags and variables, from `load_with`.
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
    """Creates and connects the parts of one instance process, and owns them from `start` until shutdown."""

    _lifecycle: Lifecycle

    def __init__(
        self, settings: InstanceSettings, role: Role, make_handler: MakeHandler, *, has_exit_timer: bool = False
    ) -> None:
        """Check the settings; load and start nothing yet. `has_exit_timer` must be False if another part of the process
        uses the timer of `faulthandler` (see `StepWatchdog`). Raises `StartFailed` or `EngineError` if a flag or the
        role does not fit the model.
        """
        self._settings = settings
        self._role: Role = role
        self._metrics = CollectorRegistry()
        limit = StepLimit(settings.engine_step_timeout_s)
        self._watchdog = StepWatchdog(limit, program=f"baton {role}", has_exit_timer=has_exit_timer)
        slicer = make_time_slicer(settings, role, yield_to_processes)
        self._nodes = NodeMeeting(settings) if settings.nnodes > 1 else None
        counters = TransferMetrics(self._metrics), EmbeddingMetrics(self._metrics, role)
        parts = ProcessParts(settings, role, make_handler, self._watchdog, slicer, *counters, self._nodes)
        self._model = InstanceModel(parts, instance_id(settings, role), lambda error: self._lifecycle.fail(error))
        self._switch = ModelSwitch(self._model, self._model.weights)
        self._renew_record: Callable[[], Awaitable[None]] = _do_nothing
        self._started_at = time.monotonic()

    @property
    def is_loading(self) -> bool:
        """Return whether the engine thread is still alive, asked after the shutdown: it is loading a model then, and
        cannot be stopped.
        """
        return self._model.is_loading

    async def start(self, lifecycle: Lifecycle) -> None:
        """Load the model and start all parts in order. Each is registered with `lifecycle` right after its start, so
        that they stop in reverse order.
        """
        self._lifecycle = lifecycle
        check_transport(self._settings, self._role)
        check_ports(self._settings)
        check_nodes(self._settings, self._role)
        if self._settings.registry:
            check_registry_url(self._settings.registry)
        self._key = read_cluster_key(self._settings.cluster_key_file)
        service, endpoint = f"baton-{self._role}", self._settings.otlp_traces_endpoint
        instance = self._model.identity.instance
        tracing = make_tracing(endpoint, service=service, instance=instance, environ=environment())
        lifecycle.on_stop("traces", tracing.close)
        self._rpc = InstanceServer(for_routers(self._settings), key=self._key)
        if self._nodes is not None:
            assert self._key is not None  # `check_nodes` requires it
            self._nodes.open(self._key)
            lifecycle.on_stop("nodes", self._nodes.close)
        # Everything above is checked first: loading takes minutes, and a wrong flag should stop the process
        # immediately.
        lifecycle.on_stop("model", self._model.close, deadline_s=MODEL_CLOSE_TIMEOUT_S)
        try:
            await self._model.start(
                ModelConnections(self._rpc, self._key, tracing, self._adapters_changed, on_broken=lifecycle.fail)
            )
        except ChannelError as exc:
            if self._nodes is None:
                raise
            # Another host is missing or was lost during the start. Other than after a wrong flag, a restart helps.
            lifecycle.fail(exc)
            return
        profile_folder = environment().get("VLLM_TORCH_PROFILER_DIR", "")
        self._engine_commands = EngineCommands(
            self._model.engine_thread, self._switch, router=self._rpc, profile_folder=profile_folder
        )
        lifecycle.on_stop("engine commands", self._engine_commands.close, deadline_s=MODEL_CLOSE_TIMEOUT_S)
        await self._start_serving(lifecycle)
        await self._start_http(lifecycle)
        # Only now can routers find this instance: every port answers already.
        self._renew_record = self._join(lifecycle)
        self._prepare_drain(lifecycle)
        gc.collect()
        # Objects made by loading live as long as the process. Frozen, they are not scanned by each later collection,
        # whose pauses would add to the inter-token latency.
        gc.freeze()
        self._announce()

    async def _start_http(self, lifecycle: Lifecycle) -> None:
        """Open the HTTP port of /health, /metrics and /admin/drain."""
        app = create_app(self._health, self._metrics, drain=self._drain, key=self._key)
        self._http = HttpServer(app, host=self._settings.host, port=self._settings.http_port)
        await self._http.start()
        lifecycle.on_stop("http", self._http.close)

    async def _start_serving(self, lifecycle: Lifecycle) -> None:
        """Start metrics, the log of the load and the watchdog of steps, and open the port for routers."""
        settings, model = self._settings, self._model
        collector = EngineCollector(
            model=model_names(settings)[0],
            stats=lambda: model.serving.stats,
            load=lambda: model.serving.load(),
            links=model.links,
            is_sleeping=lambda: model.is_sleeping,
        )
        self._metrics.register(collector)
        log_stats(settings, lambda: model.serving.stats, lifecycle)
        await self._rpc.start(self._on_message, lambda router: model.serving.on_router_lost(router))
        lifecycle.on_stop("rpc", self._rpc.close)
        # Only now: warm-up compiles kernels and captures graphs for minutes, and has no limit.
        self._watchdog.device = device_label(settings, model.device)
        self._hang_report = HangReport(lambda: model.serving, self._rpc, self._watchdog.reported)
        self._watchdog.start(lambda: model.deliver(self._hang_report.begin), model.kill_ranks)
        lifecycle.on_stop("step watchdog", self._watchdog.stop)

    def _on_message(self, router: RouterId, message: ToInstance) -> None:
        """Pass a router's message to the part of the process that handles it: commands of operators, or the model."""
        if isinstance(message, EngineCommand):
            self._engine_commands.on_message(router, message)
        else:
            self._model.on_message(router, message)

    async def _adapters_changed(self) -> None:
        """Publish the list of LoRA adapters to the routers and the registry, after it has changed."""
        self._model.serving.send_load_reports()
        await self._renew_record()

    def _join(self, lifecycle: Lifecycle) -> Callable[[], Awaitable[None]]:
        """Register this instance in the registry until shutdown, and return a function that renews its record
        immediately. Without `--registry`, only log a warning.
        """
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

    def _prepare_drain(self, lifecycle: Lifecycle) -> None:
        """Register the drain as the first action of the shutdown.

        The last registered action runs first: refuse new requests, wait for the running ones, then leave the registry.
        """
        settings = self._settings
        self._new_drain()
        self._model.on_serving_changed = self._new_drain
        self._model.on_published = self._on_published
        # The sum of all phases that `finish` waits for, and 5 s for ending what is left.
        deadline_s = settings.drain_timeout_s + settings.kv_lease_s + settings.drain_handover_s + 5.0
        lifecycle.on_stop("requests", lambda: self._draining.finish(), deadline_s=deadline_s)
        lifecycle.on_stop("admission", lambda: self._draining.begin(), deadline_s=3.0)

    def _new_drain(self) -> None:
        """Make a new drain for the server that has just replaced the old one, because each server can
        drain only once.
        """
        self._draining = DrainController(
            self._model.serving,
            announce=self._renew_record,
            request_stop=self._lifecycle.request_stop,
            timeout_s=self._settings.drain_timeout_s,
            migrate_out=self._model.migrate_out,
        )

    async def _on_published(self) -> None:
        """Write a changed model to the registry, after which routers connect to its new generation. Do nothing during
        shutdown.
        """
        # A process that stops has left the registry, or will do so soon.
        if not self._lifecycle.is_stopping:
            await self._renew_record()

    async def _drain(self, exit_afterwards: bool) -> None:
        """Start a drain that was requested over HTTP. Return when new requests are refused. With `exit_afterwards` the
        process exits at its end.
        """
        await self._draining.ask(exit_afterwards=exit_afterwards)

    def _record(self) -> InstanceRecord:
        """Return the registry record of this instance, with its current load."""
        settings = self._settings
        return self._model.record(
            Addresses(advertised(settings, self._rpc.address), advertised_http(settings, self._http.port))
        )

    def _status(self) -> str:
        """Return the field `status` of `GET /health`: `failed` after a hang, else the state of the drain or of a change
        of the model.
        """
        if self._watchdog.has_expired:
            return "failed"
        return self._draining.state if self._switch.state == "serving" else self._switch.state

    def _health(self) -> HealthStatus:
        """Return the answer to `GET /health`."""
        model = self._model
        return HealthStatus(
            status=self._status(),
            role=self._role,
            instance=model.identity.instance,
            generation=model.identity.generation,
            pid=os.getpid(),
            model=model_names(self._settings)[0],
            device=str(model.device),
            uptime_s=time.monotonic() - self._started_at,
            load=model.serving.load(),
            links=list(model.links()),
            routers=len(self._rpc.routers()),
            requests=model.num_requests,
            step_age_s=self._watchdog.step_age_s(),
            wrong_kernels=model.wrong_kernels(),
        )

    def _announce(self) -> None:
        """Write one line to stdout that says that this instance is ready, with its addresses. `baton serve` and tests
        read it.
        """
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
    """Raise `StartFailed` if the transport of `--kv-transport` cannot reach any other instance, although an instance of
    `role` needs one.
    """
    if settings.kv_transport == "memory" and role != "unified":
        raise StartFailed(
            "--kv-transport memory only works within one process, and every instance is a separate process: use it for"
            f" unified instances, which hand nothing off. For a {role} instance use auto, usm, zeromq or oneccl"
        )


def no_handler(parts: RoleDependencies) -> RoleHandler:
    """Stand in for the handler of an encode instance, which serves no messages with prompts."""
    raise AssertionError("an encode instance has no engine for prompts")


async def _do_nothing() -> None:
    """Do nothing. Without `--registry` this function is called in place of the renewal of the registry record."""


def device_label(settings: InstanceSettings, device: torch.device) -> str:
    """Return the name of the engine's device for messages, such as `device 1 (xpu:0, Intel Arc B580)`.

    With `--device-index` the process sees one device only, which is number 0 for it.
    """
    index = "" if settings.device_index is None else f" {settings.device_index}"
    name = device_name(device)
    return f"device{index} ({device}{f', {name}' if name else ''})"
