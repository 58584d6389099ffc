"""Who owns which block of the KV cache, and which content is cached under which name.

Pure accounting: no tensor, no clock. A block is *owned* (reference count > 0) or *free*; a free block
that has a name is still cached and can be shared again until it is evicted. Free blocks are taken in this
order: nameless ones, then least recently released; a released table gives back its last block first, so
prefixes outlive their ends. Block 0 is never given out: padding points at it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from contracts.events import BlockEvent, BlocksRemoved, BlocksStored
from contracts.identity import BlockName


class BlockPool:
    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        """`num_blocks` counts block 0, which is never given out."""
        self._num_blocks = num_blocks
        self._caching = caching
        self._references = [0] * num_blocks
        self._names: list[BlockName | None] = [None] * num_blocks
        self._blocks: dict[BlockName, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._events: list[BlockEvent] = []

    @property
    def num_total(self) -> int:
        return self._num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached but unowned ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._blocks)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def cached_names(self) -> list[BlockName]:
        return list(self._blocks)

    def match(self, names: Iterable[BlockName]) -> list[int]:
        """The blocks of the longest cached prefix. Owns nothing: call `share` before anything else."""
        found: list[int] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def num_unowned(self, blocks: Iterable[int]) -> int:
        """How many free blocks `share(blocks)` would take."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Blocks without content, owned once; None, and nothing taken, when there are too few."""
        if count > len(self._free):
            return None
        taken: list[int] = []
        evicted: list[BlockName] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._references[block] = 1
            name = self._names[block]
            if name is not None:
                self._names[block] = None
                del self._blocks[name]
                evicted.append(name)
            taken.append(block)
        if evicted:
            self._record(BlocksRemoved(evicted))
        return taken

    def register(self, names: Sequence[BlockName], blocks: Sequence[int]) -> None:
        """These owned blocks now hold the content of these names. A name cached elsewhere stays there."""
        if not self._caching:
            return
        stored: list[BlockName] = []
        for name, block in zip(names, blocks, strict=True):
            assert self._references[block] > 0, "only an owned block can be given a name"
            if name not in self._blocks and self._names[block] is None:
                self._blocks[name] = block
                self._names[block] = name
                stored.append(name)
        if stored:
            self._record(BlocksStored(stored))

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one ownership of each, the last first; the named ones stay cached."""
        for block in reversed(blocks):
            assert self._references[block] > 0, "a block was released more often than owned"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._names[block] is None:
                    self._free.move_to_end(block, last=False)

    def block_of(self, name: BlockName) -> int | None:
        return self._blocks.get(name)

    def take_events(self) -> list[BlockEvent]:
        """What was stored and removed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check_invariants(self, owned: Sequence[int]) -> None:
        """`owned` lists every ownership that exists outside, repeated as often as it is held."""
        expected = [0] * self._num_blocks
        for block in owned:
            expected[block] += 1
        assert self._references == expected, "reference counts differ from the owners"
        assert expected[0] == 0, "block 0 is owned"
        assert set(self._free) == {b for b in range(1, self._num_blocks) if not expected[b]}
        assert {block: name for name, block in self._blocks.items()} == {
            block: name for block, name in enumerate(self._names) if name is not None
        }
        named = [self._names[block] is not None for block in self._free]
        assert named == sorted(named), "a cached block would be evicted before a nameless one"

    def _record(self, event: BlockEvent) -> None:
        last = self._events[-1] if self._events else None
        if last is not None and type(last) is type(event):
            last.names.extend(event.names)
        else:
            self._events.append(event)
