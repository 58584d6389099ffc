"""Decides what the next step computes: token budget, decodes, chunked prefill, which sequence is preempted; applies the
results of steps. Pure: `now` is passed in.

Decoding sequences come first, with one token each. The rest of the token budget goes to prompts, in chunks that let the
decoding sequences keep their inter-token SLOs (`engine.core.step_time_model`). If a decoding sequence needs a block and
none is free, the least important sequence is preempted and recomputed later. Waiting sequences enter the batch through
`engine.core.prompt_admission`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Struct

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.media import within
from baton_serve.contracts.messages import ErrorCode, TokenLogprobs, Work
from baton_serve.engine.core.outputs import (
    BatchSize,
    CompletedBlocks,
    FirstTokenInfo,
    NamedBlock,
    SequenceOutput,
    StepResult,
)
from baton_serve.engine.core.prompt_admission import PromptAdmission
from baton_serve.engine.core.request_table import RequestTable, SchedulerConfig
from baton_serve.engine.core.sequence import Request, Sequence, SequenceState
from baton_serve.engine.core.step_time_model import StepTimeModel

PROMPT_LOGPROBS_CHUNK = 256
"""Maximum prompt tokens per chunk of a request with prompt logprobs. They need the logits of every row, each
`vocab_size` wide, and larger chunks could exceed the device's memory."""


class ScheduledChunk(Struct, frozen=True, gc=False):
    """One sequence's part of a step: compute `length` of its tokens, from token `start` on."""

    sequence: Sequence
    start: int
    length: int
    is_last: bool
    """Whether the chunk reaches the end of the sequence, so that a token is sampled after it."""
    inner: int = 0
    """After how many of its tokens the step also stores the recurrent states, in row `inner_row`; 0: not at all, and
    the row has no meaning."""
    inner_row: int = -1


class SampleRow(Struct, frozen=True, gc=False):
    """One token to sample in a step: from the logits of the last token of chunk number `chunk`, for the sequence with
    index `index` of the same request."""

    chunk: int
    sequence: Sequence
    index: int


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The work of one step: the chunks to compute and the tokens to sample. `Scheduler.schedule` makes it and the model
    runner executes it."""

    chunks: list[ScheduledChunk]
    rows: list[SampleRow]

    def size(self) -> BatchSize:
        """Return how many sequences and tokens this step computes."""
        return BatchSize(len(self.chunks), sum([chunk.length for chunk in self.chunks]))

    def blocks(self, block_tokens: int) -> Iterator[int]:
        """Iterate over the indexes of all KV blocks that the step reads or writes; a block that several sequences share
        appears several times. `block_tokens` is the size of a block."""
        for chunk in self.chunks:
            yield from chunk.sequence.first_kv_blocks(-(-(chunk.start + chunk.length) // block_tokens))
            yield from chunk.sequence.source_blocks


@dataclass(frozen=True, slots=True)
class RowFailure:
    """The reason why no token could be sampled for a `SampleRow`."""

    message: str
    code: ErrorCode


@dataclass(slots=True)
class ModelRunnerOutput:
    """The results of a step: the sampled tokens and their logprobs, in the order of `ScheduledBatch.rows`."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By chunk number: the logprobs of the token after each row, without the prompt's last row."""
    failed: dict[int, RowFailure] = field(default_factory=dict)
    """By row number: the reason why no token was sampled. Ignore `token_ids` of these rows."""


class AdapterWeights(Protocol):
    """The LoRA adapters as the scheduler sees them: it asks whether the weights of an adapter are on the device, so
    that a step can use it. `LoadedAdapters` implements this interface."""

    def use(self, fingerprint: str, in_step: Collection[str]) -> bool: ...
    def wait(self) -> bool: ...
    def take_failures(self) -> Mapping[str, str]: ...


