"""Who owns which block of the KV cache, and which content is cached under which name.

Pure accounting: no tensor, no clock. A block is *owned* (reference count > 0) or *free*; a free block
that has a name is still cached and can be shared again until it is evicted. Free blocks are taken in this
order: nameless ones, then least recently released; a released table gives back its last block first, so
prefixes outlive their ends. Block 0 is never given out: padding points at it.

With a host tier, what is evicted goes there, and what is found there comes back into free blocks: `find`, then `take`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton_serve.contracts.events import BlockEvent, BlocksRemoved, BlocksStored
from baton_serve.contracts.identity import BlockHash
from baton_serve.engine.core.host_tier import HostTier


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest prefix that is cached in any tier: its names and, for those in the device tier, their blocks."""

    names: list[BlockHash]
    blocks: list[int | None]

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_host(self) -> int:
        return self.blocks.count(None)


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        *,
        caching: bool = True,
        host: HostTier | None = None,
        versions: list[int] | None = None,
    ) -> None:
        """`num_blocks` counts block 0, which is never given out. `versions` has a number for each block, which grows
        whenever the block is given out."""
        self.host = host
        self._num_blocks = num_blocks
        self._versions = [0] * num_blocks if versions is None else versions
        self._caching = caching
        self._references = [0] * num_blocks
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._blocks: dict[BlockHash, int] = {}
        self._hits = [0] * num_blocks
        """Since the block got its name."""
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
        return bool(self._events) or (self.host is not None and self.host.has_events)

    def cached_block_hashes(self) -> list[BlockHash]:
        return list(self._blocks)

    def hot_block_hashes(self, limit: int) -> list[BlockHash]:
        """Those found most often, then those used last; a prefix before what follows it."""
        age = {block: number for number, block in enumerate(reversed(self._free), 1)}  # owned ones are in use now
        cached = sorted(self._blocks.items(), key=lambda item: (-self._hits[item[1]], age.get(item[1], 0)))
        return [name for name, _ in cached[:limit]]

    def match(self, names: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest cached prefix. Owns nothing: call `share` before anything else."""
        found: list[int] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, names: Iterable[BlockHash]) -> CachedPrefix:
        """As `match`, over both tiers; good until anything else is called, but for `num_taken` and `take`."""
        known: list[BlockHash] = []
        blocks: list[int | None] = []
        from_host: set[BlockHash] = set()
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                if self.host is None or name not in self.host or name in from_host:
                    break
                from_host.add(name)
            known.append(name)
            blocks.append(block)
        return CachedPrefix(known, blocks)

    def num_taken(self, prefix: CachedPrefix) -> int:
        """How many free blocks `take(prefix)` would use."""
        return prefix.num_host + self.num_unowned(block for block in prefix.blocks if block is not None)

    def take(self, prefix: CachedPrefix) -> list[int]:
        """Owns all of it; there must be `num_taken` free blocks. What lies in the host tier is on its way into blocks
        of its own, cached from now on: nothing may read or write them before the host tier's moves are done."""
        self.share(block for block in prefix.blocks if block is not None)
        if not prefix.num_host:
            return [block for block in prefix.blocks if block is not None]
        assert self.host is not None
        names = [name for name, block in zip(prefix.names, prefix.blocks, strict=True) if block is None]
        self.host.protect(names)
        fresh = self.allocate(len(names))
        assert fresh is not None, "no room for what lies in the host tier"
        self.host.load(names, fresh)
        self.register(names, fresh)
        following = iter(fresh)
        return [next(following) if block is None else block for block in prefix.blocks]

    def num_unowned(self, blocks: Iterable[int]) -> int:
        """How many free blocks `share(blocks)` would take."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
            self._hits[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Blocks without content, owned once; None, and nothing taken, when there are too few."""
        if count > len(self._free):
            return None
        taken: list[int] = []
        evicted: list[BlockHash] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._references[block] = 1
            self._versions[block] += 1
            name = self._names[block]
            if name is not None:
                self._names[block] = None
                del self._blocks[name]
                evicted.append(name)
                if self.host is not None:
                    self.host.store(name, block)
            taken.append(block)
        if evicted:
            self._record(BlocksRemoved(evicted))
        return taken

    def register(self, names: Sequence[BlockHash], blocks: Sequence[int]) -> None:
        """These owned blocks now hold the content of these names. A name cached elsewhere stays there."""
        if not self._caching:
            return
        stored: list[BlockHash] = []
        for name, block in zip(names, blocks, strict=True):
            assert self._references[block] > 0, "only an owned block can be given a name"
            if name not in self._blocks and self._names[block] is None:
                self._blocks[name] = block
                self._names[block] = name
                self._hits[block] = 0
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

    def block_of(self, name: BlockHash) -> int | None:
        return self._blocks.get(name)

    def take_events(self) -> list[BlockEvent]:
        """What was stored and removed since the last call, in order; tier by tier."""
        events, self._events = self._events, []
        return events if self.host is None else events + self.host.take_events()

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
        if self.host is not None:
            self.host.check_invariants()

    def _record(self, event: BlockEvent) -> None:
        last = self._events[-1] if self._events else None
        if last is not None and type(last) is type(event):
            last.names.extend(event.names)
        else:
            self._events.append(event)
