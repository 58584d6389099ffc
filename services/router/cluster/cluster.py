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
from baton_serve.contracts.identity import BlockName, InstanceId, RequestId
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
from baton_serve.services.router.cluster.adapters import lacking
from baton_serve.services.router.cluster.drain_migration import bequeath
from baton_serve.services.router.cluster.routable import Takers, serves
from baton_serve.services.router.cluster.worker_state import Link, Member
from baton_serve.services.router.placement.block_index import BlockIndex
from baton_serve.services.router.placement.policy import ClusterView

logger = logging.getLogger(__name__)

_RECONNECT_S = 1.0


class View(Protocol):
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
    ) -> Link: ...

    def subscriber(
        self, record: InstanceRecord, on_batch: Callable[[EventBatch], None], on_gap: Callable[[], None]
    ) -> Subscriber: ...


class Cluster:
    def __init__(self, view: View, connector: Connector, *, clock: Callable[[], float], first_turn: int = 0) -> None:
        """`first_turn`: where policies that take turns begin; routers of one cluster should not begin alike."""
        self._view = view
        self._turn = first_turn
        self._connector = connector
        self._clock = clock
        self._members: dict[InstanceId, Member] = {}
        self._takers: Takers | None = None
        """None: they may have changed."""
        self._layouts: dict[KVLayout, KVLayout] = {}
        """Equal ones as one object: comparing them costs nothing."""
        self._subscribers: dict[InstanceId, Subscriber] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: set[Callable[[], None]] = set()
        self._awaited_since = -math.inf
        self.index = BlockIndex()
        self.is_closed = False
        self.on_adapter_changed: Callable[[Member, AdapterChanged], None] = _tell_of_refusal
        """Who gets the answers to `LoadAdapter` and `UnloadAdapter`."""
        self.version = 0
        """Grows when instances come, go or change other than in load."""

    async def start(self) -> None:
        self._awaited_since = self._clock()
        await self._view.start(self._refresh)
        self._refresh()

    async def close(self) -> None:
        self.is_closed = True
        for member in list(self._members.values()):
            self._remove(member, "the router stops")
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._view.close()

    def members(self) -> list[Member]:
        return [self._members[instance] for instance in sorted(self._members)]

    def member(self, instance: InstanceId) -> Member | None:
        return self._members.get(instance)

    def is_registry_connected(self) -> bool:
        return self._view.is_connected()

    def awaits_instances(self, *, within_s: float) -> bool:
        """Whether an instance that does not take work now may soon do so: again, as its successor, or for the first
        time, where this router has just started.

        One that left, or never came, is waited for only so long: it may have been taken away for good.
        """
        if any(not member.takes_work for member in self._members.values()):
            return True
        return self._clock() - self._awaited_since < within_s

    async def until(self, fact: Callable[[], bool], *, within_s: float) -> bool:
        """Whether `fact` holds, now or within that time of waiting for instances; at once where none is awaited."""
        if fact():
            return True
        if not self.awaits_instances(within_s=within_s):
            return False
        changed = asyncio.Event()
        unlisten = self.listen(changed.set)
        try:
            async with asyncio.timeout(within_s):
                while not fact():
                    await changed.wait()
                    changed.clear()
                return True
        except TimeoutError:
            return False
        finally:
            unlisten()

    def takers(self) -> Takers:
        """As they are now."""
        if self._takers is None:
            self._takers = Takers(self._members.values())
        return self._takers

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """`on_change` is called whenever an instance becomes ready or is lost; an exception of it is logged. Returns
        what ends that."""
        self._listeners.add(on_change)
        return lambda: self._listeners.discard(on_change)

    def view(
        self,
        names: Callable[[KVLayout], Sequence[BlockName]],
        model: frozenset[str] | None = None,
        lora: str = "",
        *,
        has_images: bool = False,
    ) -> ClusterView:
        """All that write text and take work, with their cached prefix of the prompt that `names` names. The rest is
        said to `Takers.of`."""
        now = self._clock()
        self.index.expire(now)
        self._turn += 1
        takers = self.takers().of(model, lora, has_images=has_images).sound(now)
        return ClusterView(takers.candidates(names, self.index, now), self._turn)

    def _refresh(self) -> None:
        if self.is_closed:
            return
        records = {record.instance: record for record in self._view.records()}
        for member in list(self._members.values()):
            record = records.get(member.record.instance)
            if record is None:
                self._remove_when_idle(member)
            elif record.generation != member.record.generation:
                self._remove(member, "another process has taken its name")
            else:
                member.renew(record)
        new = [record for instance, record in records.items() if instance not in self._members]
        call_each("an instance's record", [partial(self._add, record) for record in new])
        self._notify()

    def _add(self, record: InstanceRecord) -> None:
        layout = self._layouts.setdefault(record.layout, record.layout)
        member = Member(msgspec.structs.replace(record, layout=layout))
        self._members[record.instance] = member
        self._connect(member)

    def _connect(self, member: Member) -> None:
        member.state = "connecting"
        member.link = self._connector.link(
            member.record,
            lambda message: self._on_message(member, message),
            lambda reason: self._on_lost(member, reason),
        )
        self._spawn(member.link.start())

    def _remove_when_idle(self, member: Member) -> None:
        """It has left or its record has run out. What still runs there may end."""
        member.draining = True
        if not member.shares:
            self._remove(member, "it has left")

    def _remove(self, member: Member, reason: str) -> None:
        if self._members.get(member.record.instance) is member:
            del self._members[member.record.instance]
            if not self.is_closed:
                logger.info("instance %s is gone: %s", member.record.instance, reason)
            self._awaited_since = self._clock()
            self.version += 1
        self._disconnect(member, reason)

    def _on_lost(self, member: Member, reason: str) -> None:
        if self._members.get(member.record.instance) is not member or member.state == "lost":
            return
        if member.state == "ready":
            member.circuit.failed(self._clock())
            logger.warning("instance %s is lost: %s", member.record.instance, reason)
        elif not member.is_told_lost:
            record = member.record
            hint = "is it there, and has it this cluster's key?"
            logger.warning(
                "instance %s cannot be reached at %s: %s (%s)", record.instance, record.rpc_address, reason, hint
            )
        member.is_told_lost = True
        self._disconnect(member, reason)
        asyncio.get_running_loop().call_later(_RECONNECT_S, self._reconnect, member)

    def _reconnect(self, member: Member) -> None:
        known = {(record.instance, record.generation) for record in self._view.records()}
        if self.is_closed or self._members.get(member.record.instance) is not member:
            return
        if (member.record.instance, member.record.generation) in known:
            self._connect(member)
        else:
            self._remove(member, "it has left")

    def _disconnect(self, member: Member, reason: str) -> None:
        was_ready = member.state == "ready"
        member.state = "lost"
        self._takers = None
        self.index.remove(member.record.instance)
        if (subscriber := self._subscribers.pop(member.record.instance, None)) is not None:
            self._spawn(subscriber.close())
        if member.link is not None:
            self._spawn(member.link.close())
            member.link = None
        # Those told may place again at once: this instance no longer takes work.
        shares = list(member.shares.values())
        call_each("a request", [partial(share.assignment.on_lost, member, reason) for share in shares])
        if was_ready:
            self._notify()

    def _on_message(self, member: Member, message: ToRouter) -> None:
        if member.link is None:
            return
        match message:
            case Batch(messages=answers):
                self._deliver(member, answers)
            case Tokens() | Pooled() | PrefillReport() | HandoffReport() | Failed():
                self._deliver(member, [message])
            case LoadReport():
                self._on_load(member, message)
            case Snapshot():
                self._on_snapshot(member, message)
            case HotBlocks():
                self._on_hot_blocks(member, message)
            case AdapterChanged():
                self.on_adapter_changed(member, message)

    def _deliver(self, member: Member, answers: Sequence[Answer]) -> None:
        now, shares = self._clock(), member.shares
        for answer in answers:
            if (share := shares.get(answer.request_id)) is not None:
                try:
                    share.assignment.on_answer(member, answer, now)
                except Exception:  # the other answers are other requests'
                    logger.exception("an answer of %s could not be handled", member.record.instance)

    def _on_load(self, member: Member, report: LoadReport) -> None:
        record = member.record
        if (report.instance, report.generation) != (record.instance, record.generation):
            logger.warning("another process answers at the address of %s", record.instance)
            self._on_lost(member, "another process answers at its address")
            return
        has_other_adapters = report.adapters != record.adapters
        member.report(report, self._clock())
        self._takers = None
        if member.state == "connecting":
            member.state, member.is_told_lost = "ready", False
            logger.info("instance %s is ready: %s", record.instance, record.role)
            self._tell_apart(member)
            self._subscribe(member)
            self._equip(member)
            self._notify()
        elif has_other_adapters:
            self._notify()
        if not member.shares and record.instance not in {r.instance for r in self._view.records()}:
            self._remove(member, "it has left")

    def _tell_apart(self, member: Member) -> None:
        """Says with which instances it can exchange no blocks, though their roles and models ask for it."""
        here = member.record
        for there in (other.record for other in self._members.values() if other.state == "ready"):
            if {here.role, there.role} == {"prefill", "decode"} and serves(there, frozenset({here.model})):
                source, sink = (here, there) if here.role == "prefill" else (there, here)
                if (reason := obstacle(source.layout, sink.layout)) is not None:
                    ends = f"{source.instance} {source.layout}, {sink.instance} {sink.layout}"
                    logger.warning("these never hand blocks over, %s: %s", reason, ends)

    def _equip(self, member: Member) -> None:
        """With the adapters that others of its model were told to load."""
        others = [other.record for other in self._members.values() if other is not member and other.state == "ready"]
        for adapter in lacking(member.record, others):
            request_id = RequestId(f"join-{member.record.instance}-{adapter.name}")
            member.send(LoadAdapter(request_id=request_id, name=adapter.name, path=adapter.path))

    def _subscribe(self, member: Member) -> None:
        record = member.record
        self.index.add(record.instance, record.generation)
        subscriber = self._connector.subscriber(
            record, lambda batch: self._on_batch(member, batch), lambda: self._on_gap(member)
        )
        self._subscribers[record.instance] = subscriber
        self._spawn(subscriber.start())
        member.send(SnapshotRequest())

    def _on_batch(self, member: Member, batch: EventBatch) -> None:
        if not self.index.apply(batch):
            member.send(SnapshotRequest())

    def _on_gap(self, member: Member) -> None:
        if not self.index.is_waiting(member.record.instance):
            self.index.wait_for_snapshot(member.record.instance, member.record.generation)
            member.send(SnapshotRequest())

    def _on_snapshot(self, member: Member, snapshot: Snapshot) -> None:
        applied = self.index.load(snapshot)
        if applied is None:
            return
        if subscriber := self._subscribers.get(member.record.instance):
            subscriber.rebase(applied)
        if self.index.is_waiting(member.record.instance):
            member.send(SnapshotRequest())

    def _on_hot_blocks(self, member: Member, hot: HotBlocks) -> None:
        """It leaves: another instance of its pool is told to fetch them."""
        if hot.generation != member.record.generation:
            return
        found = bequeath(member, hot, self.members())
        if found is not None:
            heir, adopt = found
            logger.info("%s takes over %d blocks of %s", heir.record.instance, len(adopt.names), hot.instance)
            heir.send(adopt)
        member.send(Heirs([found[1].ticket.ticket] if found is not None else []))

    def _notify(self) -> None:
        self.version += 1
        self._takers = None
        call_each("a listener of the cluster", list(self._listeners))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a connection failed", exc_info=error)


def _tell_of_refusal(member: Member, changed: AdapterChanged) -> None:
    if changed.refusal is not None:
        logger.warning("instance %s lacks an adapter: %s", member.record.instance, changed.message)
