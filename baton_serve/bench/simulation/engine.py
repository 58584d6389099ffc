"""A simulated engine: it schedules as the real one does, but a step only takes time.

Decoding sequences come first, with one token each. Prompts fill the rest of a step's token budget in chunks, first
come first served (prompts that are handed off are ordered by `request_table.DUE_TOKENS_PER_PROMPT_TOKEN`). A prompt
starts only when all its blocks are available. If a decoding sequence finds no free block, the newest sequence is
preempted and computed again later. Steps without prompts are simulated many at once, because their durations are known
in advance.
"""

import asyncio
from bisect import insort
from math import ceil, inf
from typing import Protocol

from baton_serve.bench.simulation.cache import BlockCache
from baton_serve.bench.simulation.cost import CostModel
from baton_serve.bench.simulation.measures import Gaps
from baton_serve.bench.simulation.sequence import SimulatedSequence
from baton_serve.contracts.identity import RequestId
from baton_serve.engine.core.request_table import DUE_TOKENS_PER_PROMPT_TOKEN
from baton_serve.engine.core.step_time_model import StepTimeModel


class EngineListener(Protocol):
    """Receives the engine's events, at the virtual time at which they happen."""

    def on_reserved(self, sequence: SimulatedSequence) -> None: ...
    def on_chunk(self, sequence: SimulatedSequence) -> None: ...
    def on_first_token(self, sequence: SimulatedSequence) -> None: ...
    def on_second_token(self, sequence: SimulatedSequence) -> None:
        """A handed-off sequence has its second token and continues after it."""

    def on_finished(self, sequence: SimulatedSequence) -> None: ...
    def on_step(self) -> None: ...


