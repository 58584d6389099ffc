"""A simulated engine: the real scheduler, block pool and step-time model. Only the steps are simulated: they take the
time that a cost model predicts, and each generated token is the same.

Steps run one after another: none is launched before the tokens of the previous one are known.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import Protocol

from baton_serve.bench.simulation.cost import CostModel
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import Work
from baton_serve.engine.core.block_pool import BlockPool
from baton_serve.engine.core.kv_import import KVImports
from baton_serve.engine.core.outputs import Reservation, StepResult
from baton_serve.engine.core.request_table import RequestTable, SchedulerConfig
from baton_serve.engine.core.reservations import Reservations
from baton_serve.engine.core.scheduler import ModelRunnerOutput, ScheduledBatch, Scheduler
from baton_serve.engine.core.sequence import Mode
from baton_serve.engine.core.step_time_model import StepTimeModel
from baton_serve.engine.step.engine_stats import StepMeter

TOKEN = (1 << 32) - 1
"""Value of every simulated token. No prompt has it, so that answers never become a part of a cached prompt."""


class EngineListener(Protocol):
    """Receives what the engine has done, at the virtual time at which it happens."""

    def on_reserved(self, reservation: Reservation) -> None: ...
    def on_step(self, result: StepResult) -> None: ...


class SimulatedEngine:
    """The engine of one instance. All methods run on the virtual event loop."""

    def __init__(
        self,
        cost: CostModel,
        *,
        pool: BlockPool,
        block_tokens: int,
        listener: EngineListener,
        max_stretch: float = inf,
    ) -> None:
        """Create an idle engine. `max_stretch` is that of `engine.core.step_time_model.StepTimeModel`."""
        limits = SchedulerConfig(
            block_tokens=block_tokens,
            max_model_len=pool.num_total * block_tokens,
            max_num_seqs=cost.max_num_seqs,
            max_num_batched_tokens=cost.max_num_batched_tokens,
        )
        self.table = RequestTable(pool, limits, frozenset())
        self.meter = StepMeter(StepTimeModel(cost.prefill_tokens_per_s, cost.step_s(1, 0), max_stretch))
        self.scheduler = Scheduler(self.table, self.meter.step_time_model)
        self.reservations = Reservations(self.table)
        self.imports = KVImports(self.table)
        self.handoffs: deque[Work] = deque()
        """Requests that wait for blocks which another instance will fill, in order of arrival."""
        self.busy_s = 0.0
        self.num_launched_tokens = 0
        """Prompt tokens of the step that is running."""
        self._refused_at = -1
        """Number of free blocks when the first of `handoffs` was refused; -1 if it was not."""
        self._cost = cost
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._is_stepping = False

    @property
    def is_idle(self) -> bool:
        return not (self.table.requests or self.handoffs)

    def add(self, work: Work, mode: Mode) -> None:
        """Put a request into the queue."""
        self.table.enqueue(self.table.add(work, mode, self._loop.time()))
        self.wake()

    def reserve(self, work: Work) -> None:
        """Reserve the blocks of a prompt that another instance computes, as soon as enough are free."""
        self.handoffs.append(work)
        self.wake()

    def admit(self, reservation: Reservation, sequence: int) -> None:
        """Start decoding a reserved request whose blocks have arrived."""
        self.reservations.mark_received(reservation.request_id, [name for name, _ in reservation.missing])
        self.reservations.admit(reservation.request_id, {sequence: TOKEN})
        self.wake()

    def release(self, request_id: RequestId) -> None:
        """Release the blocks of a prompt that were kept for a handoff."""
        self.table.finish_request(self.table.requests[request_id])
        self.wake()

    def cancel(self, request_id: RequestId) -> None:
        """End a request and release its blocks."""
        if self.handoffs and self.handoffs[0].request_id == request_id:
            self._refused_at = -1
        self.handoffs = deque(work for work in self.handoffs if work.request_id != request_id)
        self.table.cancel(request_id, None)
        self.wake()

    def begin_import(self, import_id: RequestId, names: Sequence[BlockHash]) -> list[BlockHash]:
        """Allocate blocks for those of `names` that are not cached here, as many as fit, and return their hashes."""
        if self.scheduler.admission.is_short_of_blocks:
            return []
        return [name for name, _ in self.imports.begin(import_id, names)]

    def end_import(self, import_id: RequestId, received: Iterable[BlockHash]) -> None:
        """Cache the blocks of an import that were received, and free the others."""
        self.imports.receive(import_id, received)
        self.imports.end(import_id)

    def wake(self) -> None:
        """Begin a step if none is running: something has changed."""
        if not self._is_stepping:
            self._begin()

    def _begin(self) -> None:
        self._is_stepping = True
        self._grant()
        plan = self.scheduler.schedule(self._loop.time())
        self._is_stepping = bool(plan.chunks)
        if plan.chunks:
            seconds = self._seconds(plan)
            self.num_launched_tokens = sum([chunk.length for chunk in plan.chunks if chunk.length > 1])
            self._loop.call_later(seconds, self._end, plan, self.scheduler.advance(plan), seconds)

    def _end(self, plan: ScheduledBatch, advanced: StepResult, seconds: float) -> None:
        """Account for the step that has ended, call the listener and begin the next step."""
        self.busy_s += seconds
        self.num_launched_tokens = 0
        sampled = ModelRunnerOutput([TOKEN] * len(plan.rows))
        result = self.scheduler.apply(plan, sampled, self._loop.time(), advanced=advanced)
        self.meter.record(plan, seconds, len(result.tokens))
        result.events = self.table.pool.take_events()
        self._listener.on_step(result)
        self._begin()

    def _grant(self) -> None:
        """Reserve blocks for handoffs strictly in order, as the queue of a decode instance (`decode.block_queue`)."""
        while (
            self.handoffs
            and self.table.pool.num_free > self._refused_at
            and not self.scheduler.admission.is_short_of_blocks
        ):
            reservation = self.reservations.reserve(self.handoffs[0], self._loop.time())
            if reservation is None:
                self._refused_at = self.table.pool.num_free
                return
            self._refused_at = -1
            self.handoffs.popleft()
            self._listener.on_reserved(reservation)
        if self._refused_at >= 0:
            # Fewer are free now, so a smaller number already is an improvement.
            self._refused_at = min(self._refused_at, self.table.pool.num_free)

    def _seconds(self, plan: ScheduledBatch) -> float:
        """Return how long a step takes. A chunk of one token costs as much as a decoding sequence."""
        prompts = [(chunk.start, chunk.length) for chunk in plan.chunks if chunk.length > 1]
        num_kv_tokens = sum([chunk.start for chunk in plan.chunks if chunk.length == 1])
        num_decoding = len(plan.chunks) - len(prompts)
        if prompts:
            return self._cost.chunks_s(prompts, num_decoding, num_kv_tokens)
        return self._cost.step_s(num_decoding, num_kv_tokens)
