"""The index of cached blocks: events, snapshots, gaps, guesses."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton_serve.contracts.block_hash import checkpoint_hashes
from baton_serve.contracts.events import BlocksRemoved, BlocksStored, EventBatch, Tier
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId
from baton_serve.contracts.messages import Snapshot
from baton_serve.services.router.placement.block_index import BlockIndex, Match

A, B = InstanceId("a"), InstanceId("b")
G1, G2 = Generation(1), Generation(2)
NAMES = [BlockHash(bytes([i]) * 16) for i in range(6)]


def stored(sequence: int, names: list[BlockHash], *, instance: InstanceId = A, tier: Tier = "device") -> EventBatch:
    return EventBatch(instance, G1, sequence, [BlocksStored(names, tier)])


def removed(sequence: int, names: list[BlockHash], *, tier: Tier = "device") -> EventBatch:
    return EventBatch(A, G1, sequence, [BlocksRemoved(names, tier)])


def snapshot(
    sequence: int, names: list[BlockHash], *, instance: InstanceId = A, generation: Generation = G1
) -> Snapshot:
    return Snapshot(instance=instance, generation=generation, sequence=sequence, device=names)


@pytest.fixture
def index() -> Iterator[BlockIndex]:
    built = BlockIndex()
    built.add(A, G1)
    built.add(B, G1)
    built.load(snapshot(0, []))
    built.load(snapshot(0, [], instance=B))
    yield built
    built.check_invariants()


def test_the_longest_prefix_of_each_instance_is_found(index: BlockIndex) -> None:
    index.apply(stored(1, NAMES[:4]))
    index.apply(stored(1, NAMES[:2] + NAMES[3:], instance=B))
    assert index.match(NAMES) == {A: Match(4, 4), B: Match(2, 2)}
    assert index.match(NAMES[:3]) == {A: Match(3, 3), B: Match(2, 2)}
    assert index.match(NAMES[4:]) == {B: Match(2, 2)}
    assert index.match([]) == {}


def test_evicted_blocks_end_the_prefix(index: BlockIndex) -> None:
    index.apply(stored(1, NAMES))
    index.apply(removed(2, NAMES[3:4]))
    assert index.match(NAMES) == {A: Match(3, 3)}


def test_the_host_tier_goes_on_where_the_device_ends(index: BlockIndex) -> None:
    index.apply(stored(1, NAMES[:2]))
    index.apply(stored(2, NAMES[2:5], tier="host"))
    assert index.match(NAMES) == {A: Match(2, 5)}


def test_batches_before_the_snapshot_wait_for_it() -> None:
    index = BlockIndex()
    index.add(A, G1)
    assert index.apply(stored(3, NAMES[:1]))
    assert index.apply(stored(4, NAMES[1:2]))
    assert index.match(NAMES) == {}
    assert index.load(snapshot(3, NAMES[:1])) == 4
    assert index.match(NAMES) == {A: Match(2, 2)}
    assert not index.is_waiting(A)


def test_a_gap_is_reported_and_closed_by_a_snapshot(index: BlockIndex) -> None:
    index.apply(stored(1, NAMES[:1]))
    assert not index.apply(stored(3, NAMES[2:3]))
    assert index.is_waiting(A)
    assert index.match(NAMES) == {A: Match(1, 1)}
    assert index.load(snapshot(2, NAMES[:2])) == 3
    assert index.match(NAMES) == {A: Match(3, 3)}


def test_repeated_and_old_batches_change_nothing(index: BlockIndex) -> None:
    index.apply(stored(1, NAMES[:2]))
    index.apply(removed(2, NAMES[1:2]))
    assert index.apply(stored(1, NAMES[:2]))
    assert index.match(NAMES) == {A: Match(1, 1)}


def test_a_dead_generation_vanishes_and_cannot_return(index: BlockIndex) -> None:
    index.apply(stored(1, NAMES))
    index.remove(A)
    assert index.match(NAMES) == {}
    index.add(A, G2)
    assert index.load(snapshot(9, NAMES)) is None
    index.apply(stored(2, NAMES))
    assert index.match(NAMES) == {}
    index.load(snapshot(0, NAMES[:1], generation=G2))
    assert index.match(NAMES) == {A: Match(1, 1)}


def test_work_just_placed_counts_until_its_time_is_over(index: BlockIndex) -> None:
    index.expect(A, NAMES[:3], until=5.0)
    assert index.match(NAMES) == {A: Match(3, 3)}
    index.apply(stored(1, NAMES[:1]))
    index.expire(4.9)
    assert index.match(NAMES) == {A: Match(3, 3)}
    index.expire(5.0)
    assert index.match(NAMES) == {A: Match(1, 1)}


def test_a_block_that_a_later_request_expects_counts_until_that_request_s_time_is_over(index: BlockIndex) -> None:
    index.expect(A, NAMES[:3], until=5.0)
    index.expect(B, NAMES[:3], until=6.0)
    index.expect(A, NAMES[:2], until=8.0)
    index.expire(5.0)
    assert index.match(NAMES) == {A: Match(2, 2), B: Match(3, 3)}
    index.expire(6.0)
    assert index.match(NAMES) == {A: Match(2, 2)}
    index.expire(8.0)
    assert index.match(NAMES) == {}


def test_an_expected_block_that_was_evicted_and_is_expected_again_counts_for_the_later_time(index: BlockIndex) -> None:
    index.expect(A, NAMES[:2], until=5.0)
    index.apply(removed(1, NAMES[:2]))
    assert index.match(NAMES) == {}
    index.expect(A, NAMES[:2], until=8.0)
    index.expire(5.0)
    assert index.match(NAMES) == {A: Match(2, 2)}


def test_a_block_that_leaves_the_host_tier_is_still_expected_on_the_device(index: BlockIndex) -> None:
    index.apply(stored(1, NAMES[:2], tier="host"))
    index.expect(A, NAMES[:2], until=5.0)
    index.apply(removed(2, NAMES[:2], tier="host"))
    assert index.match(NAMES) == {A: Match(2, 2)}
    index.apply(removed(3, NAMES[:2]))
    assert index.match(NAMES) == {}


def test_guesses_end_with_their_generation(index: BlockIndex) -> None:
    index.expect(A, NAMES, until=5.0)
    index.remove(A)
    index.add(A, G2)
    assert index.match(NAMES) == {}
    index.expect(A, NAMES[:2], until=9.0)
    index.expire(6.0)
    assert index.match(NAMES) == {A: Match(2, 2)}


def test_with_recurrent_states_a_prefix_ends_at_its_last_checkpoint(index: BlockIndex) -> None:
    first, second, host = (checkpoint_hashes(NAMES[at], 2) for at in (1, 3, 4))
    index.apply(stored(1, NAMES + first))
    index.apply(stored(1, NAMES[:4] + first + second, instance=B))
    index.apply(stored(2, host, tier="host"))
    matches = index.match(NAMES)
    assert index.up_to_checkpoints(NAMES, matches, 2) == {A: Match(2, 5), B: Match(4, 4)}
    assert index.held(NAMES, state_blocks=2) == {A: 5, B: 4}
    assert index.up_to_checkpoints(NAMES[:3], index.match(NAMES[:3]), 2) == {A: Match(2, 2), B: Match(2, 2)}
    assert index.up_to_checkpoints(NAMES[:1], index.match(NAMES[:1]), 2) == {}
    # The last block of a checkpoint is evicted first.
    index.apply(removed(3, first[1:]))
    assert index.up_to_checkpoints(NAMES[:4], index.match(NAMES[:4]), 2) == {B: Match(4, 4)}


class IndexMachine(RuleBasedStateMachine):
    """Against a set of names per instance."""

    names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
    instances = st.sampled_from([A, B])

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.model: dict[InstanceId, set[BlockHash]] = {}
        self.sequence: dict[InstanceId, int] = {}

    @rule(instance=instances, names=names)
    def join(self, instance: InstanceId, names: list[BlockHash]) -> None:
        self.index.add(instance, G1)
        self.index.load(snapshot(7, names, instance=instance))
        self.model[instance], self.sequence[instance] = set(names), 7

    @rule(instance=instances)
    def leave(self, instance: InstanceId) -> None:
        self.index.remove(instance)
        self.model.pop(instance, None)

    @rule(instance=instances, names=names, is_stored=st.booleans())
    def event(self, instance: InstanceId, names: list[BlockHash], is_stored: bool) -> None:
        if instance in self.model:
            self.sequence[instance] += 1
            event = BlocksStored(names) if is_stored else BlocksRemoved(names)
            assert self.index.apply(EventBatch(instance, G1, self.sequence[instance], [event]))
            self.model[instance] = self.model[instance] | set(names) if is_stored else self.model[instance] - set(names)

    @invariant()
    def agrees(self) -> None:
        self.index.check_invariants()
        for start in (0, 2):
            found = self.index.match(NAMES[start:])
            for instance, names in self.model.items():
                length = next((i for i, n in enumerate(NAMES[start:]) if n not in names), len(NAMES) - start)
                assert found.get(instance, Match()).device == length
            assert set(found) <= set(self.model)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)
