"""The block pool: which KV blocks are owned, and which content is cached under which block hash.

Pure accounting: no tensor, no clock. A block is *owned* (reference count > 0) or *free*. A free block that has a hash
is still cached and can be shared again until it is evicted. Free blocks are allocated in this order: first blocks
without a hash, then the least recently released. The blocks of a sequence are released from last to first, so that
prefixes stay cached longer than what follows them. Block 0 is never allocated: padding refers to it.

With a host tier, evicted blocks are copied there and found blocks are copied back into free blocks: `find`, `verify`,
then `take`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton_serve.contracts.events import BlockEvent, BlocksRemoved, BlocksStored
from baton_serve.contracts.identity import BlockHash
from baton_serve.engine.core.host_tier import HostTier


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest cached prefix in both tiers: its hashes, and the device blocks of these hashes (None: in the host
    tier)."""

    names: list[BlockHash]
    blocks: list[int | None]

    def __len__(self) -> int:
        return len(self.blocks)

    def __add__(self, other: "CachedPrefix") -> "CachedPrefix":
        """Return both as one, so that `BlockPool.take` takes all blocks or none. They must have no hash in common."""
        return CachedPrefix(self.names + other.names, self.blocks + other.blocks)

    def first(self, count: int) -> "CachedPrefix":
        """Return the first `count` blocks."""
        return CachedPrefix(self.names[:count], self.blocks[:count])

    @property
    def num_host(self) -> int:
        """Return how many blocks of the prefix are in the host tier only."""
        return self.blocks.count(None)

    @property
    def host_names(self) -> list[BlockHash]:
        """Return the hashes of the blocks that are in the host tier only."""
        return [name for name, block in zip(self.names, self.blocks, strict=True) if block is None]


