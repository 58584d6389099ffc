"""Which instance caches which block, as far as this router knows.

Filled from snapshots and numbered event batches; blocks of work just placed count as cached for a while before their
event arrives. Pure: no clock, no I/O. An instance is one bit of an integer, so one walk over a prompt's names
serves all instances at once.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import repeat
from operator import or_

import msgspec

from baton_serve.contracts.events import BlockEvent, BlocksRemoved, EventBatch, Tier
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId
from baton_serve.contracts.messages import Snapshot


class Match(msgspec.Struct, frozen=True):
    """Length of a prompt's cached prefix in blocks. `total` also counts blocks that lie in the host tier."""

    device: int = 0
    total: int = 0


@dataclass(slots=True)
class _Source:
    generation: Generation
    bit: int
    sequence: int = 0
    early: list[EventBatch] | None = None
    """Batches that wait for a snapshot; None once it has come."""


@dataclass(frozen=True, slots=True)
class _Expectation:
    until: float
    instance: InstanceId
    generation: Generation
    names: Sequence[BlockHash]


class BlockIndex:
    """Every batch and snapshot must name the generation given to `add`; others are ignored."""

    def __init__(self) -> None:
        self._sources: dict[InstanceId, _Source] = {}
        self._device: dict[BlockHash, int] = {}
        self._host: dict[BlockHash, int] = {}
        self._expected: dict[BlockHash, int] = {}
        self._expectations: deque[_Expectation] = deque()

    def add(self, instance: InstanceId, generation: Generation) -> None:
        """Starts to listen to an instance: batches wait until its snapshot comes."""
        self.remove(instance)
        used = {source.bit for source in self._sources.values()}
        bit = next(1 << i for i in range(len(used) + 1) if 1 << i not in used)
        self._sources[instance] = _Source(generation=generation, bit=bit, early=[])

    def remove(self, instance: InstanceId) -> None:
        """Forgets all that the instance cached."""
        source = self._sources.pop(instance, None)
        if source is not None:
            for table in (self._device, self._host, self._expected):
                _clear(table, source.bit)

    def wait_for_snapshot(self, instance: InstanceId, generation: Generation) -> None:
        """A batch was missed: what is known stays as a guess, and later batches wait."""
        source = self._sources.get(instance)
        if source is not None and source.generation == generation and source.early is None:
            source.early = []

    def is_waiting(self, instance: InstanceId) -> bool:
        """Whether it takes a snapshot to know the instance's blocks again."""
        source = self._sources.get(instance)
        return source is not None and source.early is not None

    def load(self, snapshot: Snapshot) -> int | None:
        """Replaces what is known of the instance. Returns the last batch number now applied, None for a stranger."""
        source = self._sources.get(snapshot.instance)
        if source is None or source.generation != snapshot.generation:
            return None
        for table, names in ((self._device, snapshot.device), (self._host, snapshot.host)):
            _clear(table, source.bit)
            for name in names:
                table[name] = table.get(name, 0) | source.bit
        source.sequence = snapshot.sequence
        early, source.early = source.early or [], None
        for batch in early:
            self.apply(batch)
        return source.sequence

    def apply(self, batch: EventBatch) -> bool:
        """False when a batch is missing before this one: a snapshot is needed."""
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
            self._apply(event, source.bit)
        return True

    def expect(self, instance: InstanceId, names: Sequence[BlockHash], *, until: float) -> None:
        """These blocks will soon be cached there. The guess ends at `until` or with the instance."""
        source = self._sources.get(instance)
        if source is None or not names:
            return
        for name in names:
            self._expected[name] = self._expected.get(name, 0) | source.bit
        self._expectations.append(_Expectation(until, instance, source.generation, names))

    def expire(self, now: float) -> None:
        """Drops guesses whose time is over. Call before `match`."""
        while self._expectations and self._expectations[0].until <= now:
            past = self._expectations.popleft()
            source = self._sources.get(past.instance)
            if source is not None and source.generation == past.generation:
                for name in past.names:
                    _drop(self._expected, name, source.bit)

    def match(self, names: Sequence[BlockHash]) -> dict[InstanceId, Match]:
        """Cached prefix of every instance that has at least the first block."""
        if not names:
            return {}
        device = self._walk(names, (self._device, self._expected))
        if not self._host:
            return {instance: Match(length, length) for instance, length in device.items()}
        total = self._walk(names, (self._device, self._expected, self._host))
        return {instance: Match(device.get(instance, 0), length) for instance, length in total.items()}

    def held(self, names: Sequence[BlockHash]) -> dict[InstanceId, int]:
        """As `match`, of blocks that were reported alone: in any tier, without guesses."""
        return self._walk(names, (self._device, self._host))

    def check_invariants(self) -> None:
        known = 0
        for source in self._sources.values():
            assert known & source.bit == 0, "two instances share a bit"
            known |= source.bit
        for table in (self._device, self._host, self._expected):
            for owners in table.values():
                assert owners, "a block that nobody has"
                assert owners & ~known == 0, "a block of an instance that is gone"

    def _walk(self, names: Sequence[BlockHash], tables: Sequence[dict[BlockHash, int]]) -> dict[InstanceId, int]:
        """Length of each instance's prefix in the union of `tables`."""
        by_bit = {source.bit: instance for instance, source in self._sources.items()}
        alive = sum(by_bit)
        lengths: dict[InstanceId, int] = {}
        length = 0
        for owners in _owners(names, [table for table in tables if table]):
            if owners & alive != alive:
                _note(lengths, by_bit, alive & ~owners, length)
                alive &= owners
                if not alive:
                    break
            length += 1
        _note(lengths, by_bit, alive, length)
        return lengths

    def _apply(self, event: BlockEvent, bit: int) -> None:
        table = self._table(event.tier)
        for name in event.names:
            if isinstance(event, BlocksRemoved):
                _drop(table, name, bit)
                _drop(self._expected, name, bit)
            else:
                table[name] = table.get(name, 0) | bit

    def _table(self, tier: Tier) -> dict[BlockHash, int]:
        return self._device if tier == "device" else self._host


def _drop(table: dict[BlockHash, int], name: BlockHash, bit: int) -> None:
    owners = table.get(name, 0) & ~bit
    if owners:
        table[name] = owners
    else:
        table.pop(name, None)


def _clear(table: dict[BlockHash, int], bit: int) -> None:
    for name in [name for name, owners in table.items() if owners & bit]:
        _drop(table, name, bit)


def _owners(names: Sequence[BlockHash], tables: Sequence[dict[BlockHash, int]]) -> Iterator[int]:
    """Who has each block, as bits."""
    if len(tables) == 1:
        return map(tables[0].get, names, repeat(0))
    columns = [map(table.get, names, repeat(0)) for table in tables]
    return (reduce(or_, owners) for owners in zip(*columns, strict=True))


def _note(lengths: dict[InstanceId, int], by_bit: dict[int, InstanceId], bits: int, length: int) -> None:
    while bits and length:
        bit = bits & -bits
        lengths[by_bit[bit]] = length
        bits ^= bit
