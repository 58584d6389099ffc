"""Decides which KV block is allocated and which cached one is evicted (LRU), and keeps the prefix cache: which hash
lies in which block.

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
    """The leading blocks of a prompt that are cached, on the device or in the host tier: their hashes `names`, and for
    each hash the block on the device, or None if it is in the host tier only."""

    names: list[BlockHash]
    blocks: list[int | None]

    def __len__(self) -> int:
        return len(self.blocks)

    def __add__(self, other: "CachedPrefix") -> "CachedPrefix":
        """Return one object with the blocks of both, so that `BlockPool.take` takes either all of them or none. They
        must have no hash in common."""
        return CachedPrefix(self.names + other.names, self.blocks + other.blocks)

    def first(self, count: int) -> "CachedPrefix":
        """Return the first `count` blocks of this prefix as a new object."""
        return CachedPrefix(self.names[:count], self.blocks[:count])

    @property
    def num_host(self) -> int:
        """Return how many blocks of this prefix are in the host tier only, so that they must be copied to the
        device."""
        return self.blocks.count(None)

    @property
    def host_names(self) -> list[BlockHash]:
        """Return the hashes of the blocks of this prefix that are in the host tier only."""
        return [name for name, block in zip(self.names, self.blocks, strict=True) if block is None]


class BlockPool:
    """Allocates the KV blocks of one engine and keeps its prefix cache, like vLLM's `BlockPool`. A block has one owner
    for each sequence that uses it. Only the engine's thread may call it."""

    def __init__(
        self,
        num_blocks: int,
        *,
        caching: bool = True,
        host: HostTier | None = None,
        versions: list[int] | None = None,
    ) -> None:
        """Create a pool in which all blocks are free. `num_blocks` includes block 0, which is never allocated.
        `caching` False switches the prefix cache off. `host` is the host tier, to which evicted blocks are copied;
        None: they are lost. `versions` has one number per block, which grows whenever the block is allocated, so that
        its reuse can be detected."""
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
        """Return the number of blocks that can be allocated in all: every block but block 0."""
        return self._num_blocks - 1

    @property
    def num_free(self) -> int:
        """Return how many blocks can be allocated now: blocks that no sequence uses, of which some are still cached."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Return the number of blocks on the device that are in the prefix cache."""
        return len(self._blocks)

    @property
    def is_caching(self) -> bool:
        """Return whether prefix caching is on: blocks keep their hashes, so that later prompts find them."""
        return self._caching

    @property
    def has_events(self) -> bool:
        """Return whether the prefix cache has changed since the last call of `take_events`."""
        return bool(self._events) or (self.host is not None and self.host.has_events)

    def cached_block_hashes(self) -> list[BlockHash]:
        """Return the hashes of all blocks that are cached on the device."""
        return list(self._blocks)

    def hot_block_hashes(self, limit: int) -> list[BlockHash]:
        """Return at most `limit` hashes of blocks that are cached on the device: the blocks that were shared most often
        first, and among these the most recently used.

        The blocks of a prefix come before the blocks that follow it.
        """
        # Owned blocks have age 0: they are in use now.
        age = {block: number for number, block in enumerate(reversed(self._free), 1)}
        cached = sorted(self._blocks.items(), key=lambda item: (-self._hits[item[1]], age.get(item[1], 0)))
        return [name for name, _ in cached[:limit]]

    def match(self, names: Iterable[BlockHash]) -> list[int]:
        """Return the blocks on the device of the leading hashes of `names`, up to the first hash that is not cached
        there. The caller does not own the blocks yet: call `share` before any other method."""
        found: list[int] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, names: Iterable[BlockHash]) -> CachedPrefix:
        """Return the cached blocks of the leading hashes of `names`, up to the first hash that neither the device nor
        the host tier has. The result is valid until any method except `num_taken`, `verify` and `take` is called."""
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
        """Return by how many `take(prefix)` would reduce `num_free`: one for each cached block on the device that no
        sequence uses, and one for each block that must be copied from the host tier."""
        return prefix.num_host + self.num_unowned(block for block in prefix.blocks if block is not None)

    def verify(self, prefix: CachedPrefix) -> bool:
        """Return whether the blocks of a prefix that are in the host tier still have their checksums. If not, drop the
        damaged blocks: the prefix is then not valid any more and must be found again.

        This reads all bytes of these blocks. Call it only immediately before `take`.
        """
        if not prefix.num_host:
            return True
        assert self.host is not None
        return self.host.verify(prefix.host_names)

    def take(self, prefix: CachedPrefix) -> list[int]:
        """Become an owner of all blocks of a prefix, and return them in order; `num_taken` blocks must be free, and
        `verify` must have returned True.

        For blocks in the host tier, blocks on the device are allocated and copies planned. Nothing may read or write
        these before the copies are done.
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
        """Return how many of these cached blocks no sequence uses. `share` would reduce the number of free blocks by as
        many."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add one owner to each of these blocks, which are owned or cached, for a further sequence that uses them."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
            self._hits[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` free blocks, owned once by the caller, with undefined content. Cached blocks among them leave
        the prefix cache. Return None, and change nothing, if too few blocks are free."""
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
        """Add blocks to the prefix cache: `blocks[i]`, which the caller owns, holds the KV of hash `names[i]`. A hash
        that is cached already keeps its block."""
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
        """Remove one owner from each block. Blocks without an owner can be allocated again, the last of `blocks` first;
        until then, blocks with a hash stay in the prefix cache."""
        for block in reversed(blocks):
            assert self._references[block] > 0, "a block was released more often than owned"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._names[block] is None:
                    # Without a hash it is useless for the cache: allocate it before any cached block.
                    self._free.move_to_end(block, last=False)

    def forget_cached(self) -> bool:
        """Remove all blocks that no sequence uses, and all blocks of the host tier, from the prefix cache. Return
        whether the cache is empty now: blocks in use stay in it."""
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
        """Return the block on the device that is cached under this hash, or None if there is none."""
        return self._blocks.get(name)

    def take_events(self) -> list[BlockEvent]:
        """Return which block hashes were stored and removed since the last call, on the device and in the host tier;
        the order is kept within each of the two."""
        events, self._events = self._events, []
        return events if self.host is None else events + self.host.take_events()

    def check_invariants(self, owned: Sequence[int]) -> None:
        """Assert that the numbers of owners, the free list and the hashes of all blocks agree. `owned` lists each block
        once for each of its owners. Only tests call it."""
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
        """Keep an event for `take_events`. If the last kept event has the same type, add the hashes to it instead."""
        last = self._events[-1] if self._events else None
        if last is not None and type(last) is type(event):
            last.names.extend(event.names)
        else:
            self._events.append(event)
