"""The prefix cache of a simulated instance: which blocks are owned, which are cached and free, and in which order they
are evicted.

It behaves as the engine's cache: empty blocks are used first, then the least recently released. Of a sequence that
ends, the last block is evicted before the first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton_serve.contracts.events import BlockEvent, BlocksRemoved, BlocksStored
from baton_serve.contracts.identity import BlockHash


@dataclass(slots=True)
class Holding:
    """The blocks of one sequence: those with a known hash (`names`), and the number of others."""

    names: list[BlockHash] = field(default_factory=list)
    nameless: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.names) + self.nameless


class BlockCache:
    """Counts blocks instead of storing them. `check_invariants` verifies the counts."""

    def __init__(self, num_blocks: int) -> None:
        self.num_total = num_blocks
        self._num_owned = 0
        self._owners: dict[BlockHash, int] = {}
        """Number of sequences that own each cached block; 0 for cached blocks that are free."""
        self._free: OrderedDict[BlockHash, None] = OrderedDict()
        """Cached blocks without an owner, the next to evict first."""
        self._events: list[BlockEvent] = []

    @property
    def num_free(self) -> int:
        return self.num_total - self._num_owned

    def match(self, names: Sequence[BlockHash]) -> int:
        """Return the length of the longest cached prefix, in blocks."""
        length = 0
        for name in names:
            if name not in self._owners:
                break
            length += 1
        return length

    def num_needed(self, cached: Sequence[BlockHash], fresh: int) -> int:
        """Return the number of free blocks that `take` would use."""
        return fresh + sum(self._owners[name] == 0 for name in cached)

    def take(self, cached: Sequence[BlockHash], fresh: int) -> Holding:
        """Give a sequence the cached blocks and `fresh` new ones. The caller has checked that enough blocks
        are free."""
        for name in cached:
            if self._owners[name] == 0:
                del self._free[name]
                self._num_owned += 1
            self._owners[name] += 1
        holding = Holding(list(cached))
        self.grow(holding, fresh)
        return holding

    def grow(self, holding: Holding, count: int) -> None:
        """Add new blocks to a holding, evicting cached ones if necessary."""
        assert count <= self.num_free, "more blocks than there are"
        num_empty = self.num_free - len(self._free)
        evicted = [self._free.popitem(last=False)[0] for _ in range(count - num_empty)]
        for name in evicted:
            del self._owners[name]
        if evicted:
            self._events.append(BlocksRemoved(evicted))
        self._num_owned += count
        holding.nameless += count

    def name(self, holding: Holding, names: Sequence[BlockHash]) -> None:
        """Give unnamed blocks of the holding these hashes. A hash that is cached already in another block is skipped,
        and the block stays unnamed."""
        stored = [name for name in names if name not in self._owners]
        for name in stored:
            self._owners[name] = 1
        holding.names += stored
        holding.nameless -= len(stored)
        if stored:
            self._events.append(BlocksStored(stored))

    def release(self, holding: Holding) -> None:
        """Return all blocks of a holding. Blocks with a hash stay cached."""
        # In reverse, so that the end of a prompt is evicted before its beginning.
        for name in reversed(holding.names):
            self._owners[name] -= 1
            if self._owners[name] == 0:
                self._free[name] = None
                self._num_owned -= 1
        self._num_owned -= holding.nameless
        holding.names, holding.nameless = [], 0

    def adopt(self, names: Sequence[BlockHash]) -> None:
        """Cache blocks that were received from another instance, as many as fit. They have no owner."""
        holding = self.take([], min(len(names), self.num_free))
        self.name(holding, names[: holding.num_blocks])
        self.release(holding)

    def names(self) -> list[BlockHash]:
        """Return the hashes of all cached blocks."""
        return list(self._owners)

    def take_events(self) -> list[BlockEvent]:
        """Return the changes since the last call."""
        events, self._events = self._events, []
        return events

    def check_invariants(self) -> None:
        owned_names = sum(owners > 0 for owners in self._owners.values())
        assert owned_names <= self._num_owned <= self.num_total
        assert set(self._free) == {name for name, owners in self._owners.items() if owners == 0}
        assert self._num_owned + len(self._free) <= self.num_total
