"""Decides what the next step computes, and applies the results of a step to the requests. Pure: `now` is passed in.

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
from baton_serve.contracts.messages import ErrorCode, TokenLogprobs
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
    """Compute `length` tokens of a sequence from position `start` on."""

    sequence: Sequence
    start: int
    length: int
    is_last: bool
    """Whether the chunk reaches the end of the sequence, so that a token is sampled after it."""


class SampleRow(Struct, frozen=True, gc=False):
    """Sample one token from the logits of the last row of chunk number `chunk`, for sequence `index` of the request."""

    chunk: int
    sequence: Sequence
    index: int


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The work of one step. Made by `Scheduler.schedule` and executed by the model runner."""

    chunks: list[ScheduledChunk]
    rows: list[SampleRow]

    def size(self) -> BatchSize:
        """Return the numbers of sequences and tokens."""
        return BatchSize(len(self.chunks), sum([chunk.length for chunk in self.chunks]))

    def blocks(self, block_tokens: int) -> Iterator[int]:
        """Iterate over all blocks that the step reads or writes; shared ones appear more than once."""
        for chunk in self.chunks:
            yield from chunk.sequence.blocks[: -(-(chunk.start + chunk.length) // block_tokens)]
            yield from chunk.sequence.source_blocks


@dataclass(frozen=True, slots=True)
class RowFailure:
    """The reason why no token could be sampled for a row."""

    message: str
    code: ErrorCode


@dataclass(slots=True)
class ModelRunnerOutput:
    """The results of a step. `token_ids` and `logprobs` are in the order of `ScheduledBatch.rows`."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By chunk number: the logprobs of the token after each row, without the prompt's last row."""
    failed: dict[int, RowFailure] = field(default_factory=dict)
    """By row number: the reason why no token was sampled. Ignore `token_ids` of these rows."""


class AdapterWeights(Protocol):
    """The weights of LoRA adapters, as steps need them: `engine.model.lora.loaded.LoadedAdapters`."""

    def use(self, fingerprint: str, in_step: Collection[str]) -> bool: ...
    def wait(self) -> bool: ...
    def take_failures(self) -> Mapping[str, str]: ...


class Scheduler:
    """Schedules the requests of one engine. Engine thread only."""

    def __init__(
        self,
        table: RequestTable,
        step_time_model: StepTimeModel | None = None,
        adapters: AdapterWeights | None = None,
    ) -> None:
        """`step_time_model` is updated by the engine after each step. Without one, only the configured limits bound a
        step. Without `adapters`, the weights of every adapter are on the device."""
        self._table = table
        self.adapters = adapters
        self._step_time_model = step_time_model or StepTimeModel()
        self.admission = PromptAdmission(table)
        self._step_loras: set[str] = set()
        """LoRA adapters of the step that is being scheduled."""
        self._had_prompts = False
        """True if the last step computed prompts. It is used only if steps must not mix."""

    def has_work(self) -> bool:
        """Return whether `schedule` may find something to compute, or loading sequences are to be polled."""
        table = self._table
        if table.running or table.loading or (table.ready and table.has_free_slot):
            return True
        head = table.peek_waiting()
        return head is not None and table.has_free_slot and not self.admission.is_still_blocked(head)

    def schedule(self, now: float) -> ScheduledBatch:
        """Choose the work of the next step, and allocate its blocks."""
        table = self._table
        table.promote_ready()
        table.sort_running()
        if table.limits.mixes_prompts:
            return self._schedule(now, decodes=True, prompts=True)
        return self._schedule_in_turns(now)

    def _schedule_in_turns(self, now: float) -> ScheduledBatch:
        """Schedule a step of one kind: sequences with one new token, or longer chunks of prompts. The kinds take turns
        if there is work of both.
        """
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
        """Schedule a step with the work of these kinds."""
        self._step_loras.clear()
        decoding, unfinished = self._pick_running(decodes=decodes, prompts=prompts)
        chunks = [ScheduledChunk(s, s.num_computed_tokens, 1, True) for s in decoding] if decodes else []
        budget = self._table.limits.max_num_batched_tokens - len(chunks)
        if prompts:
            # The chunk budget protects decoding sequences only if prompts can enter this step.
            if decoding and (unfinished or self._table.peek_waiting() is not None):
                budget = min(budget, self._chunk_budget(decoding, budget))
            self._append_prompts(chunks, unfinished, budget, now)
        return ScheduledBatch(chunks, _sample_rows(chunks))

    def _pick_running(self, *, decodes: bool, prompts: bool) -> tuple[list[Sequence], list[Sequence]]:
        """Return the running sequences that decode, and those whose prompts are not finished. With `decodes`, the
        former get the blocks for their next tokens, for which others may be preempted.
        """
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
        """Add chunks of prompts, of `budget` tokens in all: of running sequences, then of waiting ones."""
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
            if head.state is SequenceState.RUNNING:
                budget -= self._append_chunk(chunks, head, budget)

    def schedule_ahead(self, now: float) -> ScheduledBatch | None:
        """Choose a step to launch before the tokens of the previous step are known, or return None if there is none.

        Sequences are assumed to continue unless their maximum length ends them. The result is also None if a sequence
        would have to be preempted, because the step in flight still writes to its blocks.
        """
        block_tokens = self._table.limits.block_tokens
        active = self._table.running + self._table.ready
        # Each sequence whose last block is full needs one more.
        num_growing = sum(
            s.num_computed_tokens == len(s.blocks) * block_tokens and not _must_await(s, self._table.limits)
            for s in active
        )
        if num_growing > self._table.pool.num_free:
            return None
        plan = self.schedule(now)
        return plan if plan.chunks else None

    def advance(self, plan: ScheduledBatch) -> StepResult:
        """Apply what is known about a step before its tokens are; the device may still compute it.

        Return the completed blocks of `prefill` requests.
        """
        result = StepResult()
        block_tokens = self._table.limits.block_tokens
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens += chunk.length
            sequence.num_steps_in_flight += 1
            if sequence.num_computed_tokens // block_tokens > sequence.num_registered_blocks:
                self._register_full_blocks(sequence)
            self._table.checkpoints.save(sequence)
            self._table.sources.finish_encoding(sequence)
            if sequence.request.mode == "prefill":
                self._publish(sequence, result)
            sequence.num_output_placeholders += chunk.is_last
        return result

    def apply(
        self, plan: ScheduledBatch, sampled: ModelRunnerOutput, now: float, *, advanced: StepResult | None = None
    ) -> StepResult:
        """Apply the results of a step, in which everything in `plan` was computed.

        `advanced` is the return value of `advance` if it was called before. Sequences that have ended since the launch
        get no token, and their completed blocks are not reported.
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
                _report_first(sequence.request, now, result)
                self._append_tokens(sequence, plan, by_chunk[number], sampled, result)
        return result

    def abandon(self, plan: ScheduledBatch) -> None:
        """Undo `advance` for a step that the device could not compute. The caller fails the requests of the step."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_steps_in_flight -= 1
            sequence.num_output_placeholders -= chunk.is_last
            if sequence.state is SequenceState.FINISHED:
                self._table.reclaim(sequence)

    def spare_tokens_per_s(self) -> float:
        """Return the prefill headroom: prompt tokens per second that can be computed beside the decoding sequences
        without violating their ITL SLOs. 0 if a decoding sequence has no SLO or they are violated already."""
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
        """Return how many prompt tokens a step may have beside the `decoding` sequences, at most `budget`."""
        chunk_budget = self._step_time_model.chunk_budget([s.request.work.itl_s for s in decoding])
        return budget if chunk_budget is None else min(chunk_budget, budget)

    def _fits_max_loras(self, sequence: Sequence) -> bool:
        """Return whether the sequence's LoRA adapter fits into this step, and reserve its place.

        If not, the sequence waits for a step with other adapters, or until the weights of its own have been read.
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
        """Add a chunk of at most `budget` tokens and return its length; all of `budget` if no other may follow."""
        length = min(sequence.num_uncomputed_tokens, budget)
        if sequence.request.wants_prompt_logprobs:
            length = min(length, PROMPT_LOGPROBS_CHUNK)
        length = self._table.checkpoints.cut(sequence, length)
        length = _around_images(sequence, length, chunks, self._table.limits)
        if not length:  # the image needs a step of its own, which later sequences must not fill
            return budget
        # Kernels do not know whether a single token is the end of a prompt or the next one of an answer.
        is_alone = length == 1 and not self._table.limits.mixes_prompts
        if is_alone and chunks:
            return budget
        is_last = length == sequence.num_uncomputed_tokens
        self._table.num_scheduled_prompt_tokens += length
        chunks.append(ScheduledChunk(sequence, sequence.num_computed_tokens, length, is_last))
        return budget if is_alone else length

    def _allocate_next_block(self, sequence: Sequence) -> bool:
        """Allocate a block for the next token if needed. Return False if the sequence itself was preempted."""
        table = self._table
        if sequence.num_computed_tokens < len(sequence.blocks) * table.limits.block_tokens:
            return True
        while (block := table.pool.allocate(1)) is None:
            # Never preempt a `prefill` request: a transport may be reading its blocks at this moment.
            candidates = [s for s in table.running + table.ready if s.request.mode != "prefill"]
            # The least important one has the largest sort key.
            victim = max(candidates, key=lambda s: s.sort_key)
            table.preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += block
        return True

    def _register_full_blocks(self, sequence: Sequence) -> None:
        """Register the hashes of blocks that are now full, so that other prompts can share them."""
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
        """Return the blocks that `advance` will report for requests of mode `prefill` whose last chunk is in `plan`.

        Blocks of earlier chunks that were reported already are left out.
        """
        last = [chunk for chunk in plan.chunks if chunk.is_last and chunk.sequence.request.mode == "prefill"]
        block_tokens = self._table.limits.block_tokens
        return [_completed_by(chunk.sequence, chunk.start + chunk.length, block_tokens) for chunk in last]

    def _publish(self, sequence: Sequence, result: StepResult) -> None:
        """Report the completed blocks of a `prefill` request that were not reported yet, including cached ones."""
        completed = _completed_by(sequence, sequence.num_computed_tokens, self._table.limits.block_tokens)
        sequence.request.num_published += len(completed.blocks)
        if sequence.handoff_blocks and sequence.num_computed_tokens == len(sequence.token_ids):
            last = completed.blocks[-1].name if completed.blocks else sequence.block_hashes[-1]
            completed.blocks.extend(self._table.checkpoints.save_handoff(sequence, last))
        completed.blocks[:0] = self._table.sources.published(sequence)
        if completed.blocks:
            result.completed.append(completed)

    def _append_tokens(
        self, sequence: Sequence, plan: ScheduledBatch, rows: list[int], sampled: ModelRunnerOutput, result: StepResult
    ) -> None:
        """Process the sampled tokens of one chunk: several if the parent of n > 1 sequences has reached the end of the
        prompt."""
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
    """Return the blocks that are complete with `num_computed_tokens` tokens and were not reported yet."""
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


def _must_await(sequence: Sequence, limits: SchedulerConfig) -> bool:
    """Return whether a sequence cannot be scheduled yet, because its tokens are being computed.

    Stages of a pipeline read only tokens that the host knows.
    """
    is_staged = limits.num_stages > 1
    return sequence.must_await_tokens or (is_staged and sequence.num_output_placeholders > 0)


def _decode_quota(table: RequestTable) -> int:
    """Return how many sequences may decode in the next step: an equal part for each stage of a pipeline, so that
    all of them have work.
    """
    if table.limits.num_stages == 1:
        return table.limits.max_num_seqs
    num_decoding = sum(sequence.num_uncomputed_tokens <= 1 for sequence in table.running)
    return max(1, -(-num_decoding // table.limits.num_stages))


def _around_images(sequence: Sequence, length: int, chunks: list[ScheduledChunk], limits: SchedulerConfig) -> int:
    """Return the length of a chunk that ends inside no image: shorter, or if it begins with the image, longer.

    Return 0 if the image has more tokens than the other `chunks` leave room for in the step. Most models may divide
    images: for them the length stays.
    """
    if not limits.keeps_images_whole:
        return length
    room = limits.max_num_batched_tokens - sum([chunk.length for chunk in chunks])
    start = sequence.num_computed_tokens
    for span in within(sequence.request.work.media, start, start + length):
        if start + length >= span.end:
            continue
        if span.start > start:
            return span.start - start
        return span.end - start if span.end - start <= room else 0
    return length


def _report_first(request: Request, now: float, result: StepResult) -> None:
    """Add the report of a request's first token, once."""
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
    """Return one row for each token to sample: a parent sequence needs one for each sequence that it starts."""
    rows: list[SampleRow] = []
    for number, chunk in enumerate(chunks):
        if chunk.is_last:
            sequence = chunk.sequence
            if sequence.request.unstarted:
                rows += [SampleRow(number, sequence, index) for index in sequence.request.unstarted]
            else:
                rows.append(SampleRow(number, sequence, sequence.index))
    return rows
