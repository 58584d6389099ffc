"""A simulated instance: exchanges `contracts.messages` with the router and gives the work to a simulated engine."""

import asyncio
from collections.abc import Callable
from math import ceil, inf

from baton_serve.bench.simulation.cache import BlockCache
from baton_serve.bench.simulation.cost import CostModel
from baton_serve.bench.simulation.engine import SimulatedEngine
from baton_serve.bench.simulation.fabric import Fabric, TransferArrival
from baton_serve.bench.simulation.measures import Gaps
from baton_serve.bench.simulation.sequence import SimulatedSequence
from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.events import BlockEvent, EventBatch
from baton_serve.contracts.identity import InstanceId, RequestId
from baton_serve.contracts.instance import InstanceRecord, LinkStatus, Load
from baton_serve.contracts.messages import (
    Cancel,
    Decode,
    Generate,
    HandoffReport,
    Heartbeat,
    LoadReport,
    Prefill,
    PrefillReport,
    Pull,
    Snapshot,
    SnapshotRequest,
    Ticket,
    ToInstance,
    Tokens,
    ToRouter,
    Work,
)
from baton_serve.engine.core.step_time_model import DECODE_MAX_STRETCH

_TOKEN = 0
"""Value of every simulated token."""


class SimulatedInstance:
    """Receives the router's messages through `on_message`. Answers go to `router` and block events to `subscriber`,
    once these are set."""

    def __init__(self, record: InstanceRecord, cost: CostModel, fabric: Fabric, gaps: Gaps, cache: BlockCache) -> None:
        self.record = record
        self.router: Callable[[ToRouter], None] | None = None
        self.subscriber: Callable[[EventBatch], None] | None = None
        self.sharers: list[SimulatedInstance] = [self]
        """Instances that share this cache, including this one."""
        self.engine = SimulatedEngine(
            cost,
            cache=cache,
            block_tokens=record.layout.block_tokens,
            owner=self,
            gaps=gaps,
            max_stretch=DECODE_MAX_STRETCH if record.role == "decode" else inf,
        )
        self.started_at = asyncio.get_running_loop().time()
        self.ended_at: float | None = None
        self._fabric = fabric
        self._loop = asyncio.get_running_loop()
        self._works: dict[RequestId, Work] = {}
        self._tickets: dict[RequestId, Ticket] = {}
        self._held: dict[RequestId, SimulatedSequence] = {}
        """Sequences whose blocks are kept until the decode instance has fetched them."""
        self._num_pulls = 0
        self._peers: dict[InstanceId, None] = {}
        """Instances from which blocks have been received; a dict keeps their order."""
        self._fabric.caches[record.instance] = self.engine.cache
        self._sequence = 0
        self._reported: Load | None = None

    @property
    def is_idle(self) -> bool:
        return self.engine.is_idle and not self._held and not self._num_pulls

    def load(self) -> Load:
        """Return the load as a real instance reports it."""
        engine = self.engine
        return Load(
            free_blocks=engine.cache.num_free,
            total_blocks=engine.cache.num_total,
            running=engine.num_running,
            waiting=len(engine.waiting),
            queued_tokens=engine.queued_tokens,
            prefill_tokens_per_s=engine.step_time_model.prefill_tokens_per_s,
            decode_step_s=engine.step_time_model.decode_step_s,
            spare_tokens_per_s=engine.spare_tokens_per_s,
            held_blocks=sum(stream.holding.num_blocks for stream in self._held.values()),
        )

    def report(self) -> None:
        """Send a load report to the router if the load has changed."""
        load = self.load()
        if load != self._reported:
            self._reported = load
            self._send(
                LoadReport(
                    instance=self.record.instance,
                    generation=self.record.generation,
                    load=load,
                    links=[
                        LinkStatus(peer=peer, transport="simulated", bytes_per_second=self._fabric.bytes_per_s)
                        for peer in self._peers
                    ],
                    draining=self.record.draining,
                )
            )

    def on_message(self, message: ToInstance) -> None:
        match message:
            case Prefill(work=work, ticket=ticket, pull=pull):
                self._begin(work, "prefill", ticket, pull)
            case Decode(work=work, ticket=ticket):
                self._begin(work, "decode", ticket)
            case Generate(work=work, pull=pull):
                self._begin(work, "generate", None, pull)
            case Cancel(request_id=request_id):
                self._cancel(request_id)
            case SnapshotRequest():
                self._send_snapshot()
            case Heartbeat():
                self.report()

    def on_reserved(self, sequence: SimulatedSequence) -> None:
        ticket = self._tickets[sequence.request_id]
        self._peers[ticket.source] = None
        self._fabric.reserved(ticket, sequence.cached, lambda arrival: self._arrived(sequence, arrival))

    def on_chunk(self, sequence: SimulatedSequence) -> None:
        if (ticket := self._tickets.get(sequence.request_id)) is not None:
            self._fabric.produced(ticket, sequence.computed)

    def on_first_token(self, sequence: SimulatedSequence) -> None:
        now = self._loop.time()
        assert sequence.started_at is not None
        report = PrefillReport(
            request_id=sequence.request_id,
            queue_s=sequence.started_at - sequence.arrived_at,
            prefill_s=now - sequence.started_at,
            cached_tokens={"device": sequence.cached},
        )
        work = self._works[sequence.request_id]
        self._publish()
        self._send(report)
        if sequence.mode == "prefill":
            # Hold the blocks before the token is sent: the token may end the request, and the router then cancels it.
            self._hold(sequence)
        self._send_tokens(work, 1, is_last=work.sampling.max_tokens == self._offset(work) + 1)

    def on_second_token(self, sequence: SimulatedSequence) -> None:
        work = self._works[sequence.request_id]
        self._send_tokens(work, 1, position=self._offset(work) + 1, is_last=False)
        sequence.num_reported = 2

    def on_finished(self, sequence: SimulatedSequence) -> None:
        work = self._works.pop(sequence.request_id, None)
        self._tickets.pop(sequence.request_id, None)
        if work is None:
            return
        sent = self._offset(work) + sequence.num_reported
        if work.sampling.max_tokens > sent:
            self._send_tokens(work, work.sampling.max_tokens - sent, position=sent, is_last=True)

    def on_step(self) -> None:
        self._publish()

    def _begin(self, work: Work, mode: str, ticket: Ticket | None, pull: Pull | None = None) -> None:
        block_tokens = self.record.layout.block_tokens
        num_full = len(work.token_ids) // block_tokens
        num_tokens = work.sampling.max_tokens - self._offset(work)
        stream = SimulatedSequence(
            request_id=work.request_id,
            mode="prefill" if mode == "prefill" else "decode" if mode == "decode" else "generate",
            num_tokens=len(work.token_ids),
            remaining=1 if mode == "prefill" else num_tokens - (mode == "decode"),
            names=hash_blocks(work.root, work.token_ids[: num_full * block_tokens], block_tokens),
            arrived_at=self._loop.time(),
            itl_s=work.itl_s,
        )
        self._works[work.request_id] = work
        if ticket is not None:
            self._tickets[work.request_id] = ticket
        if pull is None:
            self.engine.add(stream)
        else:
            self._pull(stream, pull)

    def _pull(self, stream: SimulatedSequence, pull: Pull) -> None:
        """Receive the prefix that the source has now, then add the request to the engine."""
        own, source = self.engine.cache, self._fabric.caches[pull.ticket.source]
        self._peers[pull.ticket.source] = None
        names = list(stream.names[: pull.num_blocks])
        missing = names[own.match(names) : source.match(names)]
        self._num_pulls += 1

        def arrived() -> None:
            self._num_pulls -= 1
            if stream.request_id in self._works:
                own.adopt(missing)
                self.engine.add(stream)

        self._fabric.pull(pull.ticket, len(missing) * self.record.layout.block_tokens, arrived)

    def _hold(self, stream: SimulatedSequence) -> None:
        """Keep the blocks of a computed prompt until they have been fetched. Without a handoff, release them
        at once."""
        del self._works[stream.request_id]
        ticket = self._tickets.pop(stream.request_id, None)
        if ticket is None:
            self.engine.release(stream)
            return
        self._held[stream.request_id] = stream

        def release() -> None:
            if self._held.pop(stream.request_id, None) is not None:
                self.engine.release(stream)

        self._fabric.finished(ticket, release)

    def _arrived(self, stream: SimulatedSequence, arrival: TransferArrival) -> None:
        """Report a handoff and start decoding, unless the request was cancelled."""
        if stream.request_id not in self._works:
            return
        token_bytes, block_tokens = self.record.layout.token_bytes, self.record.layout.block_tokens
        stream.last_token_at = arrival.first_token_at
        self._send(
            HandoffReport(
                request_id=stream.request_id,
                transport="simulated",
                handoff_s=arrival.handoff_s,
                exposed_s=arrival.exposed_s,
                transferred_blocks=ceil(arrival.num_tokens / block_tokens),
                reused_blocks=stream.cached // block_tokens,
                transferred_bytes=arrival.num_tokens * token_bytes,
            )
        )
        self.engine.join(stream)
        self._publish()

    def _cancel(self, request_id: RequestId) -> None:
        self._works.pop(request_id, None)
        ticket = self._tickets.pop(request_id, None)
        self.engine.cancel(request_id)
        # Only the sink ends the handoff: the source has to keep the blocks for a fetch that may be running.
        if ticket is not None and ticket.sink == self.record.instance:
            self._fabric.forget(ticket)

    def _offset(self, work: Work) -> int:
        """Return the number of tokens that were generated before, on other instances (after a replay)."""
        return len(work.token_ids) - work.num_prompt_tokens

    def _send_tokens(self, work: Work, count: int, *, position: int | None = None, is_last: bool) -> None:
        self._send(
            Tokens(
                request_id=work.request_id,
                sequence=work.sequences[0],
                position=self._offset(work) if position is None else position,
                token_ids=[_TOKEN] * count,
                finish_reason="length" if is_last else None,
            )
        )

    def _send(self, message: ToRouter) -> None:
        if self.router is not None:
            self.router(message)

    def _send_snapshot(self) -> None:
        self._publish()
        self._send(
            Snapshot(
                instance=self.record.instance,
                generation=self.record.generation,
                sequence=self._sequence,
                device=self.engine.cache.names(),
            )
        )

    def _publish(self) -> None:
        """Send the cache's events to the subscribers of all instances that share it."""
        events = self.engine.cache.take_events()
        if events:
            for sharer in self.sharers:
                sharer.publish(events)

    def publish(self, events: list[BlockEvent]) -> None:
        """Send block events to this instance's subscriber."""
        self._sequence += 1
        if self.subscriber is not None:
            self.subscriber(EventBatch(self.record.instance, self.record.generation, self._sequence, events))