class BlockPool:
    """Allocates the KV blocks of one engine and keeps the prefix cache. Engine thread only."""

    def __init__(
        self,
        num_blocks: int,
        *,
        caching: bool = True,
        host: HostTier | None = None,
        versions: list[int] | None = None,
    ) -> None:
        """`num_blocks` includes block 0, which is never allocated. `versions` has one number per block, which grows
        whenever the block is allocated, so that its reuse can be detected."""
        self.host = host
        self._num_blocks = num_blocks
        self._versions = [0] * num_blocks if versions is None else versions
        self._caching = caching
        self._references = [0] * num_blocks
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._blocks: dict[BlockHash, int] = {}
        self._hits = [0] * num_blocks
        """By block: how often it was shared since it got its hash."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._events: list[BlockEvent] = []

    @property
    def num_total(self) -> int:
        """Return the number of blocks that can be allocated in all: without block 0."""
        return self._num_blocks - 1

    @property
    def num_free(self) -> int:
        """Return how many blocks can be allocated now, including cached blocks that have no owner."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Return the number of blocks on the device that have a hash."""
        return len(self._blocks)

    @property
    def is_caching(self) -> bool:
        """Return whether blocks keep their hashes, so that other prompts find them."""
        return self._caching

    @property
    def has_events(self) -> bool:
        """Return whether `take_events` would return anything."""
        return bool(self._events) or (self.host is not None and self.host.has_events)

    def cached_block_hashes(self) -> list[BlockHash]:
        """Return the hashes of all blocks that are cached on the device."""
        return list(self._blocks)

    def hot_block_hashes(self, limit: int) -> list[BlockHash]:
        """Return at most `limit` hashes of cached blocks, the most often shared first, then the most recently used.

        A prefix comes before the blocks that follow it.
        """
        # Owned blocks have age 0: they are in use now.
        age = {block: number for number, block in enumerate(reversed(self._free), 1)}
        cached = sorted(self._blocks.items(), key=lambda item: (-self._hits[item[1]], age.get(item[1], 0)))
        return [name for name, _ in cached[:limit]]

    def match(self, names: Iterable[BlockHash]) -> list[int]:
        """Return the blocks of the longest cached prefix on the device. They are not owned yet: call `share` before any
        other method."""
        found: list[int] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, names: Iterable[BlockHash]) -> CachedPrefix:
        """Return the longest cached prefix in both tiers. It is valid until any method except `num_taken`, `verify` and
        `take` is called."""
        known: list[BlockHash] = []
        blocks: list[int | None] = []
        from_host: set[BlockHash] = set()
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                # A hash that is repeated would be loaded twice: the prefix ends there.
                if self.host is None or name not in self.host or name in from_host:
                    break
                from_host.add(name)
            known.append(name)
            blocks.append(block)
        return CachedPrefix(known, blocks)

    def num_taken(self, prefix: CachedPrefix) -> int:
        """Return how many free blocks `take(prefix)` would need: cached blocks without an owner, and blocks for the
        copies from the host tier.
        """
        return prefix.num_host + self.num_unowned(block for block in prefix.blocks if block is not None)

    def verify(self, prefix: CachedPrefix) -> bool:
        """Return whether the blocks of a prefix in the host tier are intact. If not, drop the damaged ones: the prefix
        is not valid any more and must be found again.

        This reads all their bytes. Call it only before `take`, not while it is uncertain whether the prefix is used.
        """
        if not prefix.num_host:
            return True
        assert self.host is not None
        return self.host.verify(prefix.host_names)

    def take(self, prefix: CachedPrefix) -> list[int]:
        """Take ownership of all blocks of a prefix and return them; `num_taken` blocks must be free, and `verify` must
        have returned True.

        Blocks from the host tier get blocks of their own, which are cached from now on. Nothing may read or write these
        before the copies of the host tier are done.
        """
        self.share(block for block in prefix.blocks if block is not None)
        if not prefix.num_host:
            return [block for block in prefix.blocks if block is not None]
        assert self.host is not None
        names = prefix.host_names
        # The allocation below may evict other blocks into the host tier, which must not drop these meanwhile.
        self.host.protect(names)
        fresh = self.allocate(len(names))
        assert fresh is not None, "too few free blocks for the prefix in the host tier"
        self.host.load(names, fresh)
        self.register(names, fresh)
        following = iter(fresh)
        return [next(following) if block is None else block for block in prefix.blocks]

    def num_unowned(self, blocks: Iterable[int]) -> int:
        """Return how many of these cached blocks have no owner, so that `share` would reduce the number of free blocks
        by as many.
        """
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add one owner to each of these blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
            self._hits[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with undefined content and one owner. Return None, and change nothing, if too few are
        free."""
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
        """Declare that these owned blocks hold the content of these hashes. A hash that is cached already keeps its
        block."""
        if not self._caching:
            return
        stored: list[BlockHash] = []
        for name, block in zip(names, blocks, strict=True):
            assert self._references[block] > 0, "only an owned block can be given a hash"
            if name not in self._blocks and self._names[block] is None:
                self._blocks[name] = block
                self._names[block] = name
                self._hits[block] = 0
                stored.append(name)
        if stored:
            self._record(BlocksStored(stored))

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each block, the last block first. Blocks with a hash stay cached."""
        for block in reversed(blocks):
            assert self._references[block] > 0, "a block was released more often than owned"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._names[block] is None:
                    # Without a hash it is useless for the cache: allocate it before any cached block.
                    self._free.move_to_end(block, last=False)

    def forget_cached(self) -> bool:
        """Forget the hashes of all blocks without an owner and of all blocks in the host tier, so that no later prompt
        finds them. Return whether no hash is left: blocks in use keep theirs.
        """
        removed: list[BlockHash] = []
        for block in self._free:
            if (name := self._names[block]) is not None:
                self._names[block] = None
                del self._blocks[name]
                removed.append(name)
        if removed:
            self._record(BlocksRemoved(removed))
        if self.host is not None:
            self.host.forget_all()
        return not self._blocks

    def block_of(self, name: BlockHash) -> int | None:
        """Return the device block that is cached under a hash, or None."""
        return self._blocks.get(name)

    def take_events(self) -> list[BlockEvent]:
        """Return the stored and removed block hashes since the last call, in order within each tier, and clear the
        list."""
        events, self._events = self._events, []
        return events if self.host is None else events + self.host.take_events()

    def check_invariants(self, owned: Sequence[int]) -> None:
        """Assert that counts, free list and hashes agree. `owned` lists each owned block once per owner. For tests."""
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
        assert named == sorted(named), "a cached block would be evicted before one without a hash"
        if self.host is not None:
            self.host.check_invariants()

    def _record(self, event: BlockEvent) -> None:
        """Append an event, or merge it into the last one of the same type."""
        last = self._events[-1] if self._events else None
        if last is not None and type(last) is type(event):
            last.names.extend(event.names)
        else:
            self._events.append(event)
