"""Random lives of requests of a model with cache groups: every token finds the KV that it sees, and nothing leaks."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from baton_serve.contracts.block_hash import hash_blocks, window_hashes
from baton_serve.contracts.identity import RequestId
from baton_serve.engine.core.kv_import import KVImports
from baton_serve.engine.core.outputs import NamedBlock, StepResult
from baton_serve.engine.core.reservations import Reservations
from baton_serve.engine.core.scheduler import ScheduledBatch, Scheduler
from tests.unit.engine.test_scheduling_machine import LONGEST_PROMPT, HostTierMachine
from tests.unit.engine.window_kv import FakeKV
from tests.unit.engine.work import BLOCK_TOKENS, ROOT, add, made_up_tokens, make_table, make_work, run_to_end, step

GROUPS, WINDOW = (0, 1, 2), 6
"""One layer with full attention and two with a window, which is not a multiple of a block."""


class WindowMachine(HostTierMachine):
    """The lives of requests of `test_scheduling_machine`, where chunks may be longer or shorter than the window."""

    def __init__(self) -> None:
        super().__init__()
        self.published: dict[RequestId, list[NamedBlock]] = {}

    @initialize(caching=st.booleans(), host_slots=st.integers(0, 12), num_blocks=st.integers(20, 30))
    def start(self, caching: bool, host_slots: int = 1, num_blocks: int = 20) -> None:
        # The longest prompt and answer need 8 blocks, and in each group with a window 5 more.
        self.table = make_table(
            num_blocks,
            seqs=3,
            batched=7,
            caching=caching,
            host_slots=host_slots * caching,
            layer_groups=GROUPS,
            window_tokens=WINDOW,
        )
        self.scheduler = Scheduler(self.table)
        self.reservations = Reservations(self.table)
        self.imports = KVImports(self.table)
        self.damaged: set[int] = set()
        self.kv = FakeKV(self.table)
        if self.table.pool.host is not None:
            self.table.pool.host.damaged_slots = self.take_damaged

    def take_damaged(self, slots: Sequence[int]) -> set[int]:
        self.kv.copy_tiers()
        return super().take_damaged(slots)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.reserved)))
        names = self.reserved[request_id]
        count = data.draw(st.integers(0, len(names)))
        self.kv.copy_tiers()
        request = self.table.requests[request_id]
        self.kv.fill(request.work.token_ids, {name: request.missing[name] for name in names[:count]})
        self.reservations.mark_received(request_id, names[:count])
        self.reserved[request_id] = names[count:]

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.kv.copy_tiers()
        take, self.table.take_copies = self.table.take_copies, list  # type: ignore[method-assign]
        super().admit(data)
        self.table.take_copies = take  # type: ignore[method-assign]
        self.kv.copy_forks()

    @rule(length=st.integers(BLOCK_TOKENS, LONGEST_PROMPT), prefix=st.integers(0, 2))
    def begin_import(self, length: int, prefix: int) -> None:
        # A pull: the KV of a prefix, and what the next token sees in groups with a window.
        import_id = RequestId(self.new_id())
        tokens = [prefix] * (length // BLOCK_TOKENS * BLOCK_TOKENS)
        names = self.table.windows.names_of(hash_blocks(ROOT, tokens, BLOCK_TOKENS), len(tokens))
        missing = self.imports.begin(import_id, names)
        self.kv.copy_tiers()
        self.kv.fill(tokens, dict(missing))
        if missing:
            self.imported[import_id] = [name for name, _ in missing]

    def step(self) -> StepResult:
        if not self.table.running and self.table.loading:
            self.table.finish_loading(self.table.loading[0])
        plan = self.compute(self.scheduler.schedule(0.0))
        result = self.scheduler.apply(plan, made_up_tokens(plan), 0.0)
        self.check(result)
        return result

    def compute(self, plan: ScheduledBatch) -> ScheduledBatch:
        self.kv.copy_tiers()
        self.kv.compute(plan)
        return plan

    def check(self, result: StepResult) -> None:
        self.kv.copy_forks()
        self.table.check_invariants()
        for done in result.completed:
            self.published.setdefault(done.request_id, []).extend(done.blocks)
        # A handoff sends the blocks that a decode worker asks for.
        for request_id in result.held:
            work = self.table.requests[request_id].work
            names = self.table.windows.names_of(hash_blocks(ROOT, work.token_ids, BLOCK_TOKENS), len(work.token_ids))
            assert [name for name, _ in self.published[request_id]] == names

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        work = self.table.requests[self.held[0]].work
        self.kv.check_named(work.token_ids, dict(self.published.pop(self.held[0])))
        super().release()


class WindowAheadMachine(WindowMachine):
    """The same lives, while the next step is always launched before this one's tokens are known."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: tuple[ScheduledBatch, StepResult] | None = None

    @initialize(caching=st.booleans(), num_blocks=st.integers(20, 30))
    def start(self, caching: bool, host_slots: int = 0, num_blocks: int = 20) -> None:
        super().start(caching, 0, num_blocks)

    def step(self) -> StepResult:
        plan, advanced = self.launched or self.launch(self.scheduler.schedule(0.0))
        self.launched = None
        if all(chunk.sequence.request.mode != "prefill" for chunk in plan.chunks):
            following = self.scheduler.schedule_ahead(0.0)
            self.launched = None if following is None else self.launch(following)
        result = self.scheduler.apply(plan, made_up_tokens(plan), 0.0, advanced=advanced)
        self.check(result)
        return result

    def launch(self, plan: ScheduledBatch) -> tuple[ScheduledBatch, StepResult]:
        self.compute(plan)
        return plan, self.scheduler.advance(plan)

    def has_work(self) -> bool:
        return self.launched is not None or super().has_work()


