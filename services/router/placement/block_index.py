"""Decides how long a prefix of a prompt each instance has cached: the router's index of KV blocks. Pure.

It is filled from snapshots and numbered event batches of the instances. Blocks of requests that were just placed count
as cached for a while, until their events arrive. An instance is one bit of an integer, so that one walk over the block
hashes of a prompt finds the prefixes of all instances together.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import repeat
from math import inf
from operator import or_

import msgspec

from baton_serve.contracts.block_hash import checkpoint_hash
from baton_serve.contracts.events import BlockEvent, BlocksRemoved, EventBatch, Tier
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId
from baton_serve.contracts.messages import Snapshot


class Match(msgspec.Struct, frozen=True):
    """How much of a prompt's beginning one instance has cached: the length of this prefix in blocks."""

    device: int = 0
    """Length of the prefix that lies in the device tier."""
    total: int = 0
    """Length of the prefix in both tiers together, device and host."""


@dataclass(slots=True)
class _Source:
    """An instance whose cached blocks the index knows, and the state of its event stream."""

    generation: Generation
    bit: int
    """Power of two that stands for the instance in the tables."""
    sequence: int = 0
    """Number of the last event batch that was applied."""
    early: list[EventBatch] | None = None
    """Batches that are kept until the next snapshot arrives; None while no snapshot is awaited."""
    expected_until: dict[BlockHash, float] = field(default_factory=dict)
    """When the last expectation of each block ends. It has the blocks whose bit is set in `BlockIndex._expected`."""


@dataclass(frozen=True, slots=True)
class _Expectation:
    """Blocks that count as cached on an instance until `until`, a time of the router's clock, because a request for
    them was sent there.
    """

    until: float
    instance: InstanceId
    generation: Generation
    block_hashes: Sequence[BlockHash]


