"""Keeps the block index equal to the prefix caches of instances, from their events and snapshots; decides when one is
stale.
"""

from collections.abc import Callable, Coroutine
from typing import Protocol

from baton_serve.contracts.events import EventBatch
from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.instance import InstanceRecord
from baton_serve.contracts.messages import Snapshot, SnapshotRequest
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.placement.block_index import BlockIndex


class Subscriber(Protocol):
    """Receives the cache events of one instance. `services.common.zmq.block_events.EventSubscriber` implements it."""

    async def start(self) -> None: ...
    def rebase(self, sequence: int) -> None:
        """Expect the event batch with the number `sequence` + 1 next: a snapshot has just given the state up to
        `sequence`.
        """

    async def close(self) -> None: ...


Subscribe = Callable[[InstanceRecord, Callable[[EventBatch], None], Callable[[], None]], Subscriber]
"""Makes a subscription to an instance from the callbacks for a batch and for a gap: `Connector.subscriber`."""


class BlockIndexSync:
    """Keeps the router's block index up to date: subscribes to the cache events of ready instances and applies them to
    `index`. `Cluster` owns it.
    """

    def __init__(
        self, index: BlockIndex, subscribe: Subscribe, *, spawn: Callable[[Coroutine[None, None, None]], None]
    ) -> None:
        """Start without subscriptions. `subscribe` creates the subscription to an instance; `spawn` runs a coroutine in
        a task for which the owner waits when it closes.
        """
        self._index = index
        self._subscribe = subscribe
        self._spawn = spawn
        self._subscribers: dict[InstanceId, Subscriber] = {}

    def start(self, worker: WorkerState) -> None:
        """Subscribe to the cache events of an instance, and ask it for a snapshot of all its cached blocks."""
        record = worker.record
        # The subscription starts in a task, so the snapshot may be older than the first batch. Batches that are missing
        # between the two show as a gap in the numbers, and `_on_gap` requests another snapshot.
        self._index.add(record.instance, record.generation)
        subscriber = self._subscribe(record, lambda batch: self._on_batch(worker, batch), lambda: self._on_gap(worker))
        self._subscribers[record.instance] = subscriber
        self._spawn(subscriber.start())
        worker.send(SnapshotRequest())

    def stop(self, instance: InstanceId) -> None:
        """Remove the blocks of an instance from the index and close the subscription to it, if there is one."""
        self._index.remove(instance)
        if (subscriber := self._subscribers.pop(instance, None)) is not None:
            self._spawn(subscriber.close())

    def on_snapshot(self, worker: WorkerState, snapshot: Snapshot) -> None:
        """Replace the blocks of an instance in the index by those of a snapshot that it has sent."""
        applied = self._index.load(snapshot)
        if applied is None:
            return
        # Otherwise the subscriber would report a gap for batches that the snapshot contains.
        if subscriber := self._subscribers.get(worker.record.instance):
            subscriber.rebase(applied)
        if self._index.is_waiting(worker.record.instance):
            worker.send(SnapshotRequest())

    def _on_batch(self, worker: WorkerState, batch: EventBatch) -> None:
        # While a snapshot is awaited `apply` keeps the batches and returns True, so each gap causes one request.
        if not self._index.apply(batch):
            worker.send(SnapshotRequest())

    def _on_gap(self, worker: WorkerState) -> None:
        if not self._index.is_waiting(worker.record.instance):
            self._index.wait_for_snapshot(worker.record.instance, worker.record.generation)
            worker.send(SnapshotRequest())
