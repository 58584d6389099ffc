"""The host tier beside the block pool: what is found holds what its name says, wherever it has been meanwhile."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton_serve.contracts.events import BlocksRemoved, BlocksStored
from baton_serve.contracts.identity import BlockHash
from baton_serve.engine.core.block_pool import BlockPool
from baton_serve.engine.core.host_tier import HostTier

NUM_BLOCKS = 8
DAMAGED = BlockHash(bytes([254]) * 16)
"""The content of a slot whose bytes have changed."""


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


def chain(root: int, length: int) -> list[BlockHash]:
    """Names as those of one prompt's blocks: chains of different roots share nothing."""
    return [name(root * 16 + i) for i in range(length)]


class Memory:
    """The content of blocks and slots, updated with each move."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: dict[int, BlockHash] = {}
        self.slots: dict[int, BlockHash] = {}
        assert pool.host is not None
        pool.host.damaged_slots = self.damaged

    def damaged(self, slots: Sequence[int]) -> set[int]:
        self.move()
        return {slot for slot in slots if self.slots[slot] == DAMAGED}

    def move(self) -> None:
        assert self.pool.host is not None
        for block, slot, is_to_host in self.pool.host.take_tier_copies():
            if is_to_host:
                self.slots[slot] = self.blocks[block]
            else:
                self.blocks[block] = self.slots[slot]

    def write(self, block: int, content: BlockHash) -> None:
        self.blocks[block] = content


def pool_of(num_blocks: int, num_slots: int) -> tuple[BlockPool, Memory]:
    pool = BlockPool(num_blocks + 1, host=HostTier(num_slots))
    return pool, Memory(pool)


def store(pool: BlockPool, memory: Memory, names: list[BlockHash]) -> list[int]:
    """As a prompt does: takes what is cached, computes the rest. Owned."""
    prefix = pool.find(names)
    while not pool.verify(prefix):
        prefix = pool.find(names)
    blocks = pool.take(prefix)
    fresh = pool.allocate(len(names) - len(prefix))
    assert fresh is not None
    memory.move()
    for block, content in zip(fresh, names[len(prefix) :], strict=True):
        memory.write(block, content)
    blocks += fresh
    pool.register(names, blocks)
    assert [memory.blocks[block] for block in blocks] == names
    return blocks


def test_an_evicted_prefix_comes_back_with_its_content() -> None:
    pool, memory = pool_of(4, 8)
    first = chain(1, 4)
    pool.release(store(pool, memory, first))
    pool.release(store(pool, memory, chain(2, 4)))
    assert pool.match(first) == []
    prefix = pool.find(first)
    assert (len(prefix), prefix.num_host) == (4, 4)
    store(pool, memory, first)
    assert pool.match(first) != []


def test_a_prefix_may_lie_in_both_tiers() -> None:
    pool, memory = pool_of(4, 8)
    first = chain(1, 3)
    pool.release(store(pool, memory, first))
    pool.release(store(pool, memory, chain(2, 2)))
    prefix = pool.find(first)
    assert [block is None for block in prefix.blocks] == [False, False, True]
    assert pool.num_taken(prefix) == 3


def test_what_comes_back_stays_in_the_host_tier_and_is_evicted_again_for_nothing() -> None:
    pool, memory = pool_of(2, 8)
    for root in (1, 2, 1, 2):
        pool.release(store(pool, memory, chain(root, 2)))
    assert pool.host is not None
    assert (pool.host.num_stored, pool.host.num_loaded) == (4, 4)


def test_the_least_recently_used_goes_first_and_ends_before_their_prefixes() -> None:
    pool, memory = pool_of(2, 3)
    for root in (1, 2, 3):
        pool.release(store(pool, memory, chain(root, 2)))
    assert pool.host is not None
    assert set(pool.host.names()) == {name(16), name(32), name(33)}


def test_slots_that_are_about_to_be_read_are_not_overwritten() -> None:
    pool, memory = pool_of(2, 2)
    pool.release(store(pool, memory, chain(1, 2)))
    pool.release(store(pool, memory, chain(2, 2)))
    store(pool, memory, chain(1, 2))  # evicts chain 2, for which no slot is left
    assert pool.find(chain(2, 2)).blocks == []


def test_a_damaged_block_is_dropped_and_ends_the_prefix() -> None:
    pool, memory = pool_of(4, 8)
    first = chain(1, 4)
    pool.release(store(pool, memory, first))
    pool.release(store(pool, memory, chain(2, 4)))
    assert pool.host is not None
    memory.slots[pool.host._slots[first[2]]] = DAMAGED
    pool.take_events()
    assert not pool.verify(pool.find(first))
    assert pool.find(first).names == first[:2]
    assert pool.host.num_damaged == 1
    assert pool.take_events() == [BlocksRemoved([first[2]], "host")]
    assert len(store(pool, memory, first)) == 4
    pool.host.check_invariants()


def test_events_name_the_tier() -> None:
    pool, memory = pool_of(1, 1)
    for root in (1, 2, 3):
        pool.release(store(pool, memory, chain(root, 1)))
    events = [event for event in pool.take_events() if event.tier == "host"]
    assert events == [
        BlocksStored([name(16)], "host"),
        BlocksRemoved([name(16)], "host"),
        BlocksStored([name(32)], "host"),
    ]


class TiersMachine(RuleBasedStateMachine):
    """Prompts come and go; what the model's memory holds must be what the names say, at every moment."""

    @initialize(num_slots=st.integers(1, 12))
    def start(self, num_slots: int) -> None:
        self.pool, self.memory = pool_of(NUM_BLOCKS, num_slots)
        self.owned: list[list[int]] = []
        self.reported: dict[str, set[BlockHash]] = {"device": set(), "host": set()}

    @rule(root=st.integers(1, 6), length=st.integers(1, 6))
    def arrive(self, root: int, length: int) -> None:
        names = chain(root, length)
        prefix = self.pool.find(names)
        if self.pool.num_taken(prefix) + length - len(prefix) <= self.pool.num_free:
            self.owned.append(store(self.pool, self.memory, names))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.pool.release(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @rule(count=st.integers(1, 4))
    def scratch(self, count: int) -> None:
        """Nameless blocks: the end of an answer."""
        blocks = self.pool.allocate(count)
        if blocks is not None:
            self.memory.move()
            for block in blocks:
                self.memory.write(block, name(255))
            self.owned.append(blocks)

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """The bytes of a slot change without an event."""
        assert self.pool.host is not None
        self.memory.move()
        if self.pool.host._slots:
            self.memory.slots[data.draw(st.sampled_from(sorted(self.pool.host._slots.values())))] = DAMAGED

    @invariant()
    def nothing_is_lost_or_stale(self) -> None:
        pool, host = self.pool, self.pool.host
        assert host is not None
        pool.check_invariants([block for blocks in self.owned for block in blocks])
        self.memory.move()
        for known in pool.cached_block_hashes():
            block = pool.block_of(known)
            assert block is not None and self.memory.blocks[block] == known
        for known, slot in host._slots.items():
            assert self.memory.slots[slot] in (known, DAMAGED)
        for event in pool.take_events():
            if isinstance(event, BlocksStored):
                self.reported[event.tier] |= set(event.names)
            else:
                self.reported[event.tier] -= set(event.names)
        assert self.reported == {"device": set(pool.cached_block_hashes()), "host": set(host.names())}


TiersMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=40, deadline=None)
TestTiers = TiersMachine.TestCase