def test_a_long_sequence_keeps_few_blocks_in_groups_with_a_window() -> None:
    table = make_table(60, batched=8, layer_groups=GROUPS, window_tokens=WINDOW)
    scheduler = Scheduler(table)
    add(table, make_work("long", list(range(1, 121)), max_tokens=60))
    (sequence,) = table.requests[RequestId("long")].sequences
    num_tokens = 0
    while scheduler.has_work():
        num_tokens += len(step(table, scheduler).tokens)
        assert sum(map(bool, sequence.window_blocks)) <= table.limits.kept_window_blocks
    # 60 blocks would not hold 45 blocks of each of 3 groups.
    assert num_tokens == 60


def test_a_prefix_is_found_where_the_next_token_finds_its_window() -> None:
    table = make_table(60, batched=16, layer_groups=GROUPS, window_tokens=WINDOW)
    scheduler, tokens = Scheduler(table), list(range(1, 41))

    def num_cached(name: str, prompt: list[int]) -> int:
        add(table, make_work(name, prompt, max_tokens=2))
        request = table.requests[RequestId(name)]
        run_to_end(table, scheduler)
        return request.cached_tokens

    assert num_cached("first", tokens) == 0
    # Blocks that no token of a sequence sees stay cached while nobody needs their memory.
    assert num_cached("same", tokens) == 36
    assert num_cached("shorter", [*tokens[:20], 5, 6, 7]) == 20
    names = hash_blocks(ROOT, tokens, BLOCK_TOKENS)
    windows, found = table.windows, table.pool.find
    lost = window_hashes(names[3], 2)[1]
    table.pool.find = lambda names: found(one if one != lost else ROOT for one in names)  # type: ignore[method-assign]
    # A prefix without block 3 ends before it, or where the next token does not see it: it sees 5 tokens before itself.
    assert [windows.find_deepest(names[:count]) for count in (3, 4, 5, 6, 7)] == [3, 3, 3, 6, 7]


WindowMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
WindowAheadMachine.TestCase.settings = WindowMachine.TestCase.settings
TestWindow = WindowMachine.TestCase
TestWindowAhead = WindowAheadMachine.TestCase
