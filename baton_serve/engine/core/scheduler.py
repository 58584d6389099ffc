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

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.messages import ErrorCode, TokenLogprobs
from baton_serve.engine.core.outputs import CompletedBlocks, FirstTokenInfo, NamedBlock, SequenceOutput, StepResult
from baton_serve.engine.core.request_table import RequestTable
from baton_serve.engine.core.sequence import Request, Sequence, SequenceState
from baton_serve.engine.core.step_time_model import StepTimeModel

PROMPT_LOGPROBS_CHUNK = 256
"""Rows of logits are `vocab_size` wide: requests that want all of them go in small chunks."""


class ScheduledChunk(Struct, frozen=True, gc=False):
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
class ScheduledBatch:
    chunks: list[ScheduledChunk]
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
class ModelRunnerOutput:
    """The runner's answer to a plan. `token_ids` and `logprobs` follow `ScheduledBatch.rows`."""

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
    def __init__(self, table: RequestTable, step_time_model: StepTimeModel | None = None) -> None:
        """`step_time_model` learns from who runs the plans; without it steps are as long as the limits allow."""
        self._table = table
        self._step_time_model = step_time_model or StepTimeModel()
        self._blocked: _Blocked | None = None
        self._step_loras: set[str] = set()  # adapters of the step that is being planned
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        """In the device tier."""
        self.num_host_hit_tokens = 0
        self.requests_missing_images: list[Request] = []
        """Those in no queue any more whose images are elsewhere, and whose blocks are not here either: whoever runs the
        plans ends them."""

    @property
    def is_short_of_blocks(self) -> bool:
        """The next waiting sequence lacks memory: nobody may overtake it."""
        return self._blocked is not None and self._blocked.head is self._table.head()

    def has_work(self) -> bool:
        table = self._table
        if table.running or table.loading or (table.ready and table.has_free_slot):
            return True
        head = table.head()
        return head is not None and table.has_free_slot and not self._is_still_blocked(head)

    def schedule(self, now: float) -> ScheduledBatch:
        table = self._table
        table.promote_ready()
        table.sort_running()
        chunks: list[ScheduledChunk] = []
        budget = table.limits.max_num_batched_tokens
        prompts: list[Sequence] = []
        self._step_loras.clear()
        for sequence in list(table.running):
            # A victim always sorts after the one that needs its block: it has no chunk yet.
            if sequence.must_await_tokens or not self._fits_max_loras(sequence):
                continue
            if sequence.num_uncomputed_tokens > 1:
                prompts.append(sequence)
            elif sequence.state is SequenceState.RUNNING and self._allocate_next_block(sequence):
                chunks.append(ScheduledChunk(sequence, sequence.num_computed_tokens, 1, True))
        budget -= len(chunks)
        if chunks and (prompts or table.head() is not None):
            budget = min(budget, self._chunk_budget([chunk.sequence for chunk in chunks], budget))
        for sequence in prompts:
            if budget > 0 and sequence.state is SequenceState.RUNNING:
                budget -= self._append_chunk(chunks, sequence, budget)
        while (
            budget > 0 and (head := table.head()) is not None and self._fits_max_loras(head) and self._admit(head, now)
        ):
            if head.state is SequenceState.RUNNING:
                budget -= self._append_chunk(chunks, head, budget)
        return ScheduledBatch(chunks, _sample_rows(chunks))

    def schedule_ahead(self, now: float) -> ScheduledBatch | None:
        """What can be computed after a step whose tokens are not known yet: sequences go on unless it is certain that
        they end. None: nothing, or only after somebody gave up memory, which nobody does while it is being written."""
        block_tokens = self._table.limits.block_tokens
        going = self._table.running + self._table.ready
        growing = sum(s.num_computed_tokens == len(s.blocks) * block_tokens and not s.must_await_tokens for s in going)
        if growing > self._table.pool.num_free:
            return None
        plan = self.schedule(now)
        return plan if plan.chunks else None

    def advance(self, plan: ScheduledBatch) -> StepResult:
        """Takes into the state what is known before the tokens are: the device may still be computing them."""
        result = StepResult()
        block_tokens = self._table.limits.block_tokens
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens += chunk.length
            sequence.num_steps_in_flight += 1
            if sequence.num_computed_tokens // block_tokens > sequence.num_registered_blocks:
                self._register_full_blocks(sequence)
            if sequence.request.mode == "prefill":
                self._publish(sequence, result)
            sequence.num_output_placeholders += chunk.is_last
        return result

    def apply(
        self, plan: ScheduledBatch, sampled: ModelRunnerOutput, now: float, *, advanced: StepResult | None = None
    ) -> StepResult:
        """Takes the step's results into the state. Everything in `plan` was computed. `advanced`: what `advance`
        returned, if it was called already. Sequences that have ended since get no token, and nobody is told
        of their blocks."""
        result = self.advance(plan) if advanced is None else advanced
        by_chunk: dict[int, list[int]] = {}
        for position, row in enumerate(plan.rows):
            by_chunk.setdefault(row.chunk, []).append(position)
        for number, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            sequence.num_steps_in_flight -= 1
            sequence.num_output_placeholders -= chunk.is_last
            if sequence.state is SequenceState.FINISHED:
                self._table.reclaim(sequence)
                ended = sequence.request.work.request_id
                result.completed = [done for done in result.completed if done.request_id != ended]
                continue
            if sequence.request.wants_prompt_logprobs:
                sequence.request.prompt_logprobs += sampled.prompt_logprobs.get(number, [])
            if chunk.is_last:
                self._register_full_blocks(sequence)  # when the step ran ahead, its tokens were not known then
                self._report_first(sequence.request, now, result)
                self._append_tokens(sequence, plan, by_chunk[number], sampled, result)
        return result

    def abandon(self, plan: ScheduledBatch) -> None:
        """The device could not compute this plan, for which `advance` was called: its requests end."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_steps_in_flight -= 1
            sequence.num_output_placeholders -= chunk.is_last
            if sequence.state is SequenceState.FINISHED:
                self._table.reclaim(sequence)

    def spare_tokens_per_s(self) -> float:
        """Of prompts, beside those who write and as fast as all of them were promised; 0: not at all."""
        step_time_model = self._step_time_model
        decoding = [s for s in self._table.running if s.num_uncomputed_tokens == 1]
        if not decoding:
            return step_time_model.prefill_tokens_per_s
        itl_slos_s = [s.request.work.itl_s for s in decoding]
        if None in itl_slos_s or not step_time_model.meets_itl_slos(itl_slos_s):
            return 0.0
        chunk_budget = self._chunk_budget(decoding, self._table.limits.max_num_batched_tokens - len(decoding))
        return step_time_model.tokens_per_s(chunk_budget, len(decoding))

    def _chunk_budget(self, decoding: list[Sequence], budget: int) -> int:
        """Of prompts beside `decoding`, at most `budget`."""
        chunk_budget = self._step_time_model.chunk_budget([s.request.work.itl_s for s in decoding])
        return budget if chunk_budget is None else min(chunk_budget, budget)

    def _fits_max_loras(self, sequence: Sequence) -> bool:
        """Whether its adapter has a place in this step. If not, it waits for those before it."""
        adapter = sequence.request.work.lora
        if not adapter or adapter in self._step_loras:
            return True
        if len(self._step_loras) == self._table.limits.max_loras:
            return False
        self._step_loras.add(adapter)
        return True

    def _append_chunk(self, chunks: list[ScheduledChunk], sequence: Sequence, budget: int) -> int:
        length = min(sequence.num_uncomputed_tokens, budget)
        if sequence.request.wants_prompt_logprobs:
            length = min(length, PROMPT_LOGPROBS_CHUNK)
        is_last = length == sequence.num_uncomputed_tokens
        self._table.num_scheduled_prompt_tokens += length
        chunks.append(ScheduledChunk(sequence, sequence.num_computed_tokens, length, is_last))
        return length

    def _allocate_next_block(self, sequence: Sequence) -> bool:
        """A block for the next token; False if the sequence itself had to give way."""
        table = self._table
        if sequence.num_computed_tokens < len(sequence.blocks) * table.limits.block_tokens:
            return True
        while (block := table.pool.allocate(1)) is None:
            # Blocks of a `prefill` request may be read by a copy at this moment: those never move.
            candidates = [s for s in table.running + table.ready if s.request.mode != "prefill"]
            victim = max(candidates, key=lambda s: s.key)
            table.preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += block
        return True

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Gives the first waiting sequence its blocks and a slot, or remembers why not. It gets the slot only later if
        some of its prefix must come from the host tier first."""
        table = self._table
        pool, block_tokens = table.pool, table.limits.block_tokens
        if not table.has_free_slot or self._is_still_blocked(sequence):
            return False
        request = sequence.request
        request.prompt_logprobs = []  # those of a preempted attempt are computed again
        num_tokens = len(sequence.token_ids)
        sequence.extend_block_hashes(num_tokens // block_tokens, block_tokens)
        # At least the last token is computed: its logits are needed.
        reusable = [] if request.wants_prompt_logprobs else sequence.block_hashes[: (num_tokens - 1) // block_tokens]
        prefix = pool.find(reusable)
        if len(prefix) * block_tokens < request.num_image_prefix_tokens:
            table.pop_waiting()
            self.requests_missing_images.append(request)
            return False
        needed = table.num_blocks_for(num_tokens) - len(prefix)
        reserve = pool.num_total // 100 if table.running else 0
        if pool.num_free - pool.num_taken(prefix) - needed < reserve:
            self._blocked = _Blocked(sequence, pool.num_free, bool(table.running))
            return False
        cached = pool.take(prefix)
        fresh = pool.allocate(needed)
        assert fresh is not None
        sequence.blocks = cached + fresh
        sequence.num_registered_blocks = len(cached)
        sequence.num_computed_tokens = len(cached) * block_tokens
        if request.started_at is None:
            request.started_at = now
            request.cached_tokens = sequence.num_computed_tokens
            request.host_tokens = prefix.num_host * block_tokens
            self.num_prefix_query_tokens += num_tokens
            self.num_prefix_hit_tokens += request.cached_tokens - request.host_tokens
            self.num_host_hit_tokens += request.host_tokens
        self._blocked = None
        table.pop_waiting()
        if prefix.num_host:
            table.start_loading(sequence)
        else:
            table.add_to_batch(sequence)
        return True

    def _is_still_blocked(self, head: Sequence) -> bool:
        """Nothing has changed since `head` found too little memory, so it need not be tried again."""
        blocked = self._blocked
        if blocked is None or blocked.head is not head or self._table.pool.num_free > blocked.num_free:
            return False
        return blocked.was_running == bool(self._table.running)

    def _register_full_blocks(self, sequence: Sequence) -> None:
        block_tokens = self._table.limits.block_tokens
        known, full = (
            sequence.num_registered_blocks,
            min(sequence.num_computed_tokens, len(sequence.token_ids)) // block_tokens,
        )
        if known < full:
            sequence.extend_block_hashes(full, block_tokens)
            self._table.pool.register(sequence.block_hashes[known:full], sequence.blocks[known:full])
            sequence.num_registered_blocks = full

    def last_chunk_blocks(self, plan: ScheduledBatch) -> list[CompletedBlocks]:
        """What `advance` will report of `prefill` requests whose last chunk this is."""
        last = [chunk for chunk in plan.chunks if chunk.is_last and chunk.sequence.request.mode == "prefill"]
        return [self._completed_by(chunk.sequence, chunk.start + chunk.length) for chunk in last]

    def _publish(self, sequence: Sequence, result: StepResult) -> None:
        """Reports the blocks of a `prefill` request that are new to its owner, cached ones included."""
        completed = self._completed_by(sequence, sequence.num_computed_tokens)
        if completed.blocks:
            sequence.request.num_published += len(completed.blocks)
            result.completed.append(completed)

    def _completed_by(self, sequence: Sequence, num_computed_tokens: int) -> CompletedBlocks:
        """Not reported yet, when `num_computed_tokens` tokens are computed."""
        request, block_tokens = sequence.request, self._table.limits.block_tokens
        full = num_computed_tokens // block_tokens
        block_hashes = sequence.block_hashes[request.num_published : full]
        if num_computed_tokens == len(sequence.token_ids) and num_computed_tokens % block_tokens:
            parent = sequence.block_hashes[full - 1] if full else None
            tail = sequence.token_ids[full * block_tokens :]
            work, at = request.work, full * block_tokens
            block_hashes = block_hashes + hash_blocks(
                work.root, tail, block_tokens, parent=parent, media=work.media, start=at
            )
        blocks = sequence.blocks[request.num_published : request.num_published + len(block_hashes)]
        named = [NamedBlock(name, block) for name, block in zip(block_hashes, blocks, strict=True)]
        return CompletedBlocks(request.work.request_id, named)

    def _report_first(self, request: Request, now: float, result: StepResult) -> None:
        if request.is_first_reported or request.started_at is None:
            return
        request.is_first_reported = True
        wanted = request.work.sampling.prompt_logprobs is not None
        result.first.append(
            FirstTokenInfo(
                request_id=request.work.request_id,
                queue_s=request.started_at - request.arrived_at,
                prefill_s=now - request.started_at,
                cached_tokens=request.cached_tokens,
                host_tokens=request.host_tokens,
                prompt_logprobs=[None, *request.prompt_logprobs] if wanted else None,
            )
        )

    def _append_tokens(
        self, sequence: Sequence, plan: ScheduledBatch, rows: list[int], sampled: ModelRunnerOutput, result: StepResult
    ) -> None:
        """The chosen tokens of one chunk: several when the trunk of n > 1 sequences reached its end."""
        request, table = sequence.request, self._table
        chosen: dict[int, int] = {}
        generated = sequence.num_generated
        for row in rows:
            index, token = plan.rows[row].index, sampled.token_ids[row]
            if request.unstarted and index not in request.unstarted:
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
            table.remove_from_batch(sequence)
            sequence.state = SequenceState.AWAITING_FETCH
            request.unstarted = []
            result.held.append(request.work.request_id)
        elif request.unstarted:
            table.start_decoding(sequence, chosen)
        elif result.tokens[-1].finish_reason is not None:
            table.finish(sequence)
        else:
            sequence.token_ids.append(chosen[sequence.index])


def _sample_rows(chunks: list[ScheduledChunk]) -> list[SampleRow]:
    rows: list[SampleRow] = []
    for number, chunk in enumerate(chunks):
        if chunk.is_last:
            sequence = chunk.sequence
            if sequence.request.unstarted:
                rows += [SampleRow(number, sequence, index) for index in sequence.request.unstarted]
            else:
                rows.append(SampleRow(number, sequence, sequence.index))
    return rows