class SimulatedEngine:
    """The engine of one instance. All methods run on the virtual event loop."""

    def __init__(
        self,
        cost: CostModel,
        *,
        cache: BlockCache,
        block_tokens: int,
        owner: EngineListener,
        gaps: Gaps,
        max_stretch: float = inf,
    ) -> None:
        """Create an idle engine. `max_stretch` is that of `engine.core.step_time_model.StepTimeModel`."""
        self.cost = cost
        self.cache = cache
        self.waiting: list[SimulatedSequence] = []
        self.prompts: list[SimulatedSequence] = []
        self.decoding: list[SimulatedSequence] = []
        self.reserved: set[SimulatedSequence] = set()
        self.step_time_model = StepTimeModel(cost.prefill_tokens_per_s, cost.step_s(1, 0), max_stretch)
        self.busy_s = 0.0
        self._block_tokens = block_tokens
        self._owner = owner
        self._gaps = gaps
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_deciding = False
        self._started_at = 0.0
        self._first_s = 0.0
        """Seconds of the first of the steps that are running."""
        self._longer_s = 0.0
        """Seconds by which each of these steps is longer than the previous one: the KV that it reads grows."""
        self._num_steps = 0
        self._chunks: list[tuple[SimulatedSequence, int]] = []
        self._batch: list[SimulatedSequence] = []
        """Sequences that decode in the running steps. Others in `decoding` have joined since the steps began."""
        self._num_planned_tokens = 0

    @property
    def queued_tokens(self) -> int:
        """Return the prompt tokens that are waiting or not yet computed."""
        waiting = sum(s.num_tokens for s in self.waiting if s.mode != "decode")
        return waiting + sum(s.num_tokens - s.computed for s in self.prompts)

    @property
    def spare_tokens_per_s(self) -> float:
        """Return the prompt tokens per second that fit beside the decoding sequences, as the real scheduler reports
        them."""
        decoding = self.decoding
        if not decoding:
            return self.step_time_model.prefill_tokens_per_s
        itl_slos_s = [s.itl_s for s in decoding]
        if None in itl_slos_s or not self.step_time_model.meets_itl_slos(itl_slos_s):
            return 0.0
        most = self.cost.max_num_batched_tokens - len(decoding)
        return self.step_time_model.tokens_per_s(
            min(self.step_time_model.chunk_budget(itl_slos_s) or most, most), len(decoding)
        )

    @property
    def num_running(self) -> int:
        return len(self.prompts) + len(self.decoding) + len(self.reserved)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.num_running)

    def add(self, sequence: SimulatedSequence) -> None:
        """Put a request into the queue."""
        # A decode request only reserves memory: it does not queue behind prompts that have theirs already.
        sequence.due = self._num_planned_tokens if sequence.mode != "decode" else -1
        if sequence.mode == "prefill":
            sequence.due += DUE_TOKENS_PER_PROMPT_TOKEN * sequence.num_tokens
        insort(self.waiting, sequence, key=lambda s: s.due)
        self._look()

    def join(self, sequence: SimulatedSequence) -> None:
        """Start decoding a reserved sequence whose blocks have arrived."""
        if sequence in self.reserved:
            self.reserved.discard(sequence)
            self.cache.name(sequence.holding, sequence.names[sequence.cached // self._block_tokens :])
            self._start_decoding(sequence)
            self._look()

    def release(self, sequence: SimulatedSequence) -> None:
        """Release the blocks of a sequence that were kept for a handoff."""
        self.cache.release(sequence.holding)
        self._look()

    def cancel(self, request_id: RequestId) -> None:
        """Remove all sequences of a request and release their blocks."""
        for group in (self.waiting, self.prompts, self.decoding):
            for sequence in [s for s in group if s.request_id == request_id]:
                group.remove(sequence)
                self.cache.release(sequence.holding)
        self._batch = [s for s in self._batch if s.request_id != request_id]
        for sequence in [s for s in self.reserved if s.request_id == request_id]:
            self.reserved.discard(sequence)
            self.cache.release(sequence.holding)
        self._chunks = [chunk for chunk in self._chunks if chunk[0].request_id != request_id]
        self._look()

    def _look(self) -> None:
        """React to a change: begin a step, or end the running steps at the next token."""
        if self._is_deciding:
            return
        if self._timer is None:
            self._begin()
        elif self._num_steps > 1:
            self._end_soon()

    def _end_soon(self) -> None:
        """Cut the running steps off after the one that is computed now."""
        elapsed = self._loop.time() - self._started_at
        # Binary search for the step that is running now.
        low, high = 1, self._num_steps
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._seconds(middle) >= elapsed else (middle + 1, high)
        if low < self._num_steps:
            assert self._timer is not None
            self._timer.cancel()
            self._num_steps = low
            self._timer = self._loop.call_at(self._started_at + self._seconds(low), self._end)

    def _seconds(self, num_steps: int) -> float:
        """Return the seconds of the first `num_steps` steps: an arithmetic series."""
        return num_steps * self._first_s + self._longer_s * num_steps * (num_steps - 1) / 2

    def _begin(self) -> None:
        self._is_deciding = True
        self._num_steps = self._grow() if self.decoding else 0
        self._schedule_prompts()
        self._is_deciding = False
        if self._chunks:
            self._num_steps = 1
        elif any([s.is_fresh for s in self.decoding]):  # its next token is reported at once
            self._num_steps = min(1, self._num_steps)
        if not self._num_steps:
            return
        self._batch = list(self.decoding)
        batch = len(self.decoding)
        num_kv_tokens = sum(s.kv_tokens for s in self.decoding)
        if self._chunks:
            chunks = [(s.computed, length) for s, length in self._chunks]
            self._first_s = self.cost.chunks_s(chunks, batch, num_kv_tokens)
        else:
            self._first_s = self.cost.step_s(batch, num_kv_tokens)
        self._longer_s = batch * self.cost.step_s_per_kv_token
        self._started_at = self._loop.time()
        self._timer = self._loop.call_at(self._started_at + self._seconds(self._num_steps), self._end)

    def _schedule_prompts(self) -> None:
        budget = self.cost.max_num_batched_tokens - len(self.decoding)
        if self.decoding and (self.prompts or self.waiting):
            chunk_budget = self.step_time_model.chunk_budget([s.itl_s for s in self.decoding])
            budget = budget if chunk_budget is None else min(chunk_budget, budget)
        for sequence in self.prompts:
            budget -= self._append_chunk(sequence, budget)
        while self.waiting and self.num_running < self.cost.max_num_seqs:
            head = self.waiting[0]
            if (head.mode != "decode" and budget <= 0) or not self._place(head):
                break
            self.waiting.pop(0)
            if head.mode == "decode":
                self.reserved.add(head)
                self._owner.on_reserved(head)
            else:
                head.started_at = head.started_at if head.started_at is not None else self._loop.time()
                insort(self.prompts, head, key=lambda s: s.due)
                budget -= self._append_chunk(head, budget)

    def _append_chunk(self, sequence: SimulatedSequence, budget: int) -> int:
        """Schedule as many tokens of a prompt as the budget allows; return their number."""
        length = min(budget, sequence.num_tokens - sequence.computed)
        if length > 0:
            self._chunks.append((sequence, length))
            self._num_planned_tokens += length
        return max(0, length)

    def _place(self, sequence: SimulatedSequence) -> bool:
        """Give the sequence all its blocks and return True, or return False if not enough are free."""
        num_tokens = sequence.num_tokens
        # Even a fully cached prompt must compute its last token, whose logits give the first output token.
        reusable = (num_tokens if sequence.mode == "decode" else num_tokens - 1) // self._block_tokens
        cached = sequence.names[: self.cache.match(sequence.names[:reusable])]
        fresh = ceil(num_tokens / self._block_tokens) - len(cached)
        # Keep a reserve for running sequences to grow, as the real scheduler does.
        reserve = self.cache.num_total // 100 if self.num_running else 0
        if self.cache.num_free - self.cache.num_needed(cached, fresh) < reserve:
            return False
        sequence.holding = self.cache.take(cached, fresh)
        sequence.computed = sequence.cached = len(cached) * self._block_tokens
        return True

    def _grow(self) -> int:
        """Give each decoding sequence blocks for as many steps as possible and return that number of steps. Preempt
        sequences if there are not enough blocks for one step."""
        while self.decoding:
            num_steps = min(s.remaining for s in self.decoding)
            while num_steps and self._missing(num_steps) > self.cache.num_free:
                num_steps //= 2
            if num_steps:
                for sequence in self.decoding:
                    self.cache.grow(sequence.holding, self._missing_of(sequence, num_steps))
                return num_steps
            self._preempt()
        return 0

    def _missing(self, num_steps: int) -> int:
        return sum(self._missing_of(sequence, num_steps) for sequence in self.decoding)

    def _missing_of(self, sequence: SimulatedSequence, num_steps: int) -> int:
        return max(0, ceil((sequence.kv_tokens + num_steps) / self._block_tokens) - sequence.holding.num_blocks)

    def _preempt(self) -> None:
        """Preempt the newest sequence. A sequence that runs alone could never continue, so it ends."""
        running = self.decoding + [s for s in self.prompts if s.mode == "generate"]
        victim = max(running, key=lambda s: (s.arrived_at, s.request_id))
        (self.decoding if victim in self.decoding else self.prompts).remove(victim)
        self.cache.release(victim.holding)
        if len(running) == 1 and not self.reserved:
            victim.remaining = 0
            self._owner.on_finished(victim)
            return
        victim.mode = "generate"
        victim.num_tokens += victim.written
        victim.written = victim.computed = 0
        self.waiting.insert(0, victim)

    def _end(self) -> None:
        """Account for the steps that have ended, call the listener and begin the next steps."""
        self._is_deciding = True
        self._timer = None
        now, num_steps = self._loop.time(), self._num_steps
        self._measure(now - self._started_at)
        finished = []
        second = [s for s in self._batch if s.is_fresh and s.mode == "decode" and s.remaining > num_steps]
        for sequence in self._batch:
            sequence.written += num_steps
            sequence.remaining -= num_steps
            sequence.last_token_at = now
            sequence.is_fresh = False
            if not sequence.remaining:
                finished.append(sequence)
        if finished:
            self.decoding = [s for s in self.decoding if s.remaining]
        for sequence in second:
            self._owner.on_second_token(sequence)
        for sequence in finished:
            self.cache.release(sequence.holding)
            self._owner.on_finished(sequence)
        chunks, self._chunks = self._chunks, []
        for sequence, length in chunks:
            self._computed(sequence, length)
        self._owner.on_step()
        self._is_deciding = False
        self._begin()

    def _measure(self, seconds: float) -> None:
        """Update the step-time model and record the gaps between tokens."""
        self.busy_s += seconds
        num_prompt_tokens = sum(length for _, length in self._chunks)
        if not num_prompt_tokens:
            self.step_time_model.decoded(seconds / self._num_steps)
        else:
            self.step_time_model.computed(num_prompt_tokens, seconds)
            if self._batch:
                self.step_time_model.mixed(num_prompt_tokens, len(self._batch), seconds)
        fresh = [s for s in self._batch if s.is_fresh]
        for sequence in fresh:
            before = sequence.last_token_at if sequence.last_token_at is not None else self._started_at
            self._gaps.add_first(sequence.request_id, self._started_at + self._first_s - before)
        step_s = seconds / self._num_steps
        self._gaps.add([s.request_id for s in self._batch if not s.is_fresh], step_s, self._num_steps)
        self._gaps.add([s.request_id for s in fresh], step_s, self._num_steps - 1)

    def _computed(self, sequence: SimulatedSequence, length: int) -> None:
        """Account for a computed chunk; at the end of its prompt, report the first token."""
        before = sequence.computed // self._block_tokens
        sequence.computed += length
        self.cache.name(sequence.holding, sequence.names[before : sequence.computed // self._block_tokens])
        is_done = sequence.computed == sequence.num_tokens
        if sequence.mode == "prefill":
            self._owner.on_chunk(sequence)
        if not is_done:
            return
        self.prompts.remove(sequence)
        sequence.remaining -= 1
        last_token_at, sequence.last_token_at = sequence.last_token_at, self._loop.time()
        if last_token_at is None:
            self._owner.on_first_token(sequence)
        else:
            self._gaps.add([sequence.request_id], sequence.last_token_at - last_token_at)
        if sequence.mode == "generate":
            if sequence.remaining:
                self._start_decoding(sequence)
            else:
                self.cache.release(sequence.holding)
                self._owner.on_finished(sequence)

    def _start_decoding(self, sequence: SimulatedSequence) -> None:
        """Add a sequence to the decoding batch; its first token is already counted."""
        sequence.written = 1
        sequence.is_fresh = True
        self.decoding.append(sequence)
