"""Keeps every request and its state (waiting, running, …), and frees or keeps KV blocks on preemption, cancel and
finish; forks for `n`.

This module applies the decisions of `scheduler` and `reservations`. It is pure: no clock, no tensor, no I/O. Each
sequence is in exactly one state, and the state says which container holds it:

  state           container           owns
  WAITING         the waiting heap    nothing
  LOADING         `loading`           blocks; the host tier is still copying some of them to the device
  READY           `ready`             blocks; waits for a batch slot
  RUNNING         `running`           blocks and a batch slot
  AWAITING_FETCH  only its request    blocks of a finished prefill, until the decode instance has fetched them
  AWAITING_KV     only its request    blocks that another instance fills
  FINISHED        none                nothing, or blocks that a step in flight still writes to

A request starts with one *parent sequence*, which computes the prompt. With n > 1 the parent is forked once the first
token of each sequence is known.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import Work
from baton_serve.engine.core.block_pool import BlockPool
from baton_serve.engine.core.checkpoints import InnerRules, StateCheckpoints
from baton_serve.engine.core.encoder_sources import SourceBlocks
from baton_serve.engine.core.sequence import Mode, Request, Sequence, SequenceState, SortKey
from baton_serve.engine.core.window_blocks import WindowBlocks
from baton_serve.engine.errors import RequestError

DUE_TOKENS_PER_PROMPT_TOKEN = 4
"""How late a `prefill` request may run: this many scheduled prompt tokens after its arrival, per token of its prompt.