class Scheduler:
    """Decides what each step of an engine computes, and applies the results of steps to its sequences. Only the
    engine's thread may call it."""

    def __init__(
        self,
        table: RequestTable,
        step_time_model: StepTimeModel | None = None,
        adapters: AdapterWeights | None = None,
    ) -> None:
        """`step_time_model` predicts how long steps take; the engine updates it after each step. If it is None, only
        the configured limits bound a step. If `adapters` is None, the weights of every LoRA adapter are always on the
        device."""
        self._table = table
        self.adapters = adapters
        self._step_time_model = step_time_model or StepTimeModel()
        self.admission = PromptAdmission(table)
        self._step_loras: set[str] = set()
        """LoRA adapters of the step that is being scheduled."""
        self._had_prompts = False
        """True if the last step computed prompts. It is used only if steps must not mix."""
        self._stage_steps = StageSteps(table)

    def has_work(self) -> bool:
        """Return whether `schedule` may find something to compute, or sequences wait for copies from the host tier."""
        table = self._table
        if _can_run(table) or table.loading or (table.ready and table.has_free_slot):
            return True
        head = table.peek_waiting()
        return head is not None and table.has_free_slot and not self.admission.is_still_blocked(head)

    def schedule(self, now: float) -> ScheduledBatch:
        """Choose what the next step computes, and allocate the KV blocks for it; this may start waiting sequences and
        preempt running ones. `now` is in seconds of the monotonic clock."""
        table = self._table
        table.promote_ready()
        table.sort_running()
        if table.limits.mixes_prompts:
            return self._schedule(now, decodes=True, prompts=True)
        return self._schedule_in_turns(now)

    def _schedule_in_turns(self, now: float) -> ScheduledBatch:
        """Schedule a step that only decodes or only computes prompts, for kernels that cannot do both at once. Steps of
        the two kinds alternate if there is work for both."""
        if not self._had_prompts:
            batch = self._schedule(now, decodes=False, prompts=True)
            if batch.chunks:
                self._had_prompts = True
                return batch
        # Decoding sequences wait for at most one chunk, and prompts for one decode step.
        self._had_prompts = False
        batch = self._schedule(now, decodes=True, prompts=False)
        return batch if batch.chunks else self._schedule(now, decodes=False, prompts=True)

    def _schedule(self, now: float, *, decodes: bool, prompts: bool) -> ScheduledBatch:
        """Schedule a step that contains decoding sequences if `decodes` is set, and chunks of prompts if `prompts` is
        set."""
        self._step_loras.clear()
        decoding, unfinished = self._pick_running(decodes=decodes, prompts=prompts)
        chunks = [ScheduledChunk(s, s.num_computed_tokens, 1, True) for s in decoding] if decodes else []
        budget = self._table.limits.max_num_batched_tokens - len(chunks)
        if prompts:
            # The chunk budget protects decoding sequences only if prompts can enter this step.
            if decoding and (unfinished or self._table.peek_waiting() is not None):
                budget = min(budget, self._chunk_budget(decoding, budget))
            budget = min(budget, self._stage_steps.budget(unfinished))
            self._append_prompts(chunks, unfinished, budget, now)
        return ScheduledBatch(chunks, _sample_rows(chunks))

    def _pick_running(self, *, decodes: bool, prompts: bool) -> tuple[list[Sequence], list[Sequence]]:
        """Return two lists: the running sequences that decode in the next step, and the running sequences whose prompts
        are not finished. With `decodes`, each decoding sequence gets the block for its next token, for which others may
        be preempted."""
        decoding: list[Sequence] = []
        unfinished: list[Sequence] = []
        quota = _decode_quota(self._table)
        # Iterate over a copy: a preemption removes from `running`.
        for sequence in list(self._table.running):
            is_prompt = sequence.num_uncomputed_tokens > 1
            is_computed = prompts if is_prompt else decodes
            if _must_await(sequence, self._table.limits) or (not is_prompt and len(decoding) >= quota):
                continue
            if is_computed and not self._fits_max_loras(sequence):
                continue
            if is_prompt:
                unfinished.append(sequence)
            # RUNNING: a sequence before it may have preempted this one. The preempted sequence always sorts after the
            # one that needs the block, so it has no chunk in this step yet.
            elif sequence.state is SequenceState.RUNNING and (not decodes or self._allocate_next_block(sequence)):
                decoding.append(sequence)
        return decoding, unfinished

    def _append_prompts(
        self, chunks: list[ScheduledChunk], unfinished: list[Sequence], budget: int, now: float
    ) -> None:
        """Add chunks of prompts to a step, of at most `budget` tokens together: first of the running sequences
        `unfinished`, then of waiting ones, which start now."""
        table = self._table
        for sequence in unfinished:
            if budget > 0 and sequence.state is SequenceState.RUNNING:
                budget -= self._append_chunk(chunks, sequence, budget)
        while (
            budget > 0
            and (head := table.peek_waiting()) is not None
            and self._fits_max_loras(head)
            and self.admission.admit(head, now)
        ):
            # Its cached prefix may end behind the images that are here.
            if head.state is SequenceState.RUNNING and not head.must_await_image:
                budget -= self._append_chunk(chunks, head, budget)

    def schedule_ahead(self, now: float) -> ScheduledBatch | None:
        """Choose a step to launch before the tokens of the previous step are known. Return None if nothing can be
        computed yet.

        Sequences are assumed to continue unless their maximum length ends them. The result is also None if a sequence
        would have to be preempted, because the launched step still writes to its blocks.
        """
        active = self._table.running + self._table.ready
        # Each sequence whose last block is full needs one more.
        growing = [s for s in active if not _must_await(s, self._table.limits)]
        if sum(self._table.windows.num_for_next_token(s) for s in growing) > self._table.pool.num_free:
            return None
        plan = self.schedule(now)
        return plan if plan.chunks else None

    def advance(self, plan: ScheduledBatch) -> StepResult:
        """Apply what is known about a launched step before its tokens are sampled: the KV of its chunks counts as
        computed from now on.

        Return a result with the blocks of `prefill` requests that the step completes.
        """
        result = StepResult()
        block_tokens = self._table.limits.block_tokens
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens += chunk.length
            sequence.num_steps_in_flight += 1
            if sequence.num_computed_tokens // block_tokens > sequence.num_registered_blocks:
                self._register_full_blocks(sequence)
            self._table.checkpoints.save(sequence, chunk.start + chunk.inner if chunk.inner else 0, chunk.inner_row)
            self._table.sources.finish_encoding(sequence)
            if sequence.request.mode == "prefill":
                self._publish(sequence, result)
            sequence.num_output_placeholders += chunk.is_last
        return result

    def apply(
        self, plan: ScheduledBatch, sampled: ModelRunnerOutput, now: float, *, advanced: StepResult | None = None
    ) -> StepResult:
        """Apply the results `sampled` of a computed step: append the tokens to their sequences, and end sequences that
        are complete. Return the tokens and reports for the caller of the engine.

        `advanced` is the return value of `advance` if it was called for this step. Sequences that have ended since the
        launch get no token, and their completed blocks are not reported.
        """
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
                # `advance` of a step that ran ahead could not hash blocks whose last tokens were unknown then.
                self._register_full_blocks(sequence)
            # Steps that are still in flight see the tokens from the end of this chunk on, and what these see.
            self._table.windows.trim(sequence, chunk.start + chunk.length)
            if chunk.is_last:
                _report_first(sequence.request, now, result)
                self._append_tokens(sequence, plan, by_chunk[number], sampled, result)
        return result

    def abandon(self, plan: ScheduledBatch) -> None:
        """Undo `advance` for a step that the device could not compute, because it ran out of memory. The caller then
        fails the requests of the step."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_steps_in_flight -= 1
            sequence.num_output_placeholders -= chunk.is_last
            if sequence.state is SequenceState.FINISHED:
                self._table.reclaim(sequence)

    def spare_tokens_per_s(self) -> float:
        """Return the prefill headroom: how many prompt tokens per second can be computed beside the decoding sequences
        without violating their ITL SLOs. 0 if a decoding sequence has no SLO or if an SLO is violated already."""
        step_time_model = self._step_time_model
        decoding = [s for s in self._table.running if s.num_uncomputed_tokens == 1]
        if not decoding:
            return step_time_model.prefill_tokens_per_s
        itl_slos_s = [s.request.work.itl_s for s in decoding]
        if None in itl_slos_s or not step_time_model.meets_itl_slos(itl_slos_s):
            return 0.0
        limits = self._table.limits
        budget = min(limits.max_prompt_tokens, limits.max_num_batched_tokens - len(decoding))
        chunk_budget = self._chunk_budget(decoding, budget)
        return step_time_model.tokens_per_s(chunk_budget, len(decoding))

    def _chunk_budget(self, decoding: list[Sequence], budget: int) -> int:
        """Return how many prompt tokens may be computed in the same step as the sequences `decoding` without violating
        their ITL SLOs, at most `budget`."""
        chunk_budget = self._step_time_model.chunk_budget([s.request.work.itl_s for s in decoding])
        return budget if chunk_budget is None else min(chunk_budget, budget)

    def _fits_max_loras(self, sequence: Sequence) -> bool:
        """Return whether this step can compute the sequence with its LoRA adapter, and if so count the adapter towards
        `max_loras`.

        If not, the sequence waits: for a step with fewer other adapters, or until the weights of its adapter are on the
        device.
        """
        adapter = sequence.request.work.lora
        if not adapter or adapter in self._step_loras:
            return True
        if len(self._step_loras) == self._table.limits.max_loras:
            return False
        if self.adapters is not None and not self.adapters.use(adapter, self._step_loras):
            return False
        self._step_loras.add(adapter)
        return True

    def _append_chunk(self, chunks: list[ScheduledChunk], sequence: Sequence, budget: int) -> int:
        """Add a chunk of the sequence's prompt to `chunks`, of at most `budget` tokens. Return by how many tokens the
        budget is used up: the chunk's length, or all of `budget` if no further chunk may be added to this step."""
        start, length = sequence.num_computed_tokens, min(sequence.num_ready_tokens, budget)
        length = min(length, PROMPT_LOGPROBS_CHUNK) if sequence.request.wants_prompt_logprobs else length
        length, inner, row = self._table.checkpoints.cut(sequence, length, sum([chunk.inner > 0 for chunk in chunks]))
        length = _around_whole_parts(sequence, length, chunks, self._table.limits)
        if length and (room := self._table.windows.grow(sequence, start + length) - start) < length:
            # Too few free blocks for layers with a window: a shorter chunk, if it need not hold a whole image.
            length = _around_whole_parts(sequence, room, chunks, self._table.limits) if room else 0
            length = length if length <= room else 0
        if not length:  # the image or the window needs a step of its own, which later sequences must not fill
            return budget
        # Kernels do not know whether a single token is the end of a prompt or the next one of an answer.
        is_alone = length == 1 and not self._table.limits.mixes_prompts
        if is_alone and chunks:
            return budget
        is_last = length == sequence.num_uncomputed_tokens
        self._table.num_scheduled_prompt_tokens += length
        # The chunk may have become too short for its inner checkpoint.
        chunks.append(ScheduledChunk(sequence, start, length, is_last, inner if inner < length else 0, row))
        return budget if is_alone else length

    def _allocate_next_block(self, sequence: Sequence) -> bool:
        """Give a sequence a block for its next token if its last block is full. If no block is free, preempt others.
        Return False if the sequence itself was preempted."""
        table = self._table
        if not (num_needed := table.windows.num_for_next_token(sequence)):
            return True
        while (fresh := table.pool.allocate(num_needed)) is None:
            # Never preempt a `prefill` request: a transport may be reading its blocks at this moment.
            candidates = [s for s in table.running + table.ready if s.request.mode != "prefill"]
            # The least important one has the largest sort key.
            victim = max(candidates, key=lambda s: s.sort_key, default=None)
            if victim is not None:
                table.preempt(victim)
            if victim is None or victim is sequence:
                return False
        table.windows.append(sequence, fresh)
        return True

    def _register_full_blocks(self, sequence: Sequence) -> None:
        """Add the blocks of a sequence that are full now to the prefix cache, so that other prompts can share them."""
        block_tokens = self._table.limits.block_tokens
        known, full = (
            sequence.num_registered_blocks,
            min(sequence.num_computed_tokens, len(sequence.token_ids)) // block_tokens,
        )
        if known < full:
            sequence.extend_block_hashes(full, block_tokens)
            self._table.pool.register(sequence.block_hashes[known:full], sequence.blocks[known:full])
            self._table.windows.register(sequence, known, full)
            sequence.num_registered_blocks = full

    def last_chunk_blocks(self, plan: ScheduledBatch) -> list[CompletedBlocks]:
        """Return the blocks that `advance(plan)` will report as completed, for `prefill` requests whose prompt ends in
        this step.

        Blocks that earlier steps have reported are left out.
        """
        last = [chunk for chunk in plan.chunks if chunk.is_last and chunk.sequence.request.mode == "prefill"]
        block_tokens = self._table.limits.block_tokens
        return [_completed_by(chunk.sequence, chunk.start + chunk.length, block_tokens) for chunk in last]

    def _publish(self, sequence: Sequence, result: StepResult) -> None:
        """Add to `result` the completed blocks of a `prefill` request that were not reported yet, including blocks from
        the prefix cache."""
        completed = _completed_by(sequence, sequence.num_computed_tokens, self._table.limits.block_tokens)
        published = sequence.request.num_published
        sequence.request.num_published += len(completed.blocks)
        completed.blocks[:] = self._table.windows.with_seen(sequence, completed.blocks, published)
        if sequence.handoff_blocks and sequence.num_computed_tokens == len(sequence.token_ids):
            last = completed.blocks[-1].name if completed.blocks else sequence.block_hashes[-1]
            completed.blocks.extend(self._table.checkpoints.save_handoff(sequence, last))
        completed.blocks[:0] = self._table.sources.published(sequence)
        if completed.blocks:
            result.completed.append(completed)

    def _append_tokens(
        self, sequence: Sequence, plan: ScheduledBatch, rows: list[int], sampled: ModelRunnerOutput, result: StepResult
    ) -> None:
        """Append the tokens that were `sampled` after one chunk to their sequences, and add them to `result`. `rows`
        are the numbers of these tokens in `plan.rows`: several if the prompt of a request with n > 1 has ended,
        otherwise one."""
        request, table = sequence.request, self._table
        chosen: dict[int, int] = {}
        num_generated = sequence.num_generated
        for row in rows:
            index, token = plan.rows[row].index, sampled.token_ids[row]
            if request.unstarted and index not in request.unstarted:
                # This sequence was cancelled after the step was launched.
                continue
            chosen[index] = token
            stop = request.check_stop(num_generated + 1, token)
            logprobs = sampled.logprobs[row] if sampled.logprobs is not None else None
            result.tokens.append(
                SequenceOutput(
                    request_id=request.work.request_id,
                    sequence=index,
                    position=num_generated,
                    token_ids=[token],
                    logprobs=None if logprobs is None else [logprobs],
                    finish_reason=stop.reason if stop else None,
                    stop_token_id=stop.stop_token_id if stop else None,
                )
            )
        if request.mode == "prefill":
            table.remove_from_batch(sequence)
            sequence.state = SequenceState.AWAITING_FETCH
            request.unstarted = []
            # The blocks stay owned until the decode instance has fetched them.
            result.held.append(request.work.request_id)
        elif request.unstarted:
            table.start_decoding(sequence, chosen)
        elif result.tokens[-1].finish_reason is not None:
            table.finish(sequence)
        else:
            sequence.token_ids.append(chosen[sequence.index])


