"""All requests of the engine, the queues their sequences stand in, and the blocks and slots they own.

Pure: the transitions that `scheduler` and `reservations` are written in. A sequence is in exactly one place:
`waiting` (a heap with lazy deletion), `loading`, `ready`, `running`, or held/reserved by its request alone.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.messages import Work
from baton_serve.engine.core.block_pool import BlockPool
from baton_serve.engine.core.sequence import Mode, Request, Sequence, SequenceState, SortKey
from baton_serve.engine.errors import RequestError

DUE_TOKENS_PER_PROMPT_TOKEN = 4
"""So many times its own length a prompt that is computed for another instance may be overtaken by shorter ones, in
tokens of prompts computed: short ones do not wait for a long one, and no prompt waits for ever. The factor was found by
replaying a trace: docs/log/pd-against-unified.md."""


class BlockCopy(NamedTuple):
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    block_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int = 1
    """Adapters that one step may mix."""


class RequestTable:
    def __init__(self, pool: BlockPool, limits: SchedulerConfig, eos_token_ids: frozenset[int]) -> None:
        self.pool = pool
        self.limits = limits
        self.requests: dict[RequestId, Request] = {}
        self.running: list[Sequence] = []
        self.ready: list[Sequence] = []
        self.loading: list[Sequence] = []
        self.pin_counts: dict[BlockHash, int] = {}
        self.import_blocks: dict[RequestId, list[int]] = {}
        self.num_preemptions = 0
        self.num_scheduled_prompt_tokens = 0
        """Of prompts, since the start: the clock by which prompts are due."""
        self._eos_token_ids = eos_token_ids
        self._waiting: list[tuple[SortKey, int, Sequence]] = []
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._pending_copies: list[BlockCopy] = []
        self._finished_in_flight: set[Sequence] = set()  # ended, but a step being computed still writes to their blocks
        self._is_sorted = True
        self._next_arrival = 0
        self._last_version = 0

    def add(self, work: Work, mode: Mode, now: float) -> Sequence:
        """A new request; its trunk is in no queue yet."""
        if work.request_id in self.requests:
            raise RequestError("invalid", f"request id {work.request_id!r} is already in use")
        sampling = work.sampling
        stop_token_ids = frozenset(sampling.stop_token_ids)
        request = Request(
            work=work,
            mode=mode,
            due=self.num_scheduled_prompt_tokens
            + (DUE_TOKENS_PER_PROMPT_TOKEN * len(work.token_ids) if mode == "prefill" else 0),
            order=self._next_arrival,
            arrived_at=now,
            stop_token_ids=stop_token_ids if sampling.ignore_eos else stop_token_ids | self._eos_token_ids,
            max_model_len=self.limits.max_model_len,
            unstarted=list(work.sequences),
        )
        self._next_arrival += 1
        parent = Sequence(request, work.sequences[0], list(work.token_ids))
        request.sequences.append(parent)
        self.requests[work.request_id] = request
        return parent

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_tokens)

    def enqueue(self, sequence: Sequence) -> None:
        """To the waiting queue, at the place its key gives it."""
        assert not sequence.blocks
        sequence.state = SequenceState.WAITING
        heapq.heappush(self._waiting, (sequence.key, self.new_version(), sequence))

    def head(self) -> Sequence | None:
        """The waiting sequence that is next, left where it is."""
        while self._waiting and self._waiting[0][2].state is not SequenceState.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None

    def pop_waiting(self) -> None:
        heapq.heappop(self._waiting)

    def waiting(self) -> Iterator[Sequence]:
        return (sequence for _, _, sequence in self._waiting if sequence.state is SequenceState.WAITING)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def add_to_batch(self, sequence: Sequence) -> None:
        """Into the batch, or to `ready` when every slot is taken. The sequence owns its blocks."""
        if not self._free_slots:
            sequence.state = SequenceState.READY
            self.ready.append(sequence)
            return
        sequence.state = SequenceState.RUNNING
        sequence.slot = self._free_slots.pop()
        sequence.block_table_version = self.new_version()
        self.running.append(sequence)
        self._is_sorted = False

    def start_loading(self, sequence: Sequence) -> None:
        """Out of the queue, until the copies from the host tier are done (`finish_loading`). The sequence owns its
        blocks."""
        sequence.state = SequenceState.LOADING
        self.loading.append(sequence)

    def finish_loading(self, sequence: Sequence) -> None:
        self.loading.remove(sequence)
        self.add_to_batch(sequence)

    def sort_running(self) -> None:
        """The most important first."""
        if not self._is_sorted:
            self.running.sort(key=lambda s: s.key)
            self._is_sorted = True

    def promote_ready(self) -> None:
        """Free slots go to those who already own blocks."""
        if self.ready and self._free_slots:
            queue, self.ready = sorted(self.ready, key=lambda s: s.key), []
            for sequence in queue:
                self.add_to_batch(sequence)

    def remove_from_batch(self, sequence: Sequence) -> None:
        """Out of `running`, `ready` or `loading`, keeping its blocks."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        elif sequence.state is SequenceState.READY:
            self.ready.remove(sequence)
        elif sequence.state is SequenceState.LOADING:
            self.loading.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Frees its memory; it will be recomputed, from the cache as far as that still reaches."""
        assert not sequence.num_steps_in_flight, "its blocks are being written"
        self.num_preemptions += 1
        self.remove_from_batch(sequence)
        self.free_blocks(sequence)
        self.enqueue(sequence)

    def free_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed_tokens = sequence.num_registered_blocks = 0

    def finish(self, sequence: Sequence) -> None:
        """Frees everything, blocks that a step being computed writes to when that is over (`reclaim`); the request ends
        with its last sequence."""
        self.remove_from_batch(sequence)
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
        """A step that wrote to this ended sequence's blocks is over."""
        if not sequence.num_steps_in_flight:
            self._finished_in_flight.discard(sequence)
            self.free_blocks(sequence)

    def finish_request(self, request: Request) -> None:
        for sequence in list(request.sequences):
            self.finish(sequence)

    def fail_request(self, request: Request) -> bool:
        """Ends a request that computes no more. False: blocks of it may be being read by a copy at this moment, so they
        stay, held, until its owner cancels it."""
        if request.mode != "prefill":
            self.finish_request(request)
            return True
        for sequence in request.sequences:
            self.remove_from_batch(sequence)
            sequence.state = SequenceState.AWAITING_FETCH
        request.unstarted = []
        return False

    def cancel(self, request_id: RequestId, index: int | None) -> None:
        """Ends a request, or one of its sequences, in any state. Unknown ones are ignored."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if index is None or request.work.sequences == [index] or request.unstarted == [index]:
            self.finish_request(request)
        elif index in request.unstarted:
            request.unstarted.remove(index)
        else:
            for sequence in [s for s in request.sequences if s.index == index]:
                if sequence.state is not SequenceState.AWAITING_FETCH:
                    self.finish(sequence)

    def start_decoding(self, parent: Sequence, first_tokens: dict[int, int]) -> None:
        """The prompt is computed and each index has its first token: those that go on join the batch.

        The trunk becomes the first of them and keeps its place; the others share its full blocks and copy the last.
        """
        request = parent.request
        request.unstarted = []
        generated = parent.num_generated + 1
        going = {i: t for i, t in first_tokens.items() if request.verdict(generated, t) is None}
        for index in list(going)[1:]:
            self._fork(parent, index, going[index])
        if not going:
            self.finish(parent)
            return
        parent.index = next(iter(going))
        self._is_sorted = False
        parent.token_ids.append(going[parent.index])
        if parent.state is not SequenceState.RUNNING:
            self.add_to_batch(parent)

    def take_copies(self) -> list[BlockCopy]:
        """Copies to execute before any block is written again."""
        copies, self._pending_copies = self._pending_copies, []
        return copies

    def new_version(self) -> int:
        self._last_version += 1
        return self._last_version

    def check_invariants(self) -> None:
        sequences = [s for request in self.requests.values() for s in request.sequences]
        pinned = [b for name, n in self.pin_counts.items() for b in [self.pool.block_of(name)] * n if b is not None]
        owners = [*sequences, *self._finished_in_flight]
        imported = [block for blocks in self.import_blocks.values() for block in blocks]
        self.pool.check_invariants([block for s in owners for block in s.blocks] + pinned + imported)
        assert all(s.num_steps_in_flight for s in self._finished_in_flight), "blocks were not freed"
        assert all(self.pool.block_of(name) is not None for name in self.pin_counts), "a pinned block was evicted"
        by_state = {state: {id(s) for s in sequences if s.state is state} for state in SequenceState}
        assert {id(s) for s in self.running} == by_state[SequenceState.RUNNING]
        assert {id(s) for s in self.ready} == by_state[SequenceState.READY]
        assert {id(s) for s in self.loading} == by_state[SequenceState.LOADING]
        assert {id(s) for s in self.waiting()} == by_state[SequenceState.WAITING]
        assert not by_state[SequenceState.FINISHED]
        taken = [s.slot for s in self.running]
        assert sorted(taken + self._free_slots) == list(range(self.limits.max_num_seqs)), "slots leaked"
        for sequence in sequences:
            _check_sequence(sequence, self.limits.block_tokens)

    def _fork(self, parent: Sequence, index: int, first_token: int) -> None:
        sequence = Sequence(parent.request, index, [*parent.token_ids, first_token])
        parent.request.sequences.append(sequence)
        num_full, tail = divmod(parent.num_computed_tokens, self.limits.block_tokens)
        own = self.pool.allocate(1 if tail else 0)
        if own is None:  # no room for the copied tail: it waits and finds the full blocks in the cache
            self.enqueue(sequence)
            return
        self.pool.share(parent.blocks[:num_full])
        self._pending_copies += [BlockCopy(parent.blocks[num_full], target) for target in own]
        sequence.blocks = parent.blocks[:num_full] + own
        sequence.block_hashes = parent.block_hashes[:num_full]
        sequence.num_computed_tokens = parent.num_computed_tokens
        sequence.num_registered_blocks = num_full
        self.add_to_batch(sequence)


def _check_sequence(sequence: Sequence, block_tokens: int) -> None:
    if sequence.state is SequenceState.WAITING:
        assert not sequence.blocks
        assert sequence.num_computed_tokens == 0
    else:
        assert sequence.num_computed_tokens <= len(sequence.blocks) * block_tokens
        assert len(sequence.blocks) <= -(-(len(sequence.token_ids) + sequence.num_output_placeholders) // block_tokens)
    assert sequence.num_uncomputed_tokens > 0 or sequence.state in (
        SequenceState.AWAITING_FETCH,
        SequenceState.AWAITING_KV,
    )
    assert 0 <= sequence.num_output_placeholders <= sequence.num_steps_in_flight
    assert len(set(sequence.blocks)) == len(sequence.blocks), "a sequence holds a block twice"
