"""What the next step computes, and what its results change. Pure: `now` is passed in.

Decodes come first, one token each; the rest of the token budget goes to prompts, in chunks that let those who write
have their next tokens in the time that they were promised (`engine.core.step_time_model`). When a
decode needs a block and none is free, the least important sequence gives up its memory and is recomputed later.
A prompt enters only when all its blocks are there, so it never stops halfway.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from baton_serve.contracts.block_hash import block_names
from baton_serve.contracts.messages import ErrorCode, TokenLogprobs
from baton_serve.engine.core.outputs import CompletedBlocks, FirstTokenInfo, NamedBlock, SequenceOutput, StepResult
from baton_serve.engine.core.request_table import Roster
from baton_serve.engine.core.sequence import Request, Sequence, State
from baton_serve.engine.core.step_time_model import Pace

PROMPT_LOGPROBS_CHUNK = 256
"""Rows of logits are `vocab_size` wide: requests that want all of them go in small chunks."""


class Chunk(Struct, frozen=True, gc=False):
    """Compute `length` tokens of a sequence from position `start` on."""

    sequence: Sequence
    start: int
    length: int
    is_last: bool
    """The chunk reaches the sequence's end, so a token follows."""


class SampleRow(Struct, frozen=True, gc=False):
    """One token to choose, from the logits of a chunk's last row."""

    chunk: int
    sequence: Sequence
    index: int


