"""Which content lies in which slot of the host tier, and the copies that this takes. Pure: no memory, no clock.

What the device evicts is kept here until it is the least recently used; a block that is found again is copied back and
stays here too, so that evicting it once more costs nothing. Copies (`HostTierCopy`) are told in an order in which
they are right; whoever does them may overlap those that share neither block nor slot.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton_serve.contracts.events import BlockEvent, BlocksRemoved, BlocksStored
from baton_serve.contracts.identity import BlockHash


class HostTierCopy(NamedTuple):
    block: int
    slot: int
    is_to_host: bool
    """From the device's block to the host's slot; else the other way."""


class HostTier:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_stored = 0
        self.num_loaded = 0
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: frozenset[BlockHash] = frozenset()
        self._moves: list[HostTierCopy] = []
        self._events: list[BlockEvent] = []

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._slots

    @property
    def num_used(self) -> int:
        return len(self._slots)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def names(self) -> list[BlockHash]:
        """The least recently used first."""
        return list(self._slots)

    def store(self, name: BlockHash, block: int) -> None:
        """`block`, which holds the content of `name`, is about to be filled with something else."""
        if name in self._slots:
            self._slots.move_to_end(name)
            return
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            return
        self._slots[name] = slot
        self._moves.append(HostTierCopy(block, slot, is_to_host=True))
        self.num_stored += 1
        self._record(BlocksStored([name], "host"))

    def protect(self, names: Iterable[BlockHash]) -> None:
        """These are not given up before the next `load`."""
        self._held = frozenset(names)

    def load(self, names: Sequence[BlockHash], blocks: Sequence[int]) -> None:
        """The content of these names, all of them here, goes to these blocks. Prefixes outlive their ends."""
        self._held = frozenset()
        self._moves += [
            HostTierCopy(block, self._slots[name], is_to_host=False) for name, block in zip(names, blocks, strict=True)
        ]
        self.num_loaded += len(names)
        for name in reversed(names):
            self._slots.move_to_end(name)

    def take_tier_copies(self) -> list[HostTierCopy]:
        """To be done before anything else touches their blocks."""
        moves, self._moves = self._moves, []
        return moves

    def take_events(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events

    def check_invariants(self) -> None:
        taken = [*self._slots.values(), *self._free]
        assert sorted(taken) == list(range(self.num_slots)), "a slot is lost, or holds two contents"
        assert not self._held, "slots are held for no load"

    def _evict(self) -> int | None:
        name = next((name for name in self._slots if name not in self._held), None)
        if name is None:
            return None
        self._record(BlocksRemoved([name], "host"))
        return self._slots.pop(name)

    def _record(self, event: BlockEvent) -> None:
        last = self._events[-1] if self._events else None
        if last is not None and type(last) is type(event):
            last.names.extend(event.names)
        else:
            self._events.append(event)
