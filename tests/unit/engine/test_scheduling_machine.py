"""Random lives of requests against pool, request table, scheduler and reservations: nothing leaks, everything ends."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from baton_serve.contracts.block_hash import checkpoint_hashes, hash_blocks
from baton_serve.contracts.events import BlocksStored
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.engine.core.kv_import import KVImports
from baton_serve.engine.core.outputs import StepResult
from baton_serve.engine.core.reservations import Reservations
from baton_serve.engine.core.scheduler import ScheduledBatch, Scheduler
from baton_serve.engine.core.sequence import Mode
from tests.unit.engine.states import FakeStates, Part
from tests.unit.engine.work import (
    BLOCK_TOKENS,
    ROOT,
    AheadSteps,
    add,
    made_up_token,
    made_up_tokens,
    make_table,
    make_work,
    step,
)

NUM_BLOCKS = 9
LONGEST_PROMPT = 18


class SchedulingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = make_table(NUM_BLOCKS, seqs=3, batched=7)
        self.scheduler = Scheduler(self.table)
        self.reservations = Reservations(self.table)
        self.count = 0
        self.expected: dict[tuple[str, int], int] = {}  # next position of each sequence
        self.remaining: Counter[tuple[str, int]] = Counter()
        self.held: list[RequestId] = []
        self.reserved: dict[RequestId, list[BlockHash]] = {}
        self.pinned: list[BlockHash] = []
        self.imports = KVImports(self.table)
        self.imported: dict[RequestId, list[BlockHash]] = {}
        self.cached: set[BlockHash] = set()

    @initialize(caching=st.booleans())
    def start(self, caching: bool) -> None:
        self.table = make_table(NUM_BLOCKS, seqs=3, batched=7, caching=caching)
        self.scheduler = Scheduler(self.table)
        self.reservations = Reservations(self.table)
        self.imports = KVImports(self.table)

    def new_id(self) -> str:
        self.count += 1
        return f"r{self.count}"

    @rule(
        length=st.integers(1, LONGEST_PROMPT),
        prefix=st.integers(0, 2),
        max_tokens=st.integers(1, 12),
        sequences=st.integers(1, 4),
        priority=st.integers(-1, 1),
        mode=st.sampled_from(["generate", "generate", "prefill"]),
    )
    def arrive(self, length: int, prefix: int, max_tokens: int, sequences: int, priority: int, mode: Mode) -> None:
        request_id = self.new_id()
        work = make_work(request_id, [prefix] * length, max_tokens=max_tokens, priority=priority, sequences=sequences)
        add(self.table, work, mode)
        for index in range(sequences):
            self.expected[request_id, index] = 0
            self.remaining[request_id, index] = 1 if mode == "prefill" else max_tokens

    @rule(length=st.integers(1, LONGEST_PROMPT), prefix=st.integers(0, 2), max_tokens=st.integers(2, 9))
    def reserve(self, length: int, prefix: int, max_tokens: int) -> None:
        request_id = self.new_id()
        work = make_work(request_id, [prefix] * length, max_tokens=max_tokens)
        reservation = self.reservations.reserve(work, 0.0)
        if reservation is not None:
            self.reserved[RequestId(request_id)] = [name for name, _ in reservation.missing]
            self.expected[request_id, 0] = 0
            self.remaining[request_id, 0] = max_tokens

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.reserved)))
        names = self.reserved[request_id]
        count = data.draw(st.integers(0, len(names)))
        self.reservations.mark_received(request_id, names[:count])
        self.reserved[request_id] = names[count:]

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.reserved)))
        if self.reserved.pop(request_id):
            self.reservations.admit_locally(request_id)
        else:
            self.reservations.admit(request_id, {0: made_up_token(request_id, 0, 0)})
            self.expected[request_id, 0] += 1
            self.remaining[request_id, 0] -= 1
        self.table.take_copies()

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), whole=st.booleans())
    def cancel(self, data: st.DataObject, whole: bool) -> None:
        request_id, index = data.draw(st.sampled_from(sorted(self.expected)))
        if RequestId(request_id) in self.held:
            return
        self.table.cancel(RequestId(request_id), None if whole else index)
        self.reserved.pop(RequestId(request_id), None)
        for key in [k for k in self.expected if k[0] == request_id and (whole or k[1] == index)]:
            self.forget(key)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        request = self.table.requests[self.held.pop(0)]
        self.table.finish_request(request)

    @precondition(lambda self: self.cached and not self.pinned)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.table.pool.cached_block_hashes())), max_size=3))
        self.pinned = [item.name for item in self.reservations.pin(names)]

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.reservations.unpin(self.pinned)
        self.pinned = []

    @rule(length=st.integers(1, LONGEST_PROMPT), prefix=st.integers(0, 2))
    def begin_import(self, length: int, prefix: int) -> None:
        import_id = RequestId(self.new_id())
        names = hash_blocks(ROOT, [prefix] * length, BLOCK_TOKENS)[: length // BLOCK_TOKENS]
        if missing := self.imports.begin(import_id, names):
            self.imported[import_id] = [name for name, _ in missing]

    @precondition(lambda self: self.imported)
    @rule(data=st.data())
    def end_import(self, data: st.DataObject) -> None:
        import_id = data.draw(st.sampled_from(sorted(self.imported)))
        names = self.imported.pop(import_id)
        received = data.draw(st.lists(st.sampled_from(names), unique=True))
        assert len(self.imports.receive(import_id, received)) == len(received)
        assert len(self.imports.end(import_id)) == len(names) - len(received)

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.observe(self.step())

    def step(self) -> StepResult:
        return step(self.table, self.scheduler)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def observe(self, result: StepResult) -> None:
        for output in result.tokens:
            key = (str(output.request_id), output.sequence)
            assert output.position == self.expected[key], "a token was lost or repeated"
            assert output.token_ids == [made_up_token(*key, output.position)]
            self.expected[key] += 1
            self.remaining[key] -= 1
            if output.finish_reason:
                assert output.finish_reason == "length"
        for request_id in result.held:
            self.held.append(request_id)
            for key in [k for k in self.expected if k[0] == request_id]:
                self.forget(key)

    def forget(self, key: tuple[str, int]) -> None:
        del self.expected[key]
        del self.remaining[key]

    @invariant()
    def nothing_is_leaked_or_owned_twice(self) -> None:
        self.table.check_invariants()

    @invariant()
    def events_tell_what_is_cached(self) -> None:
        for event in self.table.pool.take_events():
            if event.tier == "host":
                continue
            if isinstance(event, BlocksStored):
                assert not self.cached & set(event.names)
                self.cached |= set(event.names)
            else:
                assert self.cached >= set(event.names)
                self.cached -= set(event.names)
        assert self.cached == set(self.table.pool.cached_block_hashes())

    def teardown(self) -> None:
        """Once no memory is held from outside, every request ends within a bounded number of steps."""
        for request_id in list(self.reserved):
            self.reservations.admit_locally(request_id)
        self.unpin()
        for import_id in self.imported:
            self.imports.end(import_id)
        for _ in range(2000):
            while self.held:
                self.release()
            if not self.has_work():
                break
            self.observe(self.step())
        assert not self.table.requests, "a request never ends"
        assert all(left == 0 for left in self.remaining.values()), "a sequence ended early"
        assert self.table.pool.num_free == self.table.pool.num_total


class AheadMachine(SchedulingMachine):
    """The same lives, while the next step is always launched before this one's tokens are known."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = AheadSteps()

    def step(self) -> StepResult:
        return self.ahead.step(self.table, self.scheduler)

    def has_work(self) -> bool:
        return self.ahead.launched is not None or super().has_work()