@dataclass(frozen=True, slots=True)
class Plan:
    chunks: list[Chunk]
    rows: list[SampleRow]

    def blocks(self, block_tokens: int) -> Iterator[int]:
        """All that are read or written, some of them more than once."""
        for chunk in self.chunks:
            yield from chunk.sequence.blocks[: -(-(chunk.start + chunk.length) // block_tokens)]


@dataclass(frozen=True, slots=True)
class RowFailure:
    message: str
    code: ErrorCode


@dataclass(slots=True)
class Sampled:
    """The runner's answer to a plan. `token_ids` and `logprobs` follow `Plan.rows`."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By chunk: the log-probability of the token after each of its rows, the prompt's last excepted."""
    failed: dict[int, RowFailure] = field(default_factory=dict)
    """By row of the plan: why no token could be chosen for it. What stands in `token_ids` there means nothing."""


class _Blocked(NamedTuple):
    """The first waiting sequence found no room: what was free then, and whether a reserve was kept."""

    head: Sequence
    num_free: int
    was_running: bool


class Scheduler:
    def __init__(self, roster: Roster, pace: Pace | None = None) -> None:
        """`pace` learns from who runs the plans; without it steps are as long as the limits allow."""
        self._roster = roster
        self._pace = pace or Pace()
        self._blocked: _Blocked | None = None
        self._mixed: set[str] = set()  # adapters of the step that is being planned
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        """In the device tier."""
        self.num_host_hit_tokens = 0
        self.unreadable: list[Request] = []
        """Those in no queue any more whose images are elsewhere, and whose blocks are not here either: whoever runs the
        plans ends them."""

    @property
    def is_short_of_blocks(self) -> bool:
        """The next waiting sequence lacks memory: nobody may overtake it."""
        return self._blocked is not None and self._blocked.head is self._roster.head()

    def has_work(self) -> bool:
        roster = self._roster
        if roster.running or roster.loading or (roster.ready and roster.has_slot):
            return True
        head = roster.head()
        return head is not None and roster.has_slot and not self._is_still_blocked(head)

    def schedule(self, now: float) -> Plan:
        roster = self._roster
        roster.promote_ready()
        roster.sort_running()
        chunks: list[Chunk] = []
        budget = roster.limits.max_num_batched_tokens
        prompts: list[Sequence] = []
        self._mixed.clear()
        for sequence in list(roster.running):
            # A victim always sorts after the one that needs its block: it has no chunk yet.
            if sequence.must_wait or not self._mixes(sequence):
                continue
            if sequence.num_remaining > 1:
                prompts.append(sequence)
            elif sequence.state is State.RUNNING and self._grow(sequence):
                chunks.append(Chunk(sequence, sequence.num_computed, 1, True))
        budget -= len(chunks)
        if chunks and (prompts or roster.head() is not None):
            budget = min(budget, self._room([chunk.sequence for chunk in chunks], budget))
        for sequence in prompts:
            if budget > 0 and sequence.state is State.RUNNING:
                budget -= self._append_chunk(chunks, sequence, budget)
        while budget > 0 and (head := roster.head()) is not None and self._mixes(head) and self._place(head, now):
            if head.state is State.RUNNING:
                budget -= self._append_chunk(chunks, head, budget)
        return Plan(chunks, _sample_rows(chunks))

    def schedule_ahead(self, now: float) -> Plan | None:
        """What can be computed after a step whose tokens are not known yet: sequences go on unless it is certain that
        they end. None: nothing, or only after somebody gave up memory, which nobody does while it is being written."""
        block_tokens = self._roster.limits.block_tokens
        going = self._roster.running + self._roster.ready
        growing = sum(s.num_computed == len(s.blocks) * block_tokens and not s.must_wait for s in going)
        if growing > self._roster.pool.num_free:
            return None
        plan = self.schedule(now)
        return plan if plan.chunks else None

    def advance(self, plan: Plan) -> StepResult:
        """Takes into the state what is known before the tokens are: the device may still be computing them."""
        result = StepResult()
        block_tokens = self._roster.limits.block_tokens
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.length
            sequence.num_launched += 1
            if sequence.num_computed // block_tokens > sequence.num_registered:
                self._register_full_blocks(sequence)
            if sequence.request.mode == "prefill":
                self._publish(sequence, result)
            sequence.num_pending += chunk.is_last
        return result

    def apply(self, plan: Plan, sampled: Sampled, now: float, *, advanced: StepResult | None = None) -> StepResult:
        """Takes the step's results into the state. Everything in `plan` was computed. `advanced`: what `advance`
        returned, if it was called already. Sequences that have ended since get no token, and nobody is told
        of their blocks."""
        result = self.advance(plan) if advanced is None else advanced
        by_chunk: dict[int, list[int]] = {}
        for position, row in enumerate(plan.rows):
            by_chunk.setdefault(row.chunk, []).append(position)
        for number, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            sequence.num_launched -= 1
            sequence.num_pending -= chunk.is_last
            if sequence.state is State.ENDED:
                self._roster.settle(sequence)
                ended = sequence.request.work.request_id
                result.completed = [done for done in result.completed if done.request_id != ended]
                continue
            if sequence.request.wants_prompt_logprobs:
                sequence.request.prompt_logprobs += sampled.prompt_logprobs.get(number, [])
            if chunk.is_last:
                self._register_full_blocks(sequence)  # when the step ran ahead, its tokens were not known then
                self._report_first(sequence.request, now, result)
                self._extend(sequence, plan, by_chunk[number], sampled, result)
        return result

    def abandon(self, plan: Plan) -> None:
        """The device could not compute this plan, for which `advance` was called: its requests end."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_launched -= 1
            sequence.num_pending -= chunk.is_last
            if sequence.state is State.ENDED:
                self._roster.settle(sequence)

    def spare_tokens_per_s(self) -> float:
        """Of prompts, beside those who write and as fast as all of them were promised; 0: not at all."""
        pace = self._pace
        writers = [s for s in self._roster.running if s.num_remaining == 1]
        if not writers:
            return pace.prefill_tokens_per_s
        promises_s = [s.request.work.itl_s for s in writers]
        if None in promises_s or not pace.keeps(promises_s):
            return 0.0
        room = self._room(writers, self._roster.limits.max_num_batched_tokens - len(writers))
        return pace.tokens_per_s(room, len(writers))

    def _room(self, writers: list[Sequence], budget: int) -> int:
        """Of prompts beside `writers`, at most `budget`."""
        room = self._pace.room([s.request.work.itl_s for s in writers])
        return budget if room is None else min(room, budget)

    def _mixes(self, sequence: Sequence) -> bool:
        """Whether its adapter has a place in this step. If not, it waits for those before it."""
        adapter = sequence.request.work.lora
        if not adapter or adapter in self._mixed:
            return True
        if len(self._mixed) == self._roster.limits.max_loras:
            return False
        self._mixed.add(adapter)
        return True

    def _append_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        length = min(sequence.num_remaining, budget)
        if sequence.request.wants_prompt_logprobs:
            length = min(length, PROMPT_LOGPROBS_CHUNK)
        is_last = length == sequence.num_remaining
        self._roster.num_planned_tokens += length
        chunks.append(Chunk(sequence, sequence.num_computed, length, is_last))
        return length

    def _grow(self, sequence: Sequence) -> bool:
        """A block for the next token; False if the sequence itself had to give way."""
        roster = self._roster
        if sequence.num_computed < len(sequence.blocks) * roster.limits.block_tokens:
            return True
        while (block := roster.pool.allocate(1)) is None:
            # Blocks of a `prefill` request may be read by a copy at this moment: those never move.
            candidates = [s for s in roster.running + roster.ready if s.request.mode != "prefill"]
            victim = max(candidates, key=lambda s: s.key)
            roster.preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += block
        return True

    def _place(self, sequence: Sequence, now: float) -> bool:
        """Gives the first waiting sequence its blocks and a slot, or remembers why not. It gets the slot only later if
        some of its prefix must come from the host tier first."""
        roster = self._roster
        pool, block_tokens = roster.pool, roster.limits.block_tokens
        if not roster.has_slot or self._is_still_blocked(sequence):
            return False
        request = sequence.request
        request.prompt_logprobs = []  # those of a preempted attempt are computed again
        num_tokens = len(sequence.token_ids)
        sequence.name_blocks(num_tokens // block_tokens, block_tokens)
        # At least the last token is computed: its logits are needed.
        reusable = [] if request.wants_prompt_logprobs else sequence.names[: (num_tokens - 1) // block_tokens]
        prefix = pool.find(reusable)
        if len(prefix) * block_tokens < request.num_unreadable:
            roster.pop_head()
            self.unreadable.append(request)
            return False
        needed = roster.num_blocks_for(num_tokens) - len(prefix)
        reserve = pool.num_total // 100 if roster.running else 0
        if pool.num_free - pool.num_taken(prefix) - needed < reserve:
            self._blocked = _Blocked(sequence, pool.num_free, bool(roster.running))
            return False
        cached = pool.take(prefix)
        fresh = pool.allocate(needed)
        assert fresh is not None
        sequence.blocks = cached + fresh
        sequence.num_registered = len(cached)
        sequence.num_computed = len(cached) * block_tokens
        if request.started is None:
            request.started = now
            request.cached_tokens = sequence.num_computed
            request.host_tokens = prefix.num_host * block_tokens
            self.num_prefix_query_tokens += num_tokens
            self.num_prefix_hit_tokens += request.cached_tokens - request.host_tokens
            self.num_host_hit_tokens += request.host_tokens
        self._blocked = None
        roster.pop_head()
        if prefix.num_host:
            roster.load(sequence)
        else:
            roster.run(sequence)
        return True

    def _is_still_blocked(self, head: Sequence) -> bool:
        """Nothing has changed since `head` found too little memory, so it need not be tried again."""
        blocked = self._blocked
        if blocked is None or blocked.head is not head or self._roster.pool.num_free > blocked.num_free:
            return False
        return blocked.was_running == bool(self._roster.running)

    def _register_full_blocks(self, sequence: Sequence) -> None:
        block_tokens = self._roster.limits.block_tokens
        known, full = sequence.num_registered, min(sequence.num_computed, len(sequence.token_ids)) // block_tokens
        if known < full:
            sequence.name_blocks(full, block_tokens)
            self._roster.pool.register(sequence.names[known:full], sequence.blocks[known:full])
            sequence.num_registered = full

    def tails(self, plan: Plan) -> list[CompletedBlocks]:
        """What `advance` will report of `prefill` requests whose last chunk this is."""
        last = [chunk for chunk in plan.chunks if chunk.is_last and chunk.sequence.request.mode == "prefill"]
        return [self._completed_by(chunk.sequence, chunk.start + chunk.length) for chunk in last]

    def _publish(self, sequence: Sequence, result: StepResult) -> None:
        """Reports the blocks of a `prefill` request that are new to its owner, cached ones included."""
        completed = self._completed_by(sequence, sequence.num_computed)
        if completed.blocks:
            sequence.request.num_published += len(completed.blocks)
            result.completed.append(completed)

    def _completed_by(self, sequence: Sequence, num_computed: int) -> CompletedBlocks:
        """Not reported yet, when `num_computed` tokens are computed."""
        request, block_tokens = sequence.request, self._roster.limits.block_tokens
        full = num_computed // block_tokens
        names = sequence.names[request.num_published : full]
        if num_computed == len(sequence.token_ids) and num_computed % block_tokens:
            parent = sequence.names[full - 1] if full else None
            tail = sequence.token_ids[full * block_tokens :]
            work, at = request.work, full * block_tokens
            names = names + block_names(work.root, tail, block_tokens, parent=parent, media=work.media, start=at)
        blocks = sequence.blocks[request.num_published : request.num_published + len(names)]
        named = [NamedBlock(name, block) for name, block in zip(names, blocks, strict=True)]
        return CompletedBlocks(request.work.request_id, named)

    def _report_first(self, request: Request, now: float, result: StepResult) -> None:
        if request.is_first_reported or request.started is None:
            return
        request.is_first_reported = True
        wanted = request.work.sampling.prompt_logprobs is not None
        result.first.append(
            FirstTokenInfo(
                request_id=request.work.request_id,
                queue_s=request.started - request.arrived,
                prefill_s=now - request.started,
                cached_tokens=request.cached_tokens,
                host_tokens=request.host_tokens,
                prompt_logprobs=[None, *request.prompt_logprobs] if wanted else None,
            )
        )

    def _extend(self, sequence: Sequence, plan: Plan, rows: list[int], sampled: Sampled, result: StepResult) -> None:
        """The chosen tokens of one chunk: several when the trunk of n > 1 sequences reached its end."""
        request, roster = sequence.request, self._roster
        chosen: dict[int, int] = {}
        generated = sequence.num_generated
        for row in rows:
            index, token = plan.rows[row].index, sampled.token_ids[row]
            if request.to_start and index not in request.to_start:
                continue  # cancelled since the step was launched
            chosen[index] = token
            verdict = request.verdict(generated + 1, token)
            logprobs = sampled.logprobs[row] if sampled.logprobs is not None else None
            result.tokens.append(
                SequenceOutput(
                    request_id=request.work.request_id,
                    sequence=index,
                    position=generated,
                    token_ids=[token],
                    logprobs=None if logprobs is None else [logprobs],
                    finish_reason=verdict.reason if verdict else None,
                    stop_token_id=verdict.stop_token_id if verdict else None,
                )
            )
        if request.mode == "prefill":
            roster.leave_batch(sequence)
            sequence.state = State.HELD
            request.to_start = []
            result.held.append(request.work.request_id)
        elif request.to_start:
            roster.start_sequences(sequence, chosen)
        elif result.tokens[-1].finish_reason is not None:
            roster.end(sequence)
        else:
            sequence.token_ids.append(chosen[sequence.index])


def _sample_rows(chunks: list[Chunk]) -> list[SampleRow]:
    rows: list[SampleRow] = []
    for number, chunk in enumerate(chunks):
        if chunk.is_last:
            sequence = chunk.sequence
            if sequence.request.to_start:
                rows += [SampleRow(number, sequence, index) for index in sequence.request.to_start]
            else:
                rows.append(SampleRow(number, sequence, sequence.index))
    return rows