Requests run in order of these due times. A short prompt overtakes a long one, but only until the long one is due: it is
delayed, never starved. The factor was found by replaying a trace (docs/log/pd-against-unified.md).
"""

WINDOW_CHUNK_TOKENS = 512
"""Length of a chunk, in tokens, for which a prompt always has blocks in cache groups with a window. Longer chunks need
more free blocks."""

STEPS_PER_STAGE = 4
"""Number of steps for each stage of a pipeline into which the waiting prompts are divided at least. Stages are idle
while the first step passes through them, which is long compared with all steps if these are few."""
MIN_STAGE_STEP_TOKENS, FULL_STAGE_STEP_TOKENS = 512, 1024
"""Prompt tokens of a step of a pipeline: what waiting prompts are not divided below, and what `max_num_batched_tokens`
is not divided below for large batches. Launching a smaller step takes the host longer than its work takes a device."""
STAGE_STEP_MULTIPLE_TOKENS = 128
"""Steps of a pipeline have a multiple of so many prompt tokens, where that is allowed. Matrix products compute whole
tiles of rows, and captured graphs have such sizes."""


class BlockCopy(NamedTuple):
    """A planned copy on the device: the KV of all layers in block `source` goes to block `target`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step (sequences, tokens) and of one sequence (length), named as in vLLM, with the properties of the
    model and the device that scheduling depends on."""

    block_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int = 1
    """Maximum number of different LoRA adapters in one step."""
    state_blocks: int = 0
    """Number of blocks of a checkpoint; 0 for models without recurrent states."""
    checkpoint_tokens: int = 4096
    """Distance between the checkpoints inside a prompt, in tokens; a multiple of `block_tokens`."""
    checkpoint_step_tokens: int = 0
    """A step can store the recurrent states of a sequence after a multiple of so many of its tokens; 0: only after the
    last one."""
    num_spare_rows: int = 0
    """Number of sequences of a step for which it can do so: the rows of states beside those of the batch slots."""
    source_tokens: int = 0
    """Positions of a source, to each of which every token attends; 0 for models without cross-attention."""
    layer_groups: tuple[int, ...] = ()
    """The cache group of each layer with KV: 0 for full attention, other numbers for layers with a sliding window.
    Empty if one block holds the KV of all layers."""
    window_tokens: int = 0
    """The longest window of these layers: a token sees itself and so many tokens before it, less one."""
    num_stages: int = 1
    """Number of stages of a pipeline, each of which can compute another step at the same time."""
    mixes_prompts: bool = True
    """True if a step may hold sequences with one new token beside chunks of prompts. It is False for kernels that are
    wrong for such batches."""
    keeps_images_whole: bool = False
    """True if no chunk may end inside an image, because its tokens attend to each other in both directions."""
    has_bidirectional_prompts: bool = False
    """True if all tokens of a prompt attend to each other in both directions, so that one step computes them all."""
    shortest_window_tokens: int = 0
    """The shortest sliding window of the model's layers; 0 without one."""
    has_position_rows: bool = False
    """True for models whose positions have three rows, for which images may shift the positions of text."""

    @property
    def num_state_rows(self) -> int:
        """Return the number of rows of recurrent states: one for each batch slot, and the spare ones."""
        return self.max_num_seqs + self.num_spare_rows

    @property
    def max_prompt_tokens(self) -> int:
        """Return the largest number of prompt tokens in a step. With a pipeline it is smaller than
        `max_num_batched_tokens`: as several steps are computed at once, they have that many tokens together."""
        if self.num_stages == 1:
            return self.max_num_batched_tokens
        share = self.max_num_batched_tokens // self.num_stages
        return max(1, share // 2, min(share, FULL_STAGE_STEP_TOKENS))

    @property
    def max_step_tokens(self) -> int:
        """Return the largest number of tokens in a step, for which the device must have memory."""
        # A step may be longer than its share if an image or prompt begins it, which no chunk may end inside.
        if self.keeps_images_whole or self.has_bidirectional_prompts:
            return self.max_num_batched_tokens
        return min(self.max_num_batched_tokens, self.max_prompt_tokens + self.max_num_seqs)

    @property
    def max_whole_tokens(self) -> int:
        """Return the largest number of tokens of an image or prompt that one step must compute: beside one token of
        each sequence."""
        return self.max_num_batched_tokens - self.max_num_seqs

    def prompt_tokens_for(self, num_unfinished: int) -> int:
        """Return how many prompt tokens the next step may have, if the prompts that are not finished have so many
        tokens together. With a pipeline, few prompts are divided into small steps, so that all stages have work."""
        if self.num_stages == 1:
            return self.max_num_batched_tokens
        tile = STAGE_STEP_MULTIPLE_TOKENS
        share = -(-num_unfinished // (STEPS_PER_STAGE * self.num_stages * tile)) * tile
        return min(self.max_prompt_tokens, max(share, MIN_STAGE_STEP_TOKENS))

    @property
    def source_blocks(self) -> int:
        """Return how many blocks hold the cross-attention KV of one source; 0 for models without cross-attention."""
        return -(-self.source_tokens // self.block_tokens)

    @property
    def num_window_groups(self) -> int:
        """Return the number of cache groups of layers with a sliding window."""
        return max(self.layer_groups, default=0)

    @property
    def kept_window_blocks(self) -> int:
        """Return how many blocks of each such group a sequence has at least while its prompt is computed, for what its
        next token sees and for a chunk.
        """
        chunk = min(WINDOW_CHUNK_TOKENS, self.max_num_batched_tokens)
        return -(-self.window_tokens // self.block_tokens) + 1 + -(-chunk // self.block_tokens)

    def num_blocks_alone(self, num_tokens: int) -> int:
        """Return how many blocks of all cache groups a sequence of this length needs to run alone."""
        count = -(-num_tokens // self.block_tokens)
        return count + self.num_window_groups * min(count, self.kept_window_blocks)

    def num_tokens_alone(self, num_blocks: int) -> int:
        """Return the length of the longest sequence that can run alone with this number of blocks."""
        short = num_blocks // (1 + self.num_window_groups)
        long = num_blocks - self.num_window_groups * self.kept_window_blocks
        return max(min(short, self.kept_window_blocks), long, 0) * self.block_tokens


class RequestTable:
    """Owns all requests of one engine, with the queue and the batch that their sequences are in. Only the engine thread
    may call it."""

    def __init__(self, pool: BlockPool, limits: SchedulerConfig, eos_token_ids: frozenset[int]) -> None:
        self.pool = pool
        self.limits = limits
        self.requests: dict[RequestId, Request] = {}
        self.running: list[Sequence] = []
        self.ready: list[Sequence] = []
        self.loading: list[Sequence] = []
        # `Reservations` writes `pin_counts` and `KVImports` writes `import_blocks`. They are stored here because these
        # blocks belong to no sequence, and `check_invariants` must know every owner of a block.
        self.pin_counts: dict[BlockHash, int] = {}
        self.import_blocks: dict[RequestId, list[int]] = {}
        self.num_preemptions = 0
        self.num_scheduled_prompt_tokens = 0
        """Prompt tokens scheduled since start. This is the clock in which `Request.due` is measured."""
        self._eos_token_ids = eos_token_ids
        self._waiting: list[tuple[SortKey, int, Sequence]] = []
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._pending_copies: list[BlockCopy] = []
        self._finished_in_flight: set[Sequence] = set()
        """Finished sequences whose blocks a step in flight still writes to; `reclaim` frees them."""
        self._is_sorted = True
        inner = InnerRules(limits.checkpoint_step_tokens, limits.max_num_seqs, limits.num_spare_rows)
        self.checkpoints = StateCheckpoints(
            pool, limits.block_tokens, limits.state_blocks, limits.checkpoint_tokens, inner
        )
        self.sources = SourceBlocks(pool, limits.source_blocks)
        self.windows = WindowBlocks(
            pool, limits.block_tokens, limits.num_window_groups, limits.window_tokens, limits.kept_window_blocks
        )
        self._next_arrival = 0
        self._last_version = 0

    def add(self, work: Work, mode: Mode, now: float) -> Sequence:
        """Add a request and return its first sequence, the parent, which computes the prompt. The caller must then
        `enqueue` the sequence, or reserve blocks for it.

        `generate` requests of one priority run in order of arrival, and `prefill` requests in order of their due times.
        Raises `RequestError` if the request id is already in use.
        """
        if work.request_id in self.requests:
            raise RequestError("invalid", f"request id {work.request_id!r} is already in use")
        sampling = work.sampling
        end_token_ids = self._eos_token_ids.union(sampling.stop_token_ids)
        request = Request(
            work=work,
            mode=mode,
            due=self.num_scheduled_prompt_tokens
            + (DUE_TOKENS_PER_PROMPT_TOKEN * len(work.token_ids) if mode == "prefill" else 0),
            order=self._next_arrival,
            arrived_at=now,
            stop_token_ids=frozenset(sampling.stop_token_ids) if sampling.ignore_eos else end_token_ids,
            end_token_ids=end_token_ids,
            max_model_len=self.limits.max_model_len,
            unstarted=list(work.sequences),
        )
        self._next_arrival += 1
        parent = Sequence(request, work.sequences[0], list(work.token_ids))
        request.sequences.append(parent)
        self.requests[work.request_id] = request
        return parent

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of one cache group `num_tokens` tokens occupy; the last block may be partly filled."""
        return -(-num_tokens // self.limits.block_tokens)

    def enqueue(self, sequence: Sequence) -> None:
        """Put a sequence that owns no blocks into the waiting queue, at its place in the scheduling order."""
        assert not sequence.blocks
        sequence.state = SequenceState.WAITING
        # Sequences cannot be compared: the version makes every heap entry distinct, so that equal keys never compare
        # them.
        heapq.heappush(self._waiting, (sequence.sort_key, self._new_version(), sequence))

    def peek_waiting(self) -> Sequence | None:
        """Return the first sequence of the waiting queue without removing it, or None if the queue is empty."""
        # A sequence that ends while it waits leaves its heap entry behind, since removing it there would cost O(n). The
        # entry is dropped here. No sequence has two: it returns to WAITING only after `pop_waiting` removed the first.
        while self._waiting and self._waiting[0][2].state is not SequenceState.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None

    def pop_waiting(self) -> None:
        """Remove from the waiting queue the sequence that `peek_waiting` has just returned. Between the two calls
        nothing may be queued or ended."""
        heapq.heappop(self._waiting)

    def iter_waiting(self) -> Iterator[Sequence]:
        """Iterate over the sequences in the waiting queue, in no particular order."""
        return (sequence for _, _, sequence in self._waiting if sequence.state is SequenceState.WAITING)

    @property
    def has_free_slot(self) -> bool:
        """Return whether the batch has fewer than `max_num_seqs` sequences, so that another one can be added."""
        return bool(self._free_slots)

    def add_to_batch(self, sequence: Sequence) -> None:
        """Put a sequence that owns its blocks into the batch. If the batch is full, the sequence waits in state READY
        for a free slot."""
        if not self._free_slots:
            sequence.state = SequenceState.READY
            self.ready.append(sequence)
            return
        sequence.state = SequenceState.RUNNING
        sequence.slot = self._free_slots.pop()
        # Block table rows only grow while the version stays the same. Without a new version the row of this slot would
        # keep the blocks of the sequence that had the slot before.
        sequence.block_table_version = self._new_version()
        self.checkpoints.fill_slot(sequence)
        self.running.append(sequence)
        self._is_sorted = False

    def start_loading(self, sequence: Sequence) -> None:
        """Put a sequence into state LOADING: it owns its blocks, but some of their content is still being copied from
        the host tier to the device. `finish_loading` ends this state."""
        sequence.state = SequenceState.LOADING
        self.loading.append(sequence)

    def finish_loading(self, sequence: Sequence) -> None:
        """Move a sequence from state LOADING into the batch, because its blocks have been copied to the device."""
        self.loading.remove(sequence)
        self.add_to_batch(sequence)

    def sort_running(self) -> None:
        """Sort `running` in the scheduling order, so that the sequence that may preempt all others comes first."""
        if not self._is_sorted:
            self.running.sort(key=lambda s: s.sort_key)
            self._is_sorted = True

    def promote_ready(self) -> None:
        """Move sequences from state READY into the batch as long as it has free slots, in the scheduling order."""
        if self.ready and self._free_slots:
            # `add_to_batch` appends to `self.ready` once the slots run out, so the loop must not iterate over it.
            candidates, self.ready = sorted(self.ready, key=lambda s: s.sort_key), []
            for sequence in candidates:
                self.add_to_batch(sequence)

    def remove_from_batch(self, sequence: Sequence) -> None:
        """Remove a sequence from `running`, `ready` or `loading`. It keeps its blocks, and the caller sets its next
        state.

        A sequence that is in none of them is left as it is.
        """
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        elif sequence.state is SequenceState.READY:
            self.ready.remove(sequence)
        elif sequence.state is SequenceState.LOADING:
            self.loading.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence and put it back into the waiting queue, to be recomputed.

        Its tokens are kept. When it is scheduled again, blocks that are still in the prefix cache are reused.
        """
        assert not sequence.num_steps_in_flight, "a step in flight writes to the blocks of a preempted sequence"
        self.num_preemptions += 1
        self.remove_from_batch(sequence)
        self.free_blocks(sequence)
        self.enqueue(sequence)

    def free_blocks(self, sequence: Sequence) -> None:
        """Give up the ownership of all blocks of a sequence. Blocks that have a hash stay in the prefix cache until
        they are evicted."""
        for owned in (sequence.source_blocks, sequence.handoff_blocks, sequence.checkpoint_blocks, sequence.kv_blocks):
            self.pool.release(owned)
        sequence.window_blocks, sequence.num_window_freed = [], 0
        sequence.blocks, sequence.checkpoint_blocks, sequence.handoff_blocks = [], [], []
        sequence.source_blocks, sequence.must_encode = [], False
        # The hashes stay: they depend on the tokens alone, and are needed to find the blocks in the cache again.
        sequence.num_computed_tokens = sequence.num_registered_blocks = 0

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in any state, and free its blocks and batch slot. When the last sequence of a request ends,
        the request ends."""
        self.remove_from_batch(sequence)
        # With async scheduling the device may still write to the blocks. If they were freed now, the next step could
        # give them to another sequence, whose KV the running step would then overwrite.
        if sequence.num_steps_in_flight:
            self._finished_in_flight.add(sequence)
        else:
            self.free_blocks(sequence)
        sequence.state = SequenceState.FINISHED
        request = sequence.request
        request.sequences.remove(sequence)
        if not request.sequences:
            del self.requests[request.work.request_id]

    def reclaim(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that has finished, unless another launched step still writes to them.

        The scheduler calls this after each step that computed tokens of the sequence.
        """
        if not sequence.num_steps_in_flight:
            self._finished_in_flight.discard(sequence)
            self.free_blocks(sequence)

    def finish_request(self, request: Request) -> None:
        """End all sequences of a request, and thereby the request, and free its blocks."""
        # Iterate over a copy: `finish` removes from the list.
        for sequence in list(request.sequences):
            self.finish(sequence)

    def fail_request(self, request: Request) -> bool:
        """Stop the computation of a request after an error. Return True if the request has ended.

        Return False for a `prefill` request, which keeps its blocks until it is cancelled, because a transport may be
        reading them.
        """
        if request.mode != "prefill":
            self.finish_request(request)
            return True
        # A transport may be reading the blocks at this moment. Only the owner knows when the last copy has ended.
        for sequence in request.sequences:
            self.remove_from_batch(sequence)
            sequence.state = SequenceState.AWAITING_FETCH
        request.unstarted = []
        return False

    def cancel(self, request_id: RequestId, index: int | None) -> None:
        """End a request, or only its sequence `index` if that is not None, in any state, and free its blocks. Unknown
        requests and sequences are ignored."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if index is None or request.work.sequences == [index] or request.unstarted == [index]:
            self.finish_request(request)
        elif index in request.unstarted:
            # The parent still computes the prompt for the other sequences: this one is just never forked.
            request.unstarted.remove(index)
        else:
            for sequence in [s for s in request.sequences if s.index == index]:
                # Blocks that await their fetch hold the prompt of all sequences: they are freed with the request.
                if sequence.state is not SequenceState.AWAITING_FETCH:
                    self.finish(sequence)

    def start_decoding(self, parent: Sequence, first_tokens: dict[int, int]) -> None:
        """Start one sequence for each first token of a request, when its prompt is computed. `first_tokens` maps the
        index of a sequence to its first token.

        Sequences that end with their first token (stop token or length) are not started. `parent` becomes the first of
        the others and keeps its place in the batch; the other sequences share its full blocks and get a copy of its
        partly filled block.
        """
        request = parent.request
        request.unstarted = []
        num_generated = parent.num_generated + 1
        continuing = {i: t for i, t in first_tokens.items() if request.check_stop(num_generated, t) is None}
        # Fork before the parent gets its own token: a fork copies the parent's tokens.
        for index in list(continuing)[1:]:
            self._fork(parent, index, continuing[index])
        if not continuing:
            self.finish(parent)
            return
        parent.index = next(iter(continuing))
        self._is_sorted = False
        # The index is part of the sort key, so `running` may have to be sorted again.
        parent.token_ids.append(continuing[parent.index])
        # Its prompt was computed by another instance, so it is not in the batch yet.
        if parent.state is not SequenceState.RUNNING:
            self.add_to_batch(parent)

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies of partly filled blocks that were planned since the last call, for further sequences of a
        request with n > 1. The caller executes them before any other work reads or writes these blocks."""
        copies, self._pending_copies = self._pending_copies, []
        return copies

    def _new_version(self) -> int:
        """Return a number that is greater than all numbers that this method has returned before; it marks a changed
        block table."""
        self._last_version += 1
        return self._last_version

    def check_invariants(self) -> None:
        """Assert that each block, batch slot and queue entry belongs to the sequences that claim it. Only tests call
        it."""
        sequences = [s for request in self.requests.values() for s in request.sequences]
        pinned = [b for name, n in self.pin_counts.items() for b in [self.pool.block_of(name)] * n if b is not None]
        owners = [*sequences, *self._finished_in_flight]
        imported = [block for blocks in self.import_blocks.values() for block in blocks]
        owned = [
            block for s in owners for block in (*s.kv_blocks, *s.checkpoint_blocks, *s.handoff_blocks, *s.source_blocks)
        ]
        self.pool.check_invariants(owned + pinned + imported)
        assert all(s.num_steps_in_flight for s in self._finished_in_flight), "blocks of a finished sequence leaked"
        assert all(self.pool.block_of(name) is not None for name in self.pin_counts), "a pinned block was evicted"
        by_state = {state: {id(s) for s in sequences if s.state is state} for state in SequenceState}
        assert {id(s) for s in self.running} == by_state[SequenceState.RUNNING]
        assert {id(s) for s in self.ready} == by_state[SequenceState.READY]
        assert {id(s) for s in self.loading} == by_state[SequenceState.LOADING]
        assert {id(s) for s in self.iter_waiting()} == by_state[SequenceState.WAITING]
        assert not by_state[SequenceState.FINISHED]
        used_slots = [s.slot for s in self.running]
        assert sorted(used_slots + self._free_slots) == list(range(self.limits.max_num_seqs)), "a slot leaked"
        for sequence in sequences:
            _check_sequence(sequence, self.limits.block_tokens)

    def _fork(self, parent: Sequence, index: int, first_token: int) -> None:
        """Create the sequence with this index from the parent's tokens and its own first token, and put it into the
        batch.

        If no block is free for the copy of the parent's partly filled block, the new sequence waits in the queue
        instead; later it finds the full blocks in the prefix cache.
        """
        sequence = Sequence(parent.request, index, [*parent.token_ids, first_token])
        parent.request.sequences.append(sequence)
        num_full, remainder = divmod(parent.num_computed_tokens, self.limits.block_tokens)
        # The states of a running parent are in its slot, and can be copied only to another slot.
        can_fork = self.checkpoints.can_fork(parent, has_free_slot=self.has_free_slot)
        own = self.pool.allocate(1 + self.windows.num_groups if remainder else 0) if can_fork else None
        if own is None:
            self.enqueue(sequence)
            return
        self.pool.share(parent.blocks[:num_full])
        # Parent and fork will write different tokens into the partly filled block, so they cannot share it.
        self._pending_copies += [BlockCopy(parent.blocks[num_full], target) for target in own[:1]]
        self._pending_copies += map(BlockCopy._make, self.windows.share(parent, sequence, num_full, own[1:]))
        sequence.blocks = parent.blocks[:num_full] + own[:1]
        sequence.block_hashes = parent.block_hashes[:num_full]
        sequence.num_computed_tokens = parent.num_computed_tokens
        sequence.num_registered_blocks = num_full
        self.checkpoints.share(parent, sequence)
        self.sources.share(parent, sequence)
        self.add_to_batch(sequence)
        self.checkpoints.copy_slot(parent, sequence)


def _check_sequence(sequence: Sequence, block_tokens: int) -> None:
    """Assert that the numbers of tokens, blocks and hashes of one sequence agree. `block_tokens` is the size of a
    block."""
    if sequence.state is SequenceState.WAITING:
        assert not sequence.blocks
        assert sequence.num_computed_tokens == 0
    else:
        assert sequence.num_computed_tokens <= len(sequence.blocks) * block_tokens
        assert len(sequence.blocks) <= -(-(len(sequence.token_ids) + sequence.num_output_placeholders) // block_tokens)
    # A live sequence always has a token to compute, or the scheduler would never reach its end.
    assert sequence.num_uncomputed_tokens > 0 or sequence.state in (
        SequenceState.AWAITING_FETCH,
        SequenceState.AWAITING_KV,
    )
    assert 0 <= sequence.num_output_placeholders <= sequence.num_steps_in_flight
    assert len(set(sequence.kv_blocks)) == len(sequence.kv_blocks), "a sequence holds a block twice"