class AwaitedImagesMachine(AheadMachine):
    """The same lives, in which prompts have images that come later: no step computes a token before its image, and a
    prompt that waits keeps the engine busy with nothing."""

    @rule(
        length=st.integers(2, LONGEST_PROMPT),
        at=st.integers(0, LONGEST_PROMPT),
        prefix=st.integers(0, 2),
        max_tokens=st.integers(1, 12),
        sequences=st.integers(1, 3),
        mode=st.sampled_from(["generate", "prefill"]),
    )
    def arrive_with_image(self, length: int, at: int, prefix: int, max_tokens: int, sequences: int, mode: Mode) -> None:
        before = set(self.table.requests)
        self.arrive(length, prefix, max_tokens, sequences, 0, mode)
        (request_id,) = set(self.table.requests) - before
        self.table.requests[request_id].num_ready_tokens = min(at, length - 1)

    @precondition(lambda self: any(one.num_ready_tokens < LONGEST_PROMPT for one in self.table.requests.values()))
    @rule(data=st.data(), count=st.integers(1, LONGEST_PROMPT))
    def come(self, data: st.DataObject, count: int) -> None:
        waiting = sorted(name for name, one in self.table.requests.items() if one.num_ready_tokens < LONGEST_PROMPT)
        request = self.table.requests[data.draw(st.sampled_from(waiting))]
        ready = request.num_ready_tokens + count
        request.num_ready_tokens = ready if ready < len(request.work.token_ids) else sys.maxsize

    def step(self) -> StepResult:
        schedule = self.scheduler.schedule

        def checked(now: float) -> ScheduledBatch:
            plan = schedule(now)
            for chunk in plan.chunks:
                assert chunk.start + chunk.length <= chunk.sequence.request.num_ready_tokens
            return plan

        self.scheduler.schedule = checked  # type: ignore[method-assign]
        try:
            return super().step()
        finally:
            self.scheduler.schedule = schedule  # type: ignore[method-assign]

    @invariant()
    def nothing_to_do_is_said(self) -> None:
        running = self.table.running
        if running and all(one.must_await_image for one in running) and self.table.peek_waiting() is None:
            assert not self.scheduler.has_work() or self.table.ready or self.table.loading

    def teardown(self) -> None:
        for request in self.table.requests.values():
            request.num_ready_tokens = sys.maxsize
        super().teardown()


