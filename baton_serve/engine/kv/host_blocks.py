"""Orders the copies between KV cache and host tier on all ranks; which blocks are copied is decided in
`core/host_tier.py`.

The next use of a block waits for its copy: steps by `before`, transports by `KVCache.ready_after`.

Blocks may stay here for days, so each slot has a checksum from the time when it was stored, which is compared before
the slot is loaded. With several ranks on devices, rank 0 decides, and each rank keeps its own part of all slots.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Protocol

from baton_serve.engine import device as devices
from baton_serve.engine.core.host_tier import HostTier
from baton_serve.engine.kv.host_slots import HostSlots
from baton_serve.engine.kv.kv_cache import KVCache

logger = logging.getLogger(__name__)


class OtherHostSlots(Protocol):
    """The `HostSlots` of the other ranks, which hold the other parts of all blocks."""

    def copy(self, blocks: Sequence[int], slots: Sequence[int], *, is_to_host: bool, steps_after: int) -> None:
        """Start copies on all other ranks; see `HostSlots.copy`."""
        ...

    def before(self, blocks: Sequence[int]) -> None:
        """Make later steps of the other ranks wait for their copies from or to these blocks."""
        ...

    def find_damaged(self, slots: Sequence[int], find_here: Callable[[], set[int]]) -> set[int]:
        """Return the slots of which a rank's part is damaged. `find_here` finds those of this rank meanwhile."""
        ...


class HostTierMemory:
    """The host memory of evicted KV blocks (the host tier). It executes the copies that `tier` has planned, on all
    ranks; if `tier` is None it does nothing. Only the engine's thread may call it."""

    def __init__(self, cache: KVCache, tier: HostTier | None, others: OtherHostSlots | None = None) -> None:
        """Allocate the memory. `others` are the other ranks; None: this one copies whole blocks."""
        self.tier = tier
        self.slots = HostSlots(cache, tier.num_slots if tier is not None else 0)
        self._cache = cache
        self._others = others
        if tier is not None:
            tier.damaged_slots = self._damaged_slots
        self._num_ended = 0
        """Number of steps that were queued up to the last finished one; see `CopyOrder.num_steps`."""
        self._unordered: set[int] = set()
        """Blocks for whose copies later steps of the other ranks do not wait yet."""

    def on_step_end(self, *, steps_after: int) -> None:
        """Record that a step has ended. Copies that start from now on wait for its end: a block that is free now is
        used by that step at the latest. `steps_after` steps have been launched after it."""
        self._num_ended = self._cache.order.num_steps - steps_after
        self.slots.forget_ended()

    def move(self) -> None:
        """Start all copies between device and host memory that the tier has planned since the last call, in their
        order. Call it before anything else uses their blocks."""
        moves = self.tier.take_tier_copies() if self.tier is not None else []
        for is_to_host, group in groupby(moves, key=lambda move: move.is_to_host):
            blocks, slots, _ = zip(*group, strict=True)
            later = self._cache.order.num_steps - self._num_ended
            if self._others is not None:
                self._others.copy(blocks, slots, is_to_host=is_to_host, steps_after=later)
                self._unordered.update(blocks)
            self.slots.copy(blocks, slots, is_to_host=is_to_host, steps_after=later)

    def before(self, blocks: Iterable[int]) -> None:
        """Make the device's main stream wait until running copies from or to these blocks have ended. Call it before
        the launch of a step that uses them."""
        unordered = self._unordered
        if not self._cache.copying and not unordered:
            return
        blocks = list(blocks)
        self._cache.order_after_copies(blocks)
        # The copies of other ranks may still run when those of this one have ended.
        if self._others is not None and (used := unordered.intersection(blocks)):
            self._others.before(sorted(used))
            unordered -= used

    def are_copied(self, blocks: Iterable[int]) -> bool:
        """Return whether all copies from or to these blocks have ended, on this rank: steps of the others wait for
        theirs."""
        return all(event.query() for event in devices.distinct(self._cache.copying.get(block) for block in blocks))

    def wait(self, blocks: Iterable[int]) -> None:
        """Wait until all copies from or to these blocks have ended, on this rank."""
        for event in devices.distinct(self._cache.copying.get(block) for block in blocks):
            event.synchronize()

    def close(self) -> None:
        """Wait until all copies of this rank have ended, and free its host memory. Other ranks free theirs when rank 0
        ends the connection to them."""
        self.slots.close()

    def _damaged_slots(self, slots: Sequence[int]) -> set[int]:
        # A slot may be filled by a copy that was only decided so far.
        self.move()
        if self._others is None:
            damaged = self.slots.find_damaged(slots)
        else:
            damaged = self._others.find_damaged(slots, lambda: self.slots.find_damaged(slots))
        if damaged:
            logger.error(
                "%d of %d KV blocks from the host tier (--host-kv-gb) do not match their checksums; they are dropped"
                " and computed again. If this repeats, test the memory of this host",
                len(damaged),
                len(slots),
            )
        return damaged
