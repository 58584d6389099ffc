"""A simulated instance's prefix cache: which blocks are owned, which are cached and free, and in which order they go.

As the engine's: empty blocks are taken first, then the least recently released; of a sequence that ends, the last block
goes before the first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton_serve.contracts.events import BlockEvent, BlocksRemoved, BlocksStored
from baton_serve.contracts.identity import BlockHash


@dataclass(slots=True)
class Holding:
    """Blocks that one sequence owns: named ones, and others."""

    names: list[BlockHash] = field(default_factory=list)
    nameless: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.names) + self.nameless


class BlockCache:
    def __init__(self, num_blocks: int) -> None:
        self.num_total = num_blocks
        self._num_owned = 0
        self._owners: dict[BlockHash, int] = {}
        """Of every cached block, how many sequences own it."""
        self._free: OrderedDict[BlockHash, None] = OrderedDict()
        self._events: list[BlockEvent] = []

    @property
    def num_free(self) -> int:
        return self.num_total - self._num_owned

    def match(self, names: Sequence[BlockHash]) -> int:
        """Length of the cached prefix, in blocks."""
        length = 0
        for name in names:
            if name not in self._owners:
                break
            length += 1
        return length

    def num_needed(self, cached: Sequence[BlockHash], fresh: int) -> int:
        """Free blocks that `take` would use."""
        return fresh + sum(self._owners[name] == 0 for name in cached)

    def take(self, cached: Sequence[BlockHash], fresh: int) -> Holding:
        """The caller has seen that there are enough free blocks."""
        for name in cached:
            if self._owners[name] == 0:
                del self._free[name]
                self._num_owned += 1
            self._owners[name] += 1
        holding = Holding(list(cached))
        self.grow(holding, fresh)
        return holding

    def grow(self, holding: Holding, count: int) -> None:
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
        """Nameless blocks of the holding now have this content. What is cached elsewhere already stays nameless."""
        stored = [name for name in names if name not in self._owners]
        for name in stored:
            self._owners[name] = 1
        holding.names += stored
        holding.nameless -= len(stored)
        if stored:
            self._events.append(BlocksStored(stored))

    def release(self, holding: Holding) -> None:
        for name in reversed(holding.names):
            self._owners[name] -= 1
            if self._owners[name] == 0:
                self._free[name] = None
                self._num_owned -= 1
        self._num_owned -= holding.nameless
        holding.names, holding.nameless = [], 0

    def adopt(self, names: Sequence[BlockHash]) -> None:
        """Blocks with this content have come from elsewhere, as many as fit; nobody owns them."""
        holding = self.take([], min(len(names), self.num_free))
        self.name(holding, names[: holding.num_blocks])
        self.release(holding)

    def names(self) -> list[BlockHash]:
        return list(self._owners)

    def take_events(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events

    def check_invariants(self) -> None:
        owned_names = sum(owners > 0 for owners in self._owners.values())
        assert owned_names <= self._num_owned <= self.num_total
        assert set(self._free) == {name for name, owners in self._owners.items() if owners == 0}
        assert self._num_owned + len(self._free) <= self.num_total
