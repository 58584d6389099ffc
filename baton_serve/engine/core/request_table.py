"""All requests of the engine, the queues their sequences stand in, and the blocks and slots they own.

Pure: the transitions that `scheduler` and `reservations` are written in. A sequence is in exactly one place:
`waiting` (a heap with lazy deletion), `loading`, `ready`, `running`, or held/reserved by its request alone.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from baton_serve.contracts.identity import BlockName, RequestId
from baton_serve.contracts.messages import Work
from baton_serve.engine.core.block_pool import BlockPool
from baton_serve.engine.core.sequence import Mode, Request, Sequence, SortKey, State
from baton_serve.engine.errors import RequestError

OVERTAKING = 4
"""So many times its own length a prompt that is computed for another instance may be overtaken by shorter ones, in
tokens of prompts computed: short ones do not wait for a long one, and no prompt waits for ever. The factor was found by
replaying a trace: docs/experiments.md."""


class BlockCopy(NamedTuple):
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    block_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int = 1
    """Adapters that one step may mix."""


class Roster:
    def __init__(self, pool: BlockPool, limits: Limits, eos_ids: frozenset[int]) -> None:
        self.pool = pool
        self.limits = limits
        self.requests: dict[RequestId, Request] = {}
        self.running: list[Sequence] = []
        self.ready: list[Sequence] = []
        self.loading: list[Sequence] = []
        self.pins: dict[BlockName, int] = {}
        self.imports: dict[RequestId, list[int]] = {}
        self.num_preemptions = 0
        self.num_planned_tokens = 0
        """Of prompts, since the start: the clock by which prompts are due."""
        self._eos_ids = eos_ids
        self._waiting: list[tuple[SortKey, int, Sequence]] = []
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._copies: list[BlockCopy] = []
        self._lingering: set[Sequence] = set()  # ended, but a step being computed still writes to their blocks
        self._is_sorted = True
        self._next_order = 0
        self._next_epoch = 0

    def enrol(self, work: Work, mode: Mode, now: float) -> Sequence:
        """A new request; its trunk is in no queue yet."""
        if work.request_id in self.requests:
            raise RequestError("invalid", f"request id {work.request_id!r} is already in use")
        sampling = work.sampling
        stop_ids = frozenset(sampling.stop_token_ids)
        request = Request(
            work=work,
            mode=mode,
            due=self.num_planned_tokens + (OVERTAKING * len(work.token_ids) if mode == "prefill" else 0),
            order=self._next_order,
            arrived=now,
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | self._eos_ids,
            max_model_len=self.limits.max_model_len,
            to_start=list(work.sequences),
        )
        self._next_order += 1
        trunk = Sequence(request, work.sequences[0], list(work.token_ids))
        request.sequences.append(trunk)
        self.requests[work.request_id] = request
        return trunk

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_tokens)

    def enqueue(self, sequence: Sequence) -> None:
        """To the waiting queue, at the place its key gives it."""
        assert not sequence.blocks
        sequence.state = State.WAITING
        heapq.heappush(self._waiting, (sequence.key, self.new_epoch(), sequence))

    def head(self) -> Sequence | None:
        """The waiting sequence that is next, left where it is."""
        while self._waiting and self._waiting[0][2].state is not State.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None

    def pop_head(self) -> None:
        heapq.heappop(self._waiting)

    def waiting(self) -> Iterator[Sequence]:
        return (sequence for _, _, sequence in self._waiting if sequence.state is State.WAITING)

    @property
    def has_slot(self) -> bool:
        return bool(self._slots)

    def run(self, sequence: Sequence) -> None:
        """Into the batch, or to `ready` when every slot is taken. The sequence owns its blocks."""
        if not self._slots:
            sequence.state = State.READY
            self.ready.append(sequence)
            return
        sequence.state = State.RUNNING
        sequence.slot = self._slots.pop()
        sequence.epoch = self.new_epoch()
        self.running.append(sequence)
        self._is_sorted = False

    def load(self, sequence: Sequence) -> None:
        """Out of the queue, until the copies from the host tier are done (`loaded`). The sequence owns its blocks."""
        sequence.state = State.LOADING
        self.loading.append(sequence)

    def loaded(self, sequence: Sequence) -> None:
        self.loading.remove(sequence)
        self.run(sequence)

    def sort_running(self) -> None:
        """The most important first."""
        if not self._is_sorted:
            self.running.sort(key=lambda s: s.key)
            self._is_sorted = True

    def promote_ready(self) -> None:
        """Free slots go to those who already own blocks."""
        if self.ready and self._slots:
            queue, self.ready = sorted(self.ready, key=lambda s: s.key), []
            for sequence in queue:
                self.run(sequence)

    def leave_batch(self, sequence: Sequence) -> None:
        """Out of `running`, `ready` or `loading`, keeping its blocks."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self._slots.append(sequence.slot)
            sequence.slot = -1
        elif sequence.state is State.READY:
            self.ready.remove(sequence)
        elif sequence.state is State.LOADING:
            self.loading.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Frees its memory; it will be recomputed, from the cache as far as that still reaches."""
        assert not sequence.num_launched, "its blocks are being written"
        self.num_preemptions += 1
        self.leave_batch(sequence)
        self.free_blocks(sequence)
        self.enqueue(sequence)

    def free_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_registered = 0

    def end(self, sequence: Sequence) -> None:
        """Frees everything, blocks that a step being computed writes to when that is over (`settle`); the request ends
        with its last sequence."""
        self.leave_batch(sequence)
        if sequence.num_launched:
            self._lingering.add(sequence)
        else:
            self.free_blocks(sequence)
        sequence.state = State.ENDED
        request = sequence.request
        request.sequences.remove(sequence)
        if not request.sequences:
            del self.requests[request.work.request_id]

    def settle(self, sequence: Sequence) -> None:
        """A step that wrote to this ended sequence's blocks is over."""
        if not sequence.num_launched:
            self._lingering.discard(sequence)
            self.free_blocks(sequence)

    def end_request(self, request: Request) -> None:
        for sequence in list(request.sequences):
            self.end(sequence)

    def fail_request(self, request: Request) -> bool:
        """Ends a request that computes no more. False: blocks of it may be being read by a copy at this moment, so they
        stay, held, until its owner cancels it."""
        if request.mode != "prefill":
            self.end_request(request)
            return True
        for sequence in request.sequences:
            self.leave_batch(sequence)
            sequence.state = State.HELD
        request.to_start = []
        return False

    def cancel(self, request_id: RequestId, index: int | None) -> None:
        """Ends a request, or one of its sequences, in any state. Unknown ones are ignored."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if index is None or request.work.sequences == [index] or request.to_start == [index]:
            self.end_request(request)
        elif index in request.to_start:
            request.to_start.remove(index)
        else:
            for sequence in [s for s in request.sequences if s.index == index]:
                if sequence.state is not State.HELD:
                    self.end(sequence)

    def start_sequences(self, trunk: Sequence, first_tokens: dict[int, int]) -> None:
        """The prompt is computed and each index has its first token: those that go on join the batch.

        The trunk becomes the first of them and keeps its place; the others share its full blocks and copy the last.
        """
        request = trunk.request
        request.to_start = []
        generated = trunk.num_generated + 1
        going = {i: t for i, t in first_tokens.items() if request.verdict(generated, t) is None}
        for index in list(going)[1:]:
            self._fork(trunk, index, going[index])
        if not going:
            self.end(trunk)
            return
        trunk.index = next(iter(going))
        self._is_sorted = False
        trunk.token_ids.append(going[trunk.index])
        if trunk.state is not State.RUNNING:
            self.run(trunk)

    def take_copies(self) -> list[BlockCopy]:
        """Copies to execute before any block is written again."""
        copies, self._copies = self._copies, []
        return copies

    def new_epoch(self) -> int:
        self._next_epoch += 1
        return self._next_epoch

    def check_invariants(self) -> None:
        sequences = [s for request in self.requests.values() for s in request.sequences]
        pinned = [b for name, n in self.pins.items() for b in [self.pool.block_of(name)] * n if b is not None]
        owners = [*sequences, *self._lingering]
        imported = [block for blocks in self.imports.values() for block in blocks]
        self.pool.check_invariants([block for s in owners for block in s.blocks] + pinned + imported)
        assert all(s.num_launched for s in self._lingering), "blocks were not freed"
        assert all(self.pool.block_of(name) is not None for name in self.pins), "a pinned block was evicted"
        by_state = {state: {id(s) for s in sequences if s.state is state} for state in State}
        assert {id(s) for s in self.running} == by_state[State.RUNNING]
        assert {id(s) for s in self.ready} == by_state[State.READY]
        assert {id(s) for s in self.loading} == by_state[State.LOADING]
        assert {id(s) for s in self.waiting()} == by_state[State.WAITING]
        assert not by_state[State.ENDED]
        taken = [s.slot for s in self.running]
        assert sorted(taken + self._slots) == list(range(self.limits.max_num_seqs)), "slots leaked"
        for sequence in sequences:
            _check_sequence(sequence, self.limits.block_tokens)

    def _fork(self, trunk: Sequence, index: int, first_token: int) -> None:
        sequence = Sequence(trunk.request, index, [*trunk.token_ids, first_token])
        trunk.request.sequences.append(sequence)
        num_full, tail = divmod(trunk.num_computed, self.limits.block_tokens)
        own = self.pool.allocate(1 if tail else 0)
        if own is None:  # no room for the copied tail: it waits and finds the full blocks in the cache
            self.enqueue(sequence)
            return
        self.pool.share(trunk.blocks[:num_full])
        self._copies += [BlockCopy(trunk.blocks[num_full], target) for target in own]
        sequence.blocks = trunk.blocks[:num_full] + own
        sequence.names = trunk.names[:num_full]
        sequence.num_computed = trunk.num_computed
        sequence.num_registered = num_full
        self.run(sequence)


def _check_sequence(sequence: Sequence, block_tokens: int) -> None:
    if sequence.state is State.WAITING:
        assert not sequence.blocks
        assert sequence.num_computed == 0
    else:
        assert sequence.num_computed <= len(sequence.blocks) * block_tokens
        assert len(sequence.blocks) <= -(-(len(sequence.token_ids) + sequence.num_pending) // block_tokens)
    assert sequence.num_remaining > 0 or sequence.state in (State.HELD, State.RESERVED)
    assert 0 <= sequence.num_pending <= sequence.num_launched
    assert len(set(sequence.blocks)) == len(sequence.blocks), "a sequence holds a block twice"
