"""A simulated instance: exchanges `contracts.messages` with the router and gives the work to a simulated engine."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf

from baton_serve.bench.simulation.cost import CostModel
from baton_serve.bench.simulation.engine import TOKEN, SimulatedEngine
from baton_serve.bench.simulation.fabric import Fabric, TransferArrival
from baton_serve.bench.simulation.measures import Gaps
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
from baton_serve.engine.core.block_pool import BlockPool
from baton_serve.engine.core.outputs import FirstTokenInfo, Reservation, SequenceOutput, StepResult
from baton_serve.engine.core.sequence import Mode
from baton_serve.engine.core.step_time_model import DECODE_MAX_STRETCH
from baton_serve.engine.step.engine_stats import engine_stats


@dataclass(slots=True, eq=False)
class _Attempt:
    """One request on one instance."""

    work: Work
    ticket: Ticket | None
    num_published: int = 0
    """Blocks of its prompt that may be sent."""
    num_tokens: int = 0
    """Number of tokens that this instance has generated."""
    num_unsent: int = 0
    """Newest of these tokens that the router has not received."""
    last_token_at: float | None = None
    has_gap: bool = False
    """True once the gap before one of its tokens has been recorded."""


class SimulatedInstance:
    """Receives the router's messages through `on_message`. Answers go to `router` and block events to `subscriber`,
    once these are set."""

    def __init__(self, record: InstanceRecord, cost: CostModel, fabric: Fabric, gaps: Gaps, pool: BlockPool) -> None:
        self.record = record
        self.router: Callable[[ToRouter], None] | None = None
        self.subscriber: Callable[[EventBatch], None] | None = None
        self.sharers: list[SimulatedInstance] = [self]
        """Instances that share this cache, including this one."""
        self.engine = SimulatedEngine(
            cost,
            pool=pool,
            block_tokens=record.layout.block_tokens,
            listener=self,
            max_stretch=DECODE_MAX_STRETCH if record.role == "decode" else inf,
        )
        self.started_at = asyncio.get_running_loop().time()
        self.ended_at: float | None = None
        self._fabric = fabric
        self._loop = asyncio.get_running_loop()
        self._gaps = gaps
        self._attempts: dict[RequestId, _Attempt] = {}
        self._num_pulls = 0
        self._peers: dict[InstanceId, None] = {}
        """Instances from which blocks have been received; a dict keeps their order."""
        self._fabric.engines[record.instance] = self.engine
        self._sequence = 0
        self._reported: Load | None = None

    @property
    def is_idle(self) -> bool:
        return self.engine.is_idle and not self._num_pulls

    def load(self) -> Load:
        """Return the load as a real instance reports it (`services.instance.request_server.load_of`)."""
        engine = self.engine
        stats = engine_stats(engine.table, engine.scheduler, engine.meter)
        return Load(
            free_blocks=stats.free_blocks,
            total_blocks=stats.total_blocks,
            running=stats.running,
            waiting=stats.waiting + stats.reserved + len(engine.handoffs),
            # A real instance reports the state between two steps.
            queued_tokens=stats.queued_tokens + engine.num_launched_tokens,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            decode_step_s=stats.decode_step_s,
            spare_tokens_per_s=stats.spare_tokens_per_s,
            held_blocks=stats.held_blocks,
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
                self._begin(_Attempt(work, ticket), "prefill", pull)
            case Generate(work=work, pull=pull):
                self._begin(_Attempt(work, None), "generate", pull)
            case Decode(work=work, ticket=ticket):
                self._attempts[work.request_id] = _Attempt(work, ticket)
                self.engine.reserve(work)
            case Cancel(request_id=request_id):
                self._cancel(request_id)
            case SnapshotRequest():
                self._send_snapshot()
            case Heartbeat():
                self.report()

    def on_reserved(self, reservation: Reservation) -> None:
        attempt = self._attempts[reservation.request_id]
        assert attempt.ticket is not None
        self._peers[attempt.ticket.source] = None
        num_cached = reservation.reused * self.record.layout.block_tokens
        self._fabric.reserved(attempt.ticket, num_cached, lambda arrival: self._arrived(attempt, reservation, arrival))

    def on_step(self, result: StepResult) -> None:
        """Report the results of a step, as `services.instance.attempt_table` does."""
        for completed in result.completed:
            attempt = self._attempts[completed.request_id]
            attempt.num_published += len(completed.blocks)
            if attempt.ticket is not None:
                num_tokens = attempt.num_published * self.record.layout.block_tokens
                self._fabric.produced(attempt.ticket, min(num_tokens, len(attempt.work.token_ids)))
        for first in result.first:
            self._report_first(first)
        # Before the tokens are sent: the last one ends the request for the router, which then cancels it.
        held = {request_id: self._attempts.pop(request_id) for request_id in result.held}
        self._add_tokens(result.tokens, held)
        for attempt in held.values():
            self._hold(attempt)
        self._publish(result.events)

    def _begin(self, attempt: _Attempt, mode: Mode, pull: Pull | None) -> None:
        """Fetch the prefix that the router has named, then add the request to the engine."""
        work = attempt.work
        self._attempts[work.request_id] = attempt

        def add() -> None:
            if self._attempts.get(work.request_id) is attempt:
                self.engine.add(work, mode)

        if pull is None:
            add()
        else:
            self._pull(work, pull, add)

    def _pull(self, work: Work, pull: Pull, then: Callable[[], None]) -> None:
        """Receive the blocks of a prefix that are missing here and cached at the source now."""
        own, source, ticket = self.engine, self._fabric.engines[pull.ticket.source], pull.ticket
        block_tokens = self.record.layout.block_tokens
        # At least the last token is computed here, because its logits give the first token.
        num_full = min(pull.num_blocks, (len(work.token_ids) - 1) // block_tokens)
        names = hash_blocks(work.root, work.token_ids[: num_full * block_tokens], block_tokens)
        import_id = RequestId(f"import:{ticket.ticket}")
        wanted = own.begin_import(import_id, names)
        if not wanted:
            then()
            return
        pinned = [name for name, _ in source.reservations.pin(names)]
        received = [name for name in wanted if name in set(pinned)]
        self._peers[ticket.source] = None
        self._num_pulls += 1

        def arrived() -> None:
            self._num_pulls -= 1
            source.reservations.unpin(pinned)
            own.end_import(import_id, received)
            then()

        self._fabric.pull(ticket, len(received) * block_tokens, arrived)

    def _hold(self, attempt: _Attempt) -> None:
        """Keep the blocks of a computed prompt until they have been fetched. Without a handoff, release them
        at once."""

        def release() -> None:
            self.engine.release(attempt.work.request_id)
            for sharer in self.sharers:
                sharer.engine.wake()

        if attempt.ticket is None:
            release()
        else:
            self._fabric.finished(attempt.ticket, release)

    def _arrived(self, attempt: _Attempt, reservation: Reservation, arrival: TransferArrival) -> None:
        """Report a handoff and start decoding, unless the request was cancelled."""
        request_id = attempt.work.request_id
        if self._attempts.get(request_id) is not attempt:
            return
        layout = self.record.layout
        attempt.last_token_at = arrival.first_token_at
        self._send(
            HandoffReport(
                request_id=request_id,
                transport="simulated",
                handoff_s=arrival.handoff_s,
                exposed_s=arrival.exposed_s,
                transferred_blocks=ceil(arrival.num_tokens / layout.block_tokens),
                reused_blocks=reservation.reused,
                transferred_bytes=arrival.num_tokens * layout.token_bytes,
            )
        )
        self.engine.admit(reservation, attempt.work.sequences[0])
        if request_id not in self.engine.table.requests:
            del self._attempts[request_id]  # the first token was its last one

    def _cancel(self, request_id: RequestId) -> None:
        # The attempt of a computed prompt has ended: its blocks are kept for a fetch that may be running.
        attempt = self._attempts.pop(request_id, None)
        if attempt is None:
            return
        self.engine.cancel(request_id)
        # Only the sink ends a handoff.
        if attempt.ticket is not None and attempt.ticket.sink == self.record.instance:
            self._fabric.forget(attempt.ticket)

    def _report_first(self, first: FirstTokenInfo) -> None:
        self._send(
            PrefillReport(
                request_id=first.request_id,
                queue_s=first.queue_s,
                prefill_s=first.prefill_s,
                cached_tokens={"device": first.cached_tokens},
            )
        )

    def _add_tokens(self, outputs: list[SequenceOutput], held: dict[RequestId, _Attempt]) -> None:
        """Record the gaps before new tokens. Send the first token of each attempt at once, and the others, which change
        nothing for the router, together with the last one."""
        now = self._loop.time()
        gaps: dict[float, list[RequestId]] = {}
        for output in outputs:
            attempt = held.get(output.request_id) or self._attempts.get(output.request_id)
            if attempt is None:  # cancelled when the router received another token of this step
                continue
            if attempt.has_gap:
                assert attempt.last_token_at is not None
                gaps.setdefault(attempt.last_token_at, []).append(output.request_id)
            elif attempt.last_token_at is not None:
                self._gaps.add_first(output.request_id, now - attempt.last_token_at)
                attempt.has_gap = True
            attempt.last_token_at = now
            attempt.num_tokens += 1
            attempt.num_unsent += 1
            if attempt.num_tokens == 1 or output.finish_reason is not None:
                self._send_tokens(attempt, output)
        for last_token_at, request_ids in gaps.items():
            self._gaps.add(request_ids, now - last_token_at)

    def _send_tokens(self, attempt: _Attempt, last: SequenceOutput) -> None:
        num_unsent, attempt.num_unsent = attempt.num_unsent, 0
        if last.finish_reason is not None:
            self._attempts.pop(last.request_id, None)
        self._send(
            Tokens(
                request_id=last.request_id,
                sequence=last.sequence,
                position=last.position + 1 - num_unsent,
                token_ids=[TOKEN] * num_unsent,
                finish_reason=last.finish_reason,
            )
        )

    def _send(self, message: ToRouter) -> None:
        if self.router is not None:
            self.router(message)

    def _send_snapshot(self) -> None:
        self._publish(self.engine.table.pool.take_events())
        self._send(
            Snapshot(
                instance=self.record.instance,
                generation=self.record.generation,
                sequence=self._sequence,
                device=self.engine.table.pool.cached_block_hashes(),
            )
        )

    def _publish(self, events: list[BlockEvent]) -> None:
        """Send the cache's events to the subscribers of all instances that share it."""
        if events:
            for sharer in self.sharers:
                sharer.publish(events)

    def publish(self, events: list[BlockEvent]) -> None:
        """Send block events to this instance's subscriber."""
        self._sequence += 1
        if self.subscriber is not None:
            self.subscriber(EventBatch(self.record.instance, self.record.generation, self._sequence, events))