class BlockIndex:
    """Knows which KV blocks each instance has cached, from the instances' events, and finds on every instance how much
    of a prompt it has cached.

    `Cluster` owns it and calls it on the event loop. A batch of events or a snapshot is ignored unless it has the
    generation that was given to `add`: a restarted process starts with an empty cache.
    """

    def __init__(self) -> None:
        self._sources: dict[InstanceId, _Source] = {}
        # In each table, the value has the bits of all instances that have the block.
        self._device: dict[BlockHash, int] = {}
        self._host: dict[BlockHash, int] = {}
        self._expected: dict[BlockHash, int] = {}
        # In the order of `until`, since every expectation lasts equally long.
        self._expectations: deque[_Expectation] = deque()

    def add(self, instance: InstanceId, generation: Generation) -> None:
        """Add an instance without any blocks. Its batches of events are kept, and applied after its first snapshot."""
        self.remove(instance)
        # Reuse the bits of removed instances: they keep the integers short.
        used = {source.bit for source in self._sources.values()}
        bit = next(1 << i for i in range(len(used) + 1) if 1 << i not in used)
        self._sources[instance] = _Source(generation=generation, bit=bit, early=[])

    def remove(self, instance: InstanceId) -> None:
        """Remove an instance and all its blocks from the index."""
        source = self._sources.pop(instance, None)
        if source is not None:
            for table in (self._device, self._host, self._expected):
                _clear(table, source.bit)

    def wait_for_snapshot(self, instance: InstanceId, generation: Generation) -> None:
        """Record that a batch of an instance's events was lost. Later batches are kept until its next snapshot; blocks
        that are known already still count.
        """
        source = self._sources.get(instance)
        if source is not None and source.generation == generation and source.early is None:
            source.early = []

    def is_waiting(self, instance: InstanceId) -> bool:
        """Return whether the index needs a snapshot of the instance's blocks, because the instance is new or a batch of
        its events was lost.
        """
        source = self._sources.get(instance)
        return source is not None and source.early is not None

    def load(self, snapshot: Snapshot) -> int | None:
        """Replace the known blocks of an instance by those of a snapshot, and then apply the batches of events that
        were kept.

        Return the number of the last batch that is applied now, or None if the instance or generation is unknown.
        """
        source = self._sources.get(snapshot.instance)
        if source is None or source.generation != snapshot.generation:
            return None
        for table, block_hashes in ((self._device, snapshot.device), (self._host, snapshot.host)):
            _clear(table, source.bit)
            for block_hash in block_hashes:
                table[block_hash] = table.get(block_hash, 0) | source.bit
        source.sequence = snapshot.sequence
        # Set it to None first: otherwise `apply` would keep the batches again. Batches that the snapshot contains are
        # skipped there by their number; if one is missing after it, `apply` waits for another snapshot.
        early, source.early = source.early or [], None
        for batch in early:
            self.apply(batch)
        return source.sequence

    def apply(self, batch: EventBatch) -> bool:
        """Apply a batch of an instance's events. Return False if the batch before it was lost: the caller must then
        request a snapshot.
        """
        source = self._sources.get(batch.instance)
        if source is None or source.generation != batch.generation:
            return True
        if source.early is not None:
            source.early.append(batch)
            return True
        if batch.sequence <= source.sequence:
            return True
        if batch.sequence != source.sequence + 1:
            source.early = [batch]
            return False
        source.sequence = batch.sequence
        for event in batch.events:
            self._apply(event, source)
        return True

    def expect(self, instance: InstanceId, block_hashes: Sequence[BlockHash], *, until: float) -> None:
        """Count blocks as cached on an instance until the time `until`, because a request for them has been sent there.

        Without this, prompts with the same prefix that arrive before the instance's events would be computed elsewhere.
        """
        source = self._sources.get(instance)
        if source is None or not block_hashes:
            return
        for block_hash in block_hashes:
            self._expected[block_hash] = self._expected.get(block_hash, 0) | source.bit
            source.expected_until[block_hash] = until
        self._expectations.append(_Expectation(until, instance, source.generation, block_hashes))

    def expire(self, now: float) -> None:
        """Remove blocks that were expected on an instance until a time before `now`. Call it before `match`."""
        while self._expectations and self._expectations[0].until <= now:
            past = self._expectations.popleft()
            source = self._sources.get(past.instance)
            if source is not None and source.generation == past.generation:
                for block_hash in past.block_hashes:
                    # A later request may expect the same block for longer.
                    if source.expected_until.get(block_hash, inf) <= now:
                        self._drop_expected(block_hash, source)

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[InstanceId, Match]:
        """Return for every instance how much of the prompt with these block hashes it has cached, including expected
        blocks. Instances without the first block are left out.
        """
        if not block_hashes:
            return {}
        device = self._walk(block_hashes, (self._device, self._expected))
        if not self._host:
            return {instance: Match(length, length) for instance, length in device.items()}
        total = self._walk(block_hashes, (self._device, self._expected, self._host))
        return {instance: Match(device.get(instance, 0), length) for instance, length in total.items()}

    def up_to_checkpoints(
        self, block_hashes: Sequence[BlockHash], matches: Mapping[InstanceId, Match], state_blocks: int
    ) -> dict[InstanceId, Match]:
        """Shorten the prefixes that `match` has found to the last checkpoint of recurrent states in them: a sequence
        can continue only where its states are cached too. A checkpoint has `state_blocks` blocks.
        """
        device = {instance: match.device for instance, match in matches.items()}
        device = self._cut(block_hashes, device, state_blocks, (self._device, self._expected))
        if not self._host:
            return {instance: Match(length, length) for instance, length in device.items()}
        total = {instance: match.total for instance, match in matches.items()}
        total = self._cut(block_hashes, total, state_blocks, (self._device, self._expected, self._host))
        return {instance: Match(device.get(instance, 0), length) for instance, length in total.items()}

    def held(self, block_hashes: Sequence[BlockHash], *, state_blocks: int = 0) -> dict[InstanceId, int]:
        """Return for each instance how many blocks of the prompt's beginning it has reported as cached, in any tier.

        Blocks that are only expected do not count, because another instance cannot fetch a block that may not exist
        yet. With `state_blocks`, the prefixes end at checkpoints, as in `up_to_checkpoints`.
        """
        tables = (self._device, self._host)
        lengths = self._walk(block_hashes, tables)
        return self._cut(block_hashes, lengths, state_blocks, tables) if state_blocks else lengths

    def check_invariants(self) -> None:
        """Assert that every instance bit in the tables of blocks belongs to exactly one known instance. For tests."""
        known = 0
        for source in self._sources.values():
            assert known & source.bit == 0, "two instances share a bit"
            known |= source.bit
        for source in self._sources.values():
            expected = {block_hash for block_hash, owners in self._expected.items() if owners & source.bit}
            assert expected == source.expected_until.keys(), "an expected block without an end, or an end without one"
        for table in (self._device, self._host, self._expected):
            for owners in table.values():
                assert owners, "a block without an owner"
                assert owners & ~known == 0, "a block of an instance that was removed"

    def _walk(self, block_hashes: Sequence[BlockHash], tables: Sequence[dict[BlockHash, int]]) -> dict[InstanceId, int]:
        """Return for each instance how many of the first `block_hashes` it has in any of the `tables`. Instances with 0
        are left out.
        """
        by_bit = {source.bit: instance for instance, source in self._sources.items()}
        alive = sum(by_bit)  # the instances that have every block so far
        lengths: dict[InstanceId, int] = {}
        length = 0
        for owners in _owners(block_hashes, [table for table in tables if table]):
            if owners & alive != alive:
                _record_length(lengths, by_bit, alive & ~owners, length)
                alive &= owners
                if not alive:
                    break
            length += 1
        _record_length(lengths, by_bit, alive, length)
        return lengths

    def _cut(
        self,
        block_hashes: Sequence[BlockHash],
        lengths: Mapping[InstanceId, int],
        state_blocks: int,
        tables: Sequence[dict[BlockHash, int]],
    ) -> dict[InstanceId, int]:
        """Return for each instance the length of its prefix, in blocks, up to its last checkpoint in `tables`.
        `lengths` has the full lengths. Instances with 0 are left out.
        """
        found: dict[InstanceId, int] = {}
        rest = {self._sources[instance].bit: instance for instance in lengths}
        for count in range(max(lengths.values(), default=0), 0, -1):
            if not rest:
                break
            # The blocks of a checkpoint are released from last to first: while the last one is cached, all are.
            name = checkpoint_hash(block_hashes[count - 1], state_blocks - 1)
            owners = reduce(or_, [table.get(name, 0) for table in tables])
            for bit in [bit for bit in rest if bit & owners and lengths[rest[bit]] >= count] if owners else ():
                found[rest.pop(bit)] = count
        return found

    def _apply(self, event: BlockEvent, source: _Source) -> None:
        table = self._table(event.tier)
        for block_hash in event.names:
            if isinstance(event, BlocksRemoved):
                _drop(table, block_hash, source.bit)
                # The block existed and was evicted, so it must not count as expected any more. Blocks are expected on
                # the device, so an eviction from the host tier says nothing about them.
                if event.tier == "device":
                    self._drop_expected(block_hash, source)
            else:
                table[block_hash] = table.get(block_hash, 0) | source.bit

    def _drop_expected(self, block_hash: BlockHash, source: _Source) -> None:
        _drop(self._expected, block_hash, source.bit)
        source.expected_until.pop(block_hash, None)

    def _table(self, tier: Tier) -> dict[BlockHash, int]:
        return self._device if tier == "device" else self._host