def _completed_by(sequence: Sequence, num_computed_tokens: int, block_tokens: int) -> CompletedBlocks:
    """Return the KV blocks of a sequence that are complete when `num_computed_tokens` of its tokens are computed,
    without the blocks that were reported before. The last block of a prompt counts as complete even if it is partly
    filled."""
    request = sequence.request
    full = num_computed_tokens // block_tokens
    block_hashes = sequence.block_hashes[request.num_published : full]
    if num_computed_tokens == len(sequence.token_ids) and num_computed_tokens % block_tokens:
        # The last block of a prompt is handed off even if it is partly filled; it has a hash only for the transfer.
        parent = sequence.block_hashes[full - 1] if full else None
        tail = sequence.token_ids[full * block_tokens :]
        work, at = request.work, full * block_tokens
        block_hashes += hash_blocks(work.root, tail, block_tokens, parent=parent, media=work.media, start=at)
    blocks = sequence.blocks[request.num_published : request.num_published + len(block_hashes)]
    named = [NamedBlock(name, block) for name, block in zip(block_hashes, blocks, strict=True)]
    return CompletedBlocks(request.work.request_id, named)


def _can_run(table: RequestTable) -> bool:
    """Return whether a sequence of the batch has what its next token needs."""
    return any(not sequence.must_await_image for sequence in table.running)