class HostTierMachine(SchedulingMachine):
    """The same lives with a host tier that is smaller than the cache. Copies from it take a while."""

    @initialize(caching=st.just(True), host_slots=st.integers(1, 7))
    def start(self, caching: bool, host_slots: int = 1) -> None:
        self.table = make_table(NUM_BLOCKS, seqs=3, batched=7, caching=caching, host_slots=host_slots)
        self.scheduler = Scheduler(self.table)
        self.reservations = Reservations(self.table)
        self.imports = KVImports(self.table)
        self.damaged: set[int] = set()
        host = self.table.pool.host
        assert host is not None
        host.damaged_slots = self.take_damaged

    def take_damaged(self, slots: Sequence[int]) -> set[int]:
        """Return the damaged slots among these, each once: the next block that is stored there is intact."""
        found = self.damaged & set(slots)
        self.damaged -= found
        return found

    @rule(slot=st.integers(0, 6))
    def damage(self, slot: int) -> None:
        self.damaged.add(slot)

    @precondition(lambda self: self.table.loading)
    @rule(data=st.data())
    def copies_are_done(self, data: st.DataObject) -> None:
        self.table.finish_loading(data.draw(st.sampled_from(self.table.loading)))

    def step(self) -> StepResult:
        if not self.table.running and self.table.loading:
            self.table.finish_loading(self.table.loading[0])
        return super().step()


