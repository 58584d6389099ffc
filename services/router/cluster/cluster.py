"""The instances of the cluster: connects to each that the registry names, keeps the index of their blocks, and hands
their answers to whoever placed the request.

An instance counts as ready from its first load report until its link is lost. What is done about a lost one is for the
assignments to decide; the link is tried again for as long as the registry knows the generation.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Protocol

import msgspec

from baton_serve.contracts.events import EventBatch
from baton_serve.contracts.identity import BlockHash, InstanceId, RequestId
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.contracts.layout import KVLayout, obstacle
from baton_serve.contracts.messages import (
    AdapterChanged,
    Answer,
    Batch,
    Failed,
    HandoffReport,
    Heirs,
    HotBlocks,
    LoadAdapter,
    LoadReport,
    Pooled,
    PrefillReport,
    Snapshot,
    SnapshotRequest,
    Tokens,
    ToRouter,
)
from baton_serve.services.common.callbacks import call_each
from baton_serve.services.router.cluster.adapters import missing_adapters
from baton_serve.services.router.cluster.drain_migration import pick_target
from baton_serve.services.router.cluster.routable import RoutableWorkers, serves_model
from baton_serve.services.router.cluster.worker_state import WorkerLink, WorkerState
from baton_serve.services.router.placement.block_index import BlockIndex
from baton_serve.services.router.placement.policy import ClusterView

logger = logging.getLogger(__name__)

_RECONNECT_S = 1.0


class InstanceRegistry(Protocol):
    """`services.common.registry.RegistryView`."""

    async def start(self, on_change: Callable[[], None]) -> None: ...
    def records(self) -> list[InstanceRecord]: ...
    def is_connected(self) -> bool: ...
    async def close(self) -> None: ...


class Subscriber(Protocol):
    """`services.common.zmq.block_events.EventSubscriber`."""

    async def start(self) -> None: ...
    def rebase(self, sequence: int) -> None: ...
    async def close(self) -> None: ...


class Connector(Protocol):
    """Makes the connections to an instance."""

    def link(
        self, record: InstanceRecord, on_message: Callable[[ToRouter], None], on_lost: Callable[[str], None]
    ) -> WorkerLink: ...

    def subscriber(
        self, record: InstanceRecord, on_batch: Callable[[EventBatch], None], on_gap: Callable[[], None]
    ) -> Subscriber: ...


class Cluster:
    def __init__(
        self, view: InstanceRegistry, connector: Connector, *, clock: Callable[[], float], first_turn: int = 0
    ) -> None:
        """`first_turn`: where policies that take turns begin; routers of one cluster should not begin alike."""
        self._view = view
        self._turn = first_turn
        self._connector = connector
        self._clock = clock
        self._workers: dict[InstanceId, WorkerState] = {}
        self._routable_workers: RoutableWorkers | None = None
        """None: they may have changed."""
        self._layouts: dict[KVLayout, KVLayout] = {}
        """Equal ones as one object: comparing them costs nothing."""
        self._subscribers: dict[InstanceId, Subscriber] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: set[Callable[[], None]] = set()
        self._expecting_since = -math.inf
        self.index = BlockIndex()
        self.is_closed = False
        self.on_adapter_changed: Callable[[WorkerState, AdapterChanged], None] = _log_adapter_refusal
        """Who gets the answers to `LoadAdapter` and `UnloadAdapter`."""
        self.version = 0
        """Grows when instances come, go or change other than in load."""

    async def start(self) -> None:
        self._expecting_since = self._clock()
        await self._view.start(self._refresh)
        self._refresh()

    async def close(self) -> None:
        self.is_closed = True
        for worker in list(self._workers.values()):
            self._remove(worker, "the router stops")
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._view.close()

    def workers(self) -> list[WorkerState]:
        return [self._workers[instance] for instance in sorted(self._workers)]

    def worker(self, instance: InstanceId) -> WorkerState | None:
        return self._workers.get(instance)

    def is_registry_connected(self) -> bool:
        return self._view.is_connected()

    def expects_instances(self, *, within_s: float) -> bool:
        """Whether an instance that does not take work now may soon do so: again, as its successor, or for the first
        time, where this router has just started.

        One that left, or never came, is waited for only so long: it may have been taken away for good.
        """
        if any(not worker.takes_work for worker in self._workers.values()):
            return True
        return self._clock() - self._expecting_since < within_s

    async def wait_until(self, fact: Callable[[], bool], *, within_s: float) -> bool:
        """Whether `fact` holds, now or within that time of waiting for instances; at once where none is awaited."""
        if fact():
            return True
        if not self.expects_instances(within_s=within_s):
            return False
        changed = asyncio.Event()
        remove_listener = self.add_listener(changed.set)
        try:
            async with asyncio.timeout(within_s):
                while not fact():
                    await changed.wait()
                    changed.clear()
                return True
        except TimeoutError:
            return False
        finally:
            remove_listener()

    def routable_workers(self) -> RoutableWorkers:
        """As they are now."""
        if self._routable_workers is None:
            self._routable_workers = RoutableWorkers(self._workers.values())
        return self._routable_workers

    def add_listener(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """`on_change` is called whenever an instance becomes ready or is lost; an exception of it is logged. Returns
        what ends that."""
        self._listeners.add(on_change)
        return lambda: self._listeners.discard(on_change)

    def view(
        self,
        names: Callable[[KVLayout], Sequence[BlockHash]],
        model: frozenset[str] | None = None,
        lora: str = "",
        *,
        has_images: bool = False,
    ) -> ClusterView:
        """All that write text and take work, with their cached prefix of the prompt that `names` names. The rest is
        said to `RoutableWorkers.serving`."""
        now = self._clock()
        self.index.expire(now)
        self._turn += 1
        routable_workers = self.routable_workers().serving(model, lora, has_images=has_images).with_allowed_traffic(now)
        return ClusterView(routable_workers.candidates(names, self.index, now), self._turn)

    def _refresh(self) -> None:
        if self.is_closed:
            return
        records = {record.instance: record for record in self._view.records()}
        for worker in list(self._workers.values()):
            record = records.get(worker.record.instance)
            if record is None:
                self._remove_when_idle(worker)
            elif record.generation != worker.record.generation:
                self._remove(worker, "another process has taken its name")
            else:
                worker.renew(record)
        new = [record for instance, record in records.items() if instance not in self._workers]
        call_each("an instance's record", [partial(self._add, record) for record in new])
        self._notify()

    def _add(self, record: InstanceRecord) -> None:
        layout = self._layouts.setdefault(record.layout, record.layout)
        worker = WorkerState(msgspec.structs.replace(record, layout=layout))
        self._workers[record.instance] = worker
        self._connect(worker)

    def _connect(self, worker: WorkerState) -> None:
        worker.state = "connecting"
        worker.link = self._connector.link(
            worker.record,
            lambda message: self._on_message(worker, message),
            lambda reason: self._on_lost(worker, reason),
        )
        self._spawn(worker.link.start())

    def _remove_when_idle(self, worker: WorkerState) -> None:
        """It has left or its record has run out. What still runs there may end."""
        worker.draining = True
        if not worker.load_estimates:
            self._remove(worker, "it has left")

    def _remove(self, worker: WorkerState, reason: str) -> None:
        if self._workers.get(worker.record.instance) is worker:
            del self._workers[worker.record.instance]
            if not self.is_closed:
                logger.info("instance %s is gone: %s", worker.record.instance, reason)
            self._expecting_since = self._clock()
            self.version += 1
        self._disconnect(worker, reason)

    def _on_lost(self, worker: WorkerState, reason: str) -> None:
        if self._workers.get(worker.record.instance) is not worker or worker.state == "lost":
            return
        if worker.state == "ready":
            worker.circuit_breaker.failed(self._clock())
            logger.warning("instance %s is lost: %s", worker.record.instance, reason)
        elif not worker.is_loss_logged:
            record = worker.record
            hint = "is it there, and has it this cluster's key?"
            logger.warning(
                "instance %s cannot be reached at %s: %s (%s)", record.instance, record.rpc_address, reason, hint
            )
        worker.is_loss_logged = True
        self._disconnect(worker, reason)
        asyncio.get_running_loop().call_later(_RECONNECT_S, self._reconnect, worker)

    def _reconnect(self, worker: WorkerState) -> None:
        known = {(record.instance, record.generation) for record in self._view.records()}
        if self.is_closed or self._workers.get(worker.record.instance) is not worker:
            return
        if (worker.record.instance, worker.record.generation) in known:
            self._connect(worker)
        else:
            self._remove(worker, "it has left")

    def _disconnect(self, worker: WorkerState, reason: str) -> None:
        was_ready = worker.state == "ready"
        worker.state = "lost"
        self._routable_workers = None
        self.index.remove(worker.record.instance)
        if (subscriber := self._subscribers.pop(worker.record.instance, None)) is not None:
            self._spawn(subscriber.close())
        if worker.link is not None:
            self._spawn(worker.link.close())
            worker.link = None
        # Those told may place again at once: this instance no longer takes work.
        load_estimates = list(worker.load_estimates.values())
        call_each("a request", [partial(estimate.handler.on_lost, worker, reason) for estimate in load_estimates])
        if was_ready:
            self._notify()

    def _on_message(self, worker: WorkerState, message: ToRouter) -> None:
        if worker.link is None:
            return
        match message:
            case Batch(messages=answers):
                self._deliver(worker, answers)
            case Tokens() | Pooled() | PrefillReport() | HandoffReport() | Failed():
                self._deliver(worker, [message])
            case LoadReport():
                self._on_load(worker, message)
            case Snapshot():
                self._on_snapshot(worker, message)
            case HotBlocks():
                self._on_hot_blocks(worker, message)
            case AdapterChanged():
                self.on_adapter_changed(worker, message)

    def _deliver(self, worker: WorkerState, answers: Sequence[Answer]) -> None:
        now, load_estimates = self._clock(), worker.load_estimates
        for answer in answers:
            if (estimate := load_estimates.get(answer.request_id)) is not None:
                try:
                    estimate.handler.on_answer(worker, answer, now)
                except Exception:  # the other answers are other requests'
                    logger.exception("an answer of %s could not be handled", worker.record.instance)

    def _on_load(self, worker: WorkerState, report: LoadReport) -> None:
        record = worker.record
        if (report.instance, report.generation) != (record.instance, record.generation):
            logger.warning("another process answers at the address of %s", record.instance)
            self._on_lost(worker, "another process answers at its address")
            return
        has_other_adapters = report.adapters != record.adapters
        worker.report(report, self._clock())
        self._routable_workers = None
        if worker.state == "connecting":
            worker.state, worker.is_loss_logged = "ready", False
            logger.info("instance %s is ready: %s", record.instance, record.role)
            self._warn_of_incompatible(worker)
            self._subscribe(worker)
            self._load_missing_adapters(worker)
            self._notify()
        elif has_other_adapters:
            self._notify()
        if not worker.load_estimates and record.instance not in {r.instance for r in self._view.records()}:
            self._remove(worker, "it has left")

    def _warn_of_incompatible(self, worker: WorkerState) -> None:
        """Says with which instances it can exchange no blocks, though their roles and models ask for it."""
        here = worker.record
        for there in (other.record for other in self._workers.values() if other.state == "ready"):
            if {here.role, there.role} == {"prefill", "decode"} and serves_model(there, frozenset({here.model})):
                source, sink = (here, there) if here.role == "prefill" else (there, here)
                if (reason := obstacle(source.layout, sink.layout)) is not None:
                    ends = f"{source.instance} {source.layout}, {sink.instance} {sink.layout}"
                    logger.warning("these never hand blocks over, %s: %s", reason, ends)

    def _load_missing_adapters(self, worker: WorkerState) -> None:
        """With the adapters that others of its model were told to load."""
        others = [other.record for other in self._workers.values() if other is not worker and other.state == "ready"]
        for adapter in missing_adapters(worker.record, others):
            request_id = RequestId(f"join-{worker.record.instance}-{adapter.name}")
            worker.send(LoadAdapter(request_id=request_id, name=adapter.name, path=adapter.path))

    def _subscribe(self, worker: WorkerState) -> None:
        record = worker.record
        self.index.add(record.instance, record.generation)
        subscriber = self._connector.subscriber(
            record, lambda batch: self._on_batch(worker, batch), lambda: self._on_gap(worker)
        )
        self._subscribers[record.instance] = subscriber
        self._spawn(subscriber.start())
        worker.send(SnapshotRequest())

    def _on_batch(self, worker: WorkerState, batch: EventBatch) -> None:
        if not self.index.apply(batch):
            worker.send(SnapshotRequest())

    def _on_gap(self, worker: WorkerState) -> None:
        if not self.index.is_waiting(worker.record.instance):
            self.index.wait_for_snapshot(worker.record.instance, worker.record.generation)
            worker.send(SnapshotRequest())

    def _on_snapshot(self, worker: WorkerState, snapshot: Snapshot) -> None:
        applied = self.index.load(snapshot)
        if applied is None:
            return
        if subscriber := self._subscribers.get(worker.record.instance):
            subscriber.rebase(applied)
        if self.index.is_waiting(worker.record.instance):
            worker.send(SnapshotRequest())

    def _on_hot_blocks(self, worker: WorkerState, hot: HotBlocks) -> None:
        """It leaves: another instance of its pool is told to fetch them."""
        if hot.generation != worker.record.generation:
            return
        found = pick_target(worker, hot, self.workers())
        if found is not None:
            target, adopt = found
            logger.info("%s takes over %d blocks of %s", target.record.instance, len(adopt.names), hot.instance)
            target.send(adopt)
        worker.send(Heirs([found[1].ticket.ticket] if found is not None else []))

    def _notify(self) -> None:
        self.version += 1
        self._routable_workers = None
        call_each("a listener of the cluster", list(self._listeners))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a connection failed", exc_info=error)


def _log_adapter_refusal(worker: WorkerState, changed: AdapterChanged) -> None:
    if changed.refusal is not None:
        logger.warning("instance %s lacks an adapter: %s", worker.record.instance, changed.message)