def _drop(table: dict[BlockHash, int], block_hash: BlockHash, bit: int) -> None:
    owners = table.get(block_hash, 0) & ~bit
    if owners:
        table[block_hash] = owners
    else:
        # An entry without owners would stay forever: the table must not grow with all blocks that ever existed.
        table.pop(block_hash, None)


def _clear(table: dict[BlockHash, int], bit: int) -> None:
    for block_hash in [block_hash for block_hash, owners in table.items() if owners & bit]:
        _drop(table, block_hash, bit)


def _owners(block_hashes: Sequence[BlockHash], tables: Sequence[dict[BlockHash, int]]) -> Iterator[int]:
    """Iterate over the blocks and yield, for each, the instances that have it in any of the `tables`: one bit per
    instance.
    """
    # `map` runs the loop in C: a prompt may have thousands of blocks, and every placement walks over them.
    if len(tables) == 1:
        return map(tables[0].get, block_hashes, repeat(0))
    columns = [map(table.get, block_hashes, repeat(0)) for table in tables]
    return (reduce(or_, owners) for owners in zip(*columns, strict=True))


def _record_length(lengths: dict[InstanceId, int], by_bit: dict[int, InstanceId], bits: int, length: int) -> None:
    """Store `length` as the prefix length of each instance whose bit is set in `bits`."""
    while bits and length:
        bit = bits & -bits
        lengths[by_bit[bit]] = length
        bits ^= bit