class RecurrentMachine(HostTierMachine):
    """The same lives of a model with recurrent states: each slot's states are those of exactly the tokens before the
    tokens that a step computes.
    """

    @initialize(
        caching=st.booleans(), host_slots=st.integers(0, 7), spare=st.integers(0, 2), step=st.sampled_from((0, 1, 3))
    )
    def start(self, caching: bool, host_slots: int = 1, spare: int = 2, step: int = 1) -> None:
        # A sequence of the longest prompt and answer needs 8 blocks, and the checkpoints before and after its prompt 4.
        self.table = make_table(
            NUM_BLOCKS + 5,
            seqs=3,
            batched=7,
            caching=caching,
            host_slots=host_slots * caching,
            state_blocks=2,
            num_spare_rows=spare,
            checkpoint_step_tokens=step,
        )
        self.scheduler = Scheduler(self.table)
        self.reservations = Reservations(self.table)
        self.imports = KVImports(self.table)
        self.damaged: set[int] = set()
        self.states = FakeStates(self.table)
        add = self.table.add
        # The router's hints: after a block, within a block, and beyond the prompt.
        self.table.add = lambda work, mode, now: add(structs.replace(work, branches=[4, 7, 400]), mode, now)  # type: ignore[method-assign]
        if self.table.pool.host is not None:
            self.table.pool.host.damaged_slots = self.take_damaged

    def take_damaged(self, slots: Sequence[int]) -> set[int]:
        self.states.copy()
        return super().take_damaged(slots)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.reserved)))
        names = self.reserved[request_id]
        count = data.draw(st.integers(0, len(names)))
        self.states.copy()
        self.states.receive(self.table.requests[request_id], set(names[:count]))
        self.reservations.mark_received(request_id, names[:count])
        self.reserved[request_id] = names[count:]

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        super().admit(data)
        self.states.copy()

    @rule(length=st.integers(BLOCK_TOKENS, LONGEST_PROMPT), prefix=st.integers(0, 2))
    def begin_import(self, length: int, prefix: int) -> None:
        # A pull: the KV of a prefix, and the checkpoint after it.
        import_id = RequestId(self.new_id())
        num_full = length // BLOCK_TOKENS
        names = hash_blocks(ROOT, [prefix] * num_full * BLOCK_TOKENS, BLOCK_TOKENS)
        states = checkpoint_hashes(names[-1], 2)
        missing = self.imports.begin(import_id, names + states)
        self.states.copy()
        for name, block in missing:
            tokens = (prefix,) * num_full * BLOCK_TOKENS
            self.states.fill(block, Part(tokens, states.index(name)) if name in states else None)
        if missing:
            self.imported[import_id] = [name for name, _ in missing]

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        # The decode worker fetches the states after the whole prompt.
        (prefill,) = self.table.requests[self.held[0]].sequences
        self.states.check_blocks(prefill.handoff_blocks, prefill.token_ids)
        super().release()

    def step(self) -> StepResult:
        if not self.table.running and self.table.loading:
            self.table.finish_loading(self.table.loading[0])
        plan = self.scheduler.schedule(0.0)
        self.states.copy()
        self.states.compute(plan)
        result = self.scheduler.apply(plan, made_up_tokens(plan), 0.0)
        self.table.take_copies()
        self.states.copy()
        self.table.check_invariants()
        return result


INNER = {"num_spare_rows": 1, "checkpoint_step_tokens": 1}


class RecurrentAheadMachine(AheadMachine):
    """The same lives of a model with recurrent states, with steps launched ahead."""

    @initialize(caching=st.booleans())
    def start(self, caching: bool) -> None:
        self.table = make_table(NUM_BLOCKS + 5, seqs=3, batched=7, caching=caching, state_blocks=2, **INNER)
        self.scheduler = Scheduler(self.table)
        self.reservations = Reservations(self.table)
        self.imports = KVImports(self.table)


class SeparateStepsMachine(SchedulingMachine):
    """The same lives with kernels that must not mix prompts and answers."""

    @initialize(caching=st.booleans())
    def start(self, caching: bool) -> None:
        super().start(caching)
        self.table.limits = replace(self.table.limits, mixes_prompts=False)
        schedule = self.scheduler.schedule

        def watched(now: float) -> ScheduledBatch:
            plan = schedule(now)
            assert len({chunk.length == 1 for chunk in plan.chunks}) < 2
            return plan

        self.scheduler.schedule = watched  # type: ignore[method-assign]


SchedulingMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)
AheadMachine.TestCase.settings = SchedulingMachine.TestCase.settings
AwaitedImagesMachine.TestCase.settings = SchedulingMachine.TestCase.settings
HostTierMachine.TestCase.settings = SchedulingMachine.TestCase.settings
RecurrentMachine.TestCase.settings = SchedulingMachine.TestCase.settings
RecurrentAheadMachine.TestCase.settings = SchedulingMachine.TestCase.settings
SeparateStepsMachine.TestCase.settings = SchedulingMachine.TestCase.settings
TestSeparateSteps = SeparateStepsMachine.TestCase
TestScheduling = SchedulingMachine.TestCase
TestRecurrent = RecurrentMachine.TestCase
TestRecurrentAhead = RecurrentAheadMachine.TestCase
TestHostTier = HostTierMachine.TestCase
TestSchedulingAhead = AheadMachine.TestCase
TestAwaitedImages = AwaitedImagesMachine.TestCase