def _must_await(sequence: Sequence, limits: SchedulerConfig) -> bool:
    """Return whether a sequence cannot be part of the next step, because it needs an image that has not come yet, or
    tokens that the device is still computing.

    With pipeline parallelism the step needs all of them: a stage gets its tokens from the host.
    """
    is_staged = limits.num_stages > 1
    must_await = sequence.must_await_image or sequence.must_await_tokens
    return must_await or (is_staged and sequence.num_output_placeholders > 0)


def _decode_quota(table: RequestTable) -> int:
    """Return how many sequences may decode in the next step. With pipeline parallelism it is an equal share for each
    stage, so that all stages have work."""
    if table.limits.num_stages == 1:
        return table.limits.max_num_seqs
    num_decoding = sum(sequence.num_uncomputed_tokens <= 1 for sequence in table.running)
    return max(1, -(-num_decoding // table.limits.num_stages))


class StageSteps:
    """Chooses how many prompt tokens a step may have, so that all stages of a pipeline have work.

    Steps do not become smaller as long as there are prompts. Stages are idle for as long as the largest step takes to
    pass through one of them, whether it is the first step or a later one, so that smaller steps behind it gain nothing.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._largest = 0
        """The most prompt tokens that a step could have since there was a step without any prompt to compute."""

    def budget(self, unfinished: list[Sequence]) -> int:
        """Return how many prompt tokens the next step may have. `unfinished` are the running sequences whose prompts
        are not finished. Call it for each step, even without a prompt to compute."""
        limits = self._table.limits
        if limits.num_stages == 1:
            return limits.max_num_batched_tokens
        # Whole prompts are counted, not what is left of them, which the steps in flight do not change.
        total = sum(len(sequence.token_ids) - sequence.request.cached_tokens for sequence in unfinished)
        for sequence in self._table.iter_waiting():
            # More tokens make no difference, and the queue may be long.
            if limits.prompt_tokens_for(total) == limits.max_prompt_tokens:
                break
            total += len(sequence.token_ids)
        if not unfinished and self._table.peek_waiting() is None:
            self._largest = 0
        self._largest = max(self._largest, limits.prompt_tokens_for(total))
        return self._largest


def whole_parts(work: Work, start: int, end: int, limits: SchedulerConfig) -> list[tuple[int, int]]:
    """Return (start, end) of each part of a prompt whose tokens attend to each other in both directions: its images, or
    all of it, as far as one of their tokens lies among the tokens from `start` to `end` (exclusive). Most models have
    no such parts."""
    if limits.has_bidirectional_prompts:
        return [(0, work.bidirectional_tokens)] if start < work.bidirectional_tokens else []
    return [(span.start, span.end) for span in within(work.media, start, end)] if limits.keeps_images_whole else []


def _around_whole_parts(sequence: Sequence, length: int, chunks: list[ScheduledChunk], limits: SchedulerConfig) -> int:
    """Return the length in tokens of a sequence's next chunk, changed so that the chunk ends inside no image or prompt
    that one step must compute: shorter, or longer if the chunk begins with it. `length` is the wanted length, and
    `chunks` are already in the step.

    Return 0 if the step does not have room for it. For models without such parts `length` is returned.
    """
    start = sequence.num_computed_tokens
    if not (parts := whole_parts(sequence.request.work, start, start + length, limits)):
        return length
    room = limits.max_num_batched_tokens - sum([chunk.length for chunk in chunks])
    for first, end in parts:
        if start + length >= end:
            continue
        if first > start:
            return first - start
        return end - start if end - start <= room else 0
    return length


def _report_first(request: Request, now: float, result: StepResult) -> None:
    """Add to `result` how the time to the request's first token was spent, unless this was reported before or its
    prompt was computed on another instance."""
    # A request whose blocks came from another instance has computed no prompt here.
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


def _sample_rows(chunks: list[ScheduledChunk]) -> list[SampleRow]:
    """Return one row for each token that is sampled in a step with these chunks: one for each chunk that ends its
    sequence, or n for the prompt of a request with n sequences."""
    rows: list[SampleRow] = []
    for number, chunk in enumerate(chunks):
        if chunk.is_last:
            sequence = chunk.sequence
            if sequence.request.unstarted:
                rows += [SampleRow(number, sequence, index) for index in sequence.request.unstarted]
            else:
                rows.append(SampleRow(number, sequence, sequence.index))
    return rows
