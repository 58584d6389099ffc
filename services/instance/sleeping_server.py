"""Refuses requests of routers while an instance sleeps or loads new weights."""

from dataclasses import replace

from baton_serve.contracts.identity import InstanceId, RequestId
from baton_serve.contracts.instance import Load
from baton_serve.contracts.messages import (
    AdapterChanged,
    Decode,
    ErrorCode,
    Generate,
    Heartbeat,
    LoadAdapter,
    LoadReport,
    Pool,
    Prefill,
    Snapshot,
    SnapshotRequest,
    ToInstance,
    UnloadAdapter,
)
from baton_serve.services.common.rpc.instance_link import RouterId
from baton_serve.services.instance.drain.drainable_server import DrainableServer
from baton_serve.services.instance.engine_thread import TimedStepResult
from baton_serve.services.instance.interfaces import EngineStats, RouterPort
from baton_serve.services.instance.request_server import Identity, load_of


class SleepingServer(DrainableServer):
    """The server of an instance that has no model, because it sleeps or loads: it refuses every request with
    `pause_reason`. Implements `services.instance.role_interface.InstanceService`.
    """

    def __init__(self, identity: Identity, *, stats: EngineStats, router: RouterPort, reason: str) -> None:
        """Create a server that refuses requests with `reason`. `identity` is sent in its reports. `stats` are the last
        statistics of the model: counters keep their values, and present numbers such as free blocks become 0.
        """
        super().__init__(router)
        self.identity = identity
        self.pause_reason = reason
        self.stats = replace(
            stats,
            free_blocks=0,
            total_blocks=0,
            cached_blocks=0,
            held_blocks=0,
            running=0,
            waiting=0,
            held=0,
            reserved=0,
            queued_tokens=0,
            host_used_blocks=0,
            host_total_blocks=0,
        )

    @property
    def num_requests(self) -> int:
        return 0

    def load(self) -> Load:
        """Return a load without KV blocks, so that routers place nothing here."""
        return load_of(self.stats, num_queued=0)

    def on_message(self, router: RouterId, message: ToInstance) -> None:
        """Handle one message of a router: refuse requests and changes of adapters, and answer heartbeats and queries of
        the cache.
        """
        match message:
            case Prefill() | Decode() | Generate():
                self._refuse(router, message.work.request_id)
            case Pool():
                self._refuse(router, message.request_id)
            case LoadAdapter() | UnloadAdapter():
                refused = AdapterChanged(request_id=message.request_id, refusal="invalid", message=self.pause_reason)
                self._router.send(router, refused)
            case Heartbeat():
                self._router.send(router, self._load_report())
            case SnapshotRequest():
                self._router.send(router, self._snapshot())

    def on_router_lost(self, router: RouterId) -> None:
        """Do nothing: without a model no request runs."""

    def on_step_result(self, step: TimedStepResult) -> None:
        """Do nothing: without a model no engine runs."""

    def on_stats(self, stats: EngineStats) -> None:
        """Do nothing: without a model no engine runs."""

    def _refuse(self, router: RouterId, request_id: RequestId) -> None:
        refused = self._refused(request_id)
        assert refused is not None  # `pause_reason` is never empty here
        self._router.send(router, refused)

    def _end_all(self, code: ErrorCode, reason: str) -> None:
        """Do nothing: without a model no request runs."""

    def _snapshot(self) -> Snapshot:
        instance: InstanceId = self.identity.instance
        return Snapshot(instance=instance, generation=self.identity.generation, sequence=0, device=[])

    def _load_report(self) -> LoadReport:
        return LoadReport(
            instance=self.identity.instance, generation=self.identity.generation, load=self.load(), draining=True
        )
