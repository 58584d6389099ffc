"""Follows the registry: connects to each instance, removes one that is lost or gone, and passes answers on to
requests.

It passes the answers of instances to the handlers of their requests. An instance is ready from its first load report
until its connection is lost. Then its handlers decide what to do about their requests, and the cluster tries to connect
again for as long as the registry has the instance's generation.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec

from baton_serve.contracts.block_layout import KVLayout, obstacle
from baton_serve.contracts.events import EventBatch
from baton_serve.contracts.identity import BlockHash, InstanceId
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.contracts.messages import (
    AdapterChanged,
    Answer,
    Batch,
    EngineCommandDone,
    Failed,
    HandoffReport,
    HotBlocks,
    LoadReport,
    Pooled,
    PrefillReport,
    Snapshot,
    Tokens,
    ToRouter,
)
from baton_serve.services.common.process_lifecycle import call_each
from baton_serve.services.router.cluster.drain_migration import migrate
from baton_serve.services.router.cluster.index_sync import BlockIndexSync, Subscriber
from baton_serve.services.router.cluster.offered_adapters import load_missing_adapters
from baton_serve.services.router.cluster.prefill_fallback import PrefillFallback
from baton_serve.services.router.cluster.routable import RoutableWorkers, ready_encoders, serves_model
from baton_serve.services.router.cluster.worker_state import WorkerLink, WorkerState
from baton_serve.services.router.placement.block_index import BlockIndex
from baton_serve.services.router.placement.policy import ClusterView

logger = logging.getLogger(__name__)

_RECONNECT_S = 1.0
"""Seconds between two attempts to connect to an instance."""


class InstanceRegistry(Protocol):
    """The interface by which `Cluster` reads the registry, the list of instances.
    `services.common.registry.RegistryView` implements it.
    """

    async def start(self, on_change: Callable[[], None]) -> None:
        """Read the records of all instances, and call `on_change` on the event loop whenever a record is added, changed
        or removed.
        """

    def records(self) -> list[InstanceRecord]: ...
    def is_connected(self) -> bool:
        """Return whether the registry's backend, such as Redis, can be reached. While it cannot, the last records stay
        valid.
        """
        ...

    async def close(self) -> None: ...


class Connector(Protocol):
    """Creates the connections to instances. It is `connections.InstanceConnector`, or a fake in tests and in the
    simulation.
    """

    def link(
        self, record: InstanceRecord, on_message: Callable[[ToRouter], None], on_lost: Callable[[str], None]
    ) -> WorkerLink:
        """Return a connection to an instance for requests and answers, which is not started yet. It calls `on_message`
        with each answer, and `on_lost` once, with the reason.
        """
        ...

    def subscriber(
        self, record: InstanceRecord, on_batch: Callable[[EventBatch], None], on_gap: Callable[[], None]
    ) -> Subscriber:
        """Return a subscription to the cache events of an instance (blocks stored and evicted), which is not started
        yet. It calls `on_batch` with each batch of events, and `on_gap` when a batch was lost.
        """
        ...


class Cluster:
    """Holds the state of all instances as one router process knows them. It follows the registry and connects to each
    instance. Use it on the event loop only.
    """

    def __init__(
        self,
        registry: InstanceRegistry,
        connector: Connector,
        *,
        clock: Callable[[], float],
        first_turn: int = 0,
        prefill_fallback_after_s: float | None = None,
    ) -> None:
        """Create a cluster without instances; `start` connects to those in `registry`.

        `first_turn` is where the policies `round_robin` and `random` begin. It should differ between the routers of a
        cluster, or all of them send their first requests to the same instance. For `prefill_fallback_after_s` see
        `PrefillFallback`.
        """
        self._registry = registry
        self._turn = first_turn
        self._connector = connector
        self._clock = clock
        self._workers: dict[InstanceId, WorkerState] = {}
        self._routable_workers: RoutableWorkers | None = None
        """Cached result of `routable_workers`; None after anything has changed that it depends on."""
        self._layouts: dict[KVLayout, KVLayout] = {}
        """One object for all equal layouts, so that comparing them for each placement costs nothing."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: set[Callable[[], None]] = set()
        self._expecting_since = -math.inf
        """When this router started or last removed an instance: from then on another one may be expected."""
        self.index = BlockIndex()
        self._index_sync = BlockIndexSync(self.index, connector.subscriber, spawn=self._spawn)
        self._fallback = PrefillFallback(after_s=prefill_fallback_after_s, on_allowed=self._notify)
        self.is_closed = False
        self.on_adapter_changed: Callable[[WorkerState, AdapterChanged], None] = _log_adapter_refusal
        """Handles the answers to `LoadAdapter` and `UnloadAdapter`; `AdapterRollout` replaces it."""
        self.on_engine_command_done: Callable[[WorkerState, EngineCommandDone], None] = lambda worker, answer: None
        """Handles the answers to `EngineCommand`; `EngineActions`, which sends the commands, sets it."""
        self.version = 0
        """Number that grows when instances come, go, or change other than in load. For caches of what depends on them.
        """

    async def start(self) -> None:
        """Read the registry and start to connect to its instances. It does not wait until they are ready."""
        self._expecting_since = self._clock()
        await self._registry.start(self._refresh)
        self._refresh()

    async def close(self) -> None:
        """Close all connections and stop reading the registry. The owners of requests that still run are notified that
        their instances are lost.
        """
        self.is_closed = True
        self._fallback.close()
        for worker in list(self._workers.values()):
            self._remove(worker, "the router is shutting down")
        # A task that ends may have started another one, so gather until none is left.
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._registry.close()

    def workers(self) -> list[WorkerState]:
        """Return the states of all instances in the order of their ids, including instances without a connection."""
        return [self._workers[instance] for instance in sorted(self._workers)]

    def worker(self, instance: InstanceId) -> WorkerState | None:
        """Return the state of an instance, or None if the instance is not in the registry any more."""
        return self._workers.get(instance)

    def is_registry_connected(self) -> bool:
        return self._registry.is_connected()

    def expects_instances(self, *, within_s: float) -> bool:
        """Return whether an instance that accepts no requests now may soon do so.

        That is so while a known instance is connecting, lost or draining (but not while it sleeps), and for `within_s`
        seconds after this router started or an instance was removed. Later it is assumed that no other instance will
        come. It is also so while a prefill instance may soon be allowed to generate answers.
        """
        # A request that waits then is placed when the fallback begins, which calls the listeners.
        if self._fallback.is_pending or any(worker.is_expected for worker in self._workers.values()):
            return True
        return self._clock() - self._expecting_since < within_s

    @property
    def allows_prefill_fallback(self) -> bool:
        """True if prefill instances may generate answers while no decode or unified instance is ready."""
        return self._fallback.is_allowed

    async def wait_until(self, fact: Callable[[], bool], *, within_s: float) -> bool:
        """Wait until the function `fact` returns True. Return False if it does not within `within_s` seconds, or
        immediately if no instance is expected. `fact` is called now and whenever the cluster changes.
        """
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
        """Return the instances that generate text and accept new requests now."""
        if self._routable_workers is None:
            self._routable_workers = RoutableWorkers(self._workers.values())
        return self._routable_workers

    def add_listener(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` whenever an instance becomes ready or is lost, until the returned function is called.

        An exception of `on_change` is logged.
        """
        self._listeners.add(on_change)
        return lambda: self._listeners.discard(on_change)

    def view(
        self,
        block_hashes: Callable[[KVLayout], Sequence[BlockHash]],
        model: frozenset[str] | None = None,
        lora: str = "",
        *,
        has_images: bool = False,
        embeddings: Callable[[KVLayout], Mapping[bytes, BlockHash]] = lambda layout: {},
    ) -> ClusterView:
        """Return the instances that can serve a request now, each with the length of the prompt's prefix that it has
        cached.

        `block_hashes` returns the prompt's block hashes for a KV layout, and `embeddings` the first block hash of each
        image's embeddings. See `RoutableWorkers.serving` for the other arguments. Each call counts as one turn of the
        policies `round_robin` and `random`.
        """
        now = self._clock()
        self.index.expire(now)
        self._turn += 1
        routable_workers = self.routable_workers().serving(model, lora, has_images=has_images).with_allowed_traffic(now)
        encoders = ready_encoders(self._workers.values(), embeddings, self.index, now) if has_images else []
        candidates = routable_workers.candidates(block_hashes, self.index, now, needs_held=has_images)
        is_asleep = not candidates and any(
            worker.record.sleeping and (model is None or serves_model(worker.record, model))
            for worker in self._workers.values()
        )
        return ClusterView(candidates, self._turn, self._fallback.is_allowed, is_asleep, encoders)

    def _refresh(self) -> None:
        """Add and remove instances according to the present records in the registry. It is called when these change."""
        if self.is_closed:
            return
        records = {record.instance: record for record in self._registry.records()}
        for worker in list(self._workers.values()):
            record = records.get(worker.record.instance)
            if record is None:
                self._remove_when_idle(worker)
            elif record.generation != worker.record.generation:
                # One that begins to sleep comes back when an operator wakes it up, which may take hours.
                expecting_since = self._expecting_since if record.sleeping else self._clock()
                self._remove(worker, "it has registered again, as a new process or with another model")
                self._expecting_since = expecting_since
            else:
                worker.renew(record)
        new = [record for instance, record in records.items() if instance not in self._workers]
        call_each("handling an instance's record", [partial(self._add, record) for record in new])
        self._notify()

    def _add(self, record: InstanceRecord) -> None:
        """Add an instance that is new in the registry, and start to connect to it."""
        layout = self._layouts.setdefault(record.layout, record.layout)
        worker = WorkerState(msgspec.structs.replace(record, layout=layout))
        self._workers[record.instance] = worker
        self._connect(worker)

    def _connect(self, worker: WorkerState) -> None:
        """Start to connect to an instance. It becomes ready when its first load report arrives."""
        worker.state = "connecting"
        worker.link = self._connector.link(
            worker.record,
            lambda message: self._on_message(worker, message),
            lambda reason: self._on_lost(worker, reason),
        )
        self._spawn(worker.link.start())

    def _remove_when_idle(self, worker: WorkerState) -> None:
        """Remove an instance whose record has left the registry. If requests of this router still run there, let it
        drain first.

        The record of a healthy instance may also expire, for example if the instance cannot reach the registry.
        """
        worker.draining = True
        if not worker.load_estimates:
            self._remove(worker, "its record is not in the registry any more")

    def _remove(self, worker: WorkerState, reason: str) -> None:
        """Remove an instance and close the connection to it. `reason` is for the log and for requests that still run
        there.
        """
        if self._workers.get(worker.record.instance) is worker:
            del self._workers[worker.record.instance]
            if not self.is_closed:
                logger.info("removed instance %s: %s", worker.record.instance, reason)
            self._expecting_since = self._clock()
            self.version += 1
        self._disconnect(worker, reason)

    def _on_lost(self, worker: WorkerState, reason: str) -> None:
        """Handle the loss of the connection to an instance, or a failed connection: log it once, clean up, and try
        again later.
        """
        if self._workers.get(worker.record.instance) is not worker or worker.state == "lost":
            return
        if worker.state == "ready":
            worker.circuit_breaker.failed(self._clock())
            logger.warning("lost the connection to instance %s: %s", worker.record.instance, reason)
        elif not worker.is_loss_logged:
            record = worker.record
            hint = "is it running, and does it use the same --cluster-key-file?"
            logger.warning(
                "instance %s cannot be reached at %s: %s (%s)", record.instance, record.rpc_address, reason, hint
            )
        worker.is_loss_logged = True
        self._disconnect(worker, reason)
        asyncio.get_running_loop().call_later(_RECONNECT_S, self._reconnect, worker)

    def _reconnect(self, worker: WorkerState) -> None:
        """Connect again to an instance whose connection was lost. If its record has left the registry meanwhile, remove
        it instead.
        """
        known = {(record.instance, record.generation) for record in self._registry.records()}
        if self.is_closed or self._workers.get(worker.record.instance) is not worker:
            return
        if (worker.record.instance, worker.record.generation) in known:
            self._connect(worker)
        else:
            self._remove(worker, "its record is not in the registry any more")

    def _disconnect(self, worker: WorkerState, reason: str) -> None:
        """Close the connection to an instance, forget its cached blocks, and notify the owners of requests that run
        there.
        """
        was_ready = worker.state == "ready"
        worker.state = "lost"
        self._routable_workers = None
        self._index_sync.stop(worker.record.instance)
        if worker.link is not None:
            self._spawn(worker.link.close())
            worker.link = None
        # Last, because a handler may place its request again immediately: by now this worker accepts no requests. The
        # list is a copy because handlers release their leases.
        load_estimates = list(worker.load_estimates.values())
        call_each(
            "handling the loss of an instance",
            [partial(estimate.handler.on_lost, worker, reason) for estimate in load_estimates],
        )
        if was_ready:
            self._notify()

    def _on_message(self, worker: WorkerState, message: ToRouter) -> None:
        """Handle one message of an instance: answers, a load report, a snapshot of its cache, or the result of a
        command.
        """
        if worker.link is None:
            return  # it was received before the connection was given up
        match message:
            case Batch(messages=answers):
                self._deliver(worker, answers)
            case Tokens() | Pooled() | PrefillReport() | HandoffReport() | Failed():
                self._deliver(worker, [message])
            case LoadReport():
                self._on_load(worker, message)
            case Snapshot():
                self._index_sync.on_snapshot(worker, message)
            case HotBlocks():
                migrate(worker, message, self.workers())
            case AdapterChanged():
                self.on_adapter_changed(worker, message)
            case EngineCommandDone():
                self.on_engine_command_done(worker, message)

    def _deliver(self, worker: WorkerState, answers: Sequence[Answer]) -> None:
        """Pass the answers of an instance to the handlers of their requests. Answers to requests that have ended are
        dropped.
        """
        now, load_estimates = self._clock(), worker.load_estimates
        for answer in answers:
            if (estimate := load_estimates.get(answer.request_id)) is not None:
                try:
                    estimate.handler.on_answer(worker, answer, now)
                except Exception:  # the other answers belong to other requests
                    logger.exception("failed to handle an answer of instance %s", worker.record.instance)

    def _on_load(self, worker: WorkerState, report: LoadReport) -> None:
        """Apply a load report of an instance. The first one after connecting makes the instance ready."""
        record = worker.record
        # After a restart the address may belong to another process, whose load must not count as this instance's.
        if (report.instance, report.generation) != (record.instance, record.generation):
            logger.warning("another process answers at the address of instance %s", record.instance)
            self._on_lost(worker, "another process answers at its address")
            return
        # Requests may wait for an instance that accepts them again, or for one with an adapter.
        is_notable = report.adapters != record.adapters or (worker.draining and not report.draining)
        worker.report(report, self._clock())
        self._routable_workers = None
        if worker.state == "connecting":
            worker.state, worker.is_loss_logged = "ready", False
            logger.info("instance %s is ready: %s", record.instance, record.role)
            others = [
                other.record for other in self._workers.values() if other is not worker and other.state == "ready"
            ]
            _log_impossible_handoffs(record, others)
            self._fallback.on_ready(record)
            self._index_sync.start(worker)
            load_missing_adapters(worker, others)
            self._notify()
        elif is_notable:
            self._notify()
        # The end of the last request of an instance without a record calls nothing here, so each report checks it.
        if not worker.load_estimates and record.instance not in {r.instance for r in self._registry.records()}:
            self._remove(worker, "its record is not in the registry any more")

    def _notify(self) -> None:
        """Call all listeners, because instances have come, gone, or changed in something else than load."""
        self.version += 1
        self._routable_workers = None
        call_each("a listener of cluster changes", list(self._listeners))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` in an asyncio task for which `close` waits. The set keeps the task alive, which asyncio itself
        does not.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("opening or closing a connection to an instance failed", exc_info=error)


def _log_adapter_refusal(worker: WorkerState, changed: AdapterChanged) -> None:
    if changed.refusal is not None:
        logger.warning("instance %s cannot load or unload an adapter: %s", worker.record.instance, changed.message)


def _log_impossible_handoffs(here: InstanceRecord, others: Iterable[InstanceRecord]) -> None:
    """Log a warning for each instance in `others` with which the new instance `here` cannot exchange KV blocks,
    although their roles and models suggest it.
    """
    for there in others:
        if {here.role, there.role} == {"prefill", "decode"} and serves_model(there, frozenset({here.model})):
            source, sink = (here, there) if here.role == "prefill" else (there, here)
            if (reason := obstacle(source.layout, sink.layout)) is not None:
                ends = f"{source.instance} ({source.layout}) to {sink.instance} ({sink.layout})"
                logger.warning("no KV handoff is possible, %s: %s", reason, ends)
        encoder, other = (here, there) if here.role == "encode" else (there, here)
        is_used = other.embedding_layout in (None, encoder.layout)
        if encoder.role == "encode" and not is_used and serves_model(other, frozenset({encoder.model})):
            differing = "the weights, the image processors or the data types differ"
            logger.warning("%s does not use embeddings of %s: %s", other.instance, encoder.instance, differing)
