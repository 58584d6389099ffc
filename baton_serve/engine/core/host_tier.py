"""Decides which evicted KV blocks stay in host memory (CPU offload), in which slot, and which are evicted there; plans
the copies. Pure.

Blocks evicted from the device are kept here until they are the least recently used. A block that is found again is
copied back and also stays here, so that evicting it again needs no copy. `HostTierCopy` entries are correct if executed
in order; copies that share neither block nor slot may overlap.

A block is loaded only after `verify` has compared its slot with the checksum of what was stored there. A damaged block
is dropped, and its tokens are computed again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from baton_serve.contracts.events import BlockEvent, BlocksRemoved, BlocksStored
from baton_serve.contracts.identity import BlockHash


class HostTierCopy(NamedTuple):
    """A planned copy of one KV block between a block of the device and a slot of the host tier, in either direction."""

    block: int
    slot: int
    is_to_host: bool
    """Direction: True from the device's block to the host's slot, False from the slot to the block."""


DamagedSlots = Callable[[Sequence[int]], set[int]]
"""Returns those of some slots whose bytes are not the bytes that were stored there."""


def no_damaged_slots(slots: Sequence[int]) -> set[int]:
    """Return an empty set: no slot counts as damaged. A new `HostTier` uses this function until `HostTierMemory`
    replaces it by the check of the bytes."""
    return set()


class HostTier:
    """Decides which KV blocks are kept in host memory: it knows which block hash each slot holds, and which is evicted
    next. It holds no bytes itself (`HostTierMemory` does). The block pool owns it. Only the engine's thread may call
    it."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_stored = 0
        self.num_loaded = 0
        self.num_damaged = 0
        self.damaged_slots: DamagedSlots = no_damaged_slots
        """The check of the slots' memory; `HostTierMemory` sets it. It may execute the copies scheduled so far."""
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._protected: frozenset[BlockHash] = frozenset()
        self._copies: list[HostTierCopy] = []
        self._events: list[BlockEvent] = []

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._slots

    @property
    def num_used(self) -> int:
        """Return the number of slots of host memory that hold a block."""
        return len(self._slots)

    @property
    def has_events(self) -> bool:
        """Return whether blocks were stored or removed since the last call of `take_events`."""
        return bool(self._events)

    def names(self) -> list[BlockHash]:
        """Return the hashes of all blocks in the host tier, the least recently used first."""
        return list(self._slots)

    def store(self, name: BlockHash, block: int) -> None:
        """Plan a copy of the device's block `block`, whose hash is `name`, to host memory, because the block will be
        overwritten. If no slot is free, evict the least recently used hash; if all hashes are protected, do nothing."""
        if name in self._slots:
            self._slots.move_to_end(name)
            return
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            return
        self._slots[name] = slot
        self._copies.append(HostTierCopy(block, slot, is_to_host=True))
        self.num_stored += 1
        self._record(BlocksStored([name], "host"))

    def verify(self, names: Sequence[BlockHash]) -> bool:
        """Return whether the bytes in host memory of these hashes, which must all be in this tier, still have their
        checksums. If not, drop the hashes whose bytes were damaged."""
        damaged = self.damaged_slots([self._slots[name] for name in names])
        if not damaged:
            return True
        dropped = [name for name in names if self._slots[name] in damaged]
        self._free += [self._slots.pop(name) for name in dropped]
        self.num_damaged += len(dropped)
        self._record(BlocksRemoved(dropped, "host"))
        return False

    def protect(self, names: Iterable[BlockHash]) -> None:
        """Exclude these hashes from eviction until the next call of `load`, even if `store` then finds no slot."""
        self._protected = frozenset(names)

    def load(self, names: Sequence[BlockHash], blocks: Sequence[int]) -> None:
        """Plan copies from host memory to the device: the KV with hash `names[i]` goes to block `blocks[i]`. All hashes
        must be in this tier; they also stay in it."""
        self._protected = frozenset()
        self._copies += [
            HostTierCopy(block, self._slots[name], is_to_host=False) for name, block in zip(names, blocks, strict=True)
        ]
        self.num_loaded += len(names)
        # The first blocks of a prefix become the most recently used, so that they outlive its end.
        for name in reversed(names):
            self._slots.move_to_end(name)

    def forget_all(self) -> None:
        """Forget all hashes in host memory. Copies that are planned already are still executed, before later copies of
        the same slots."""
        if self._slots:
            self._record(BlocksRemoved(list(self._slots), "host"))
            self._free += self._slots.values()
            self._slots.clear()

    def take_tier_copies(self) -> list[HostTierCopy]:
        """Return the copies that were planned since the last call, in order. The caller executes them before anything
        else uses their blocks."""
        copies, self._copies = self._copies, []
        return copies

    def take_events(self) -> list[BlockEvent]:
        """Return which hashes this tier has stored and removed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check_invariants(self) -> None:
        """Assert that each slot is either free or used once. Only tests call it."""
        taken = [*self._slots.values(), *self._free]
        assert sorted(taken) == list(range(self.num_slots)), "a slot leaked or is used twice"
        assert not self._protected, "slots are still protected after `load`"

    def _evict(self) -> int | None:
        """Forget the least recently used hash that is not protected and return its slot; None if all hashes are
        protected."""
        name = next((name for name in self._slots if name not in self._protected), None)
        if name is None:
            return None
        self._record(BlocksRemoved([name], "host"))
        return self._slots.pop(name)

    def _record(self, event: BlockEvent) -> None:
        """Keep an event for `take_events`. If the last kept event has the same type, add the hashes to it instead."""
        last = self._events[-1] if self._events else None
        if last is not None and type(last) is type(event):
            last.names.extend(event.names)
        else:
            self._events.append(event)
