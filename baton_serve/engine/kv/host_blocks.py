"""The memory of the host tier, and the copies between it and the blocks of the KV cache.

On hosts a copy is done when it is asked for. On a device copies run beside the computation, on a stream for each
direction: each waits for what used its block or slot before, and whoever uses the block next waits for it: steps here
(`before`), transports by `KVCache.ready_after`. Memory is pinned where that can be.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from baton_serve.engine import device as devices
from baton_serve.engine.core.host_tier import HostTier, HostTierCopy
from baton_serve.engine.kv.kv_cache import KVCache

logger = logging.getLogger(__name__)

SLAB_BYTES = 1 << 30
"""Of one allocation: runtimes bound a single one (USM host memory to 4 GiB on some cards), and torch rounds those of
pinned memory up to a power of two."""
BATCH_BYTES = 32 << 20
"""Copies that wait and are waited for together."""


class HostTierMemory:
    """Does what `tier` has decided; without one, nothing."""

    def __init__(self, cache: KVCache, tier: HostTier | None) -> None:
        self.tier = tier
        num_slots = tier.num_slots if tier is not None else 0
        self._cache = cache
        self._device = cache.device
        self._blocks: Tensor = cache.whole_blocks
        self._per_slab = max(1, SLAB_BYTES // cache.block_bytes)
        self._per_batch = max(1, BATCH_BYTES // cache.block_bytes)
        counts = [min(self._per_slab, num_slots - first) for first in range(0, num_slots, self._per_slab)]
        self._slabs = [_slab(self._device, count, cache.block_bytes) for count in counts]
        self._streams: tuple[devices.SideStream, devices.SideStream] | None = None
        if tier is not None and not devices.is_host(self._device):
            self._streams = devices.SideStream(self._device), devices.SideStream(self._device)
        self._slots: dict[int, devices.DeviceEvent] = {}
        self._over: devices.DeviceEvent | None = None

    def record_step_end(self) -> devices.DeviceEvent | None:
        """Call when a step has been given to the device."""
        return devices.record(self._device) if self._streams is not None else None

    def on_step_end(self, event: devices.DeviceEvent | None) -> None:
        """Blocks that are free from now on are used by no step whose end is later."""
        self._over = event
        for events in (self._cache.copying, self._slots):
            for key in [key for key, done in events.items() if done.query()]:
                del events[key]

    def move(self) -> None:
        """All copies that the tier has decided since the last call, in order; before anything touches their blocks."""
        moves = self.tier.take_tier_copies() if self.tier is not None else []
        for is_to_host, group in groupby(moves, key=lambda move: move.is_to_host):
            for batch in _batches(list(group), self._per_batch):
                self._copy(batch, is_to_host=is_to_host)

    def before(self, blocks: Iterable[int]) -> None:
        """What the device computes from now on may read and write these blocks."""
        copying = self._cache.copying
        if copying:
            for event in _distinct(copying.get(block) for block in blocks):
                devices.order_after(self._device, event)

    def are_copied(self, blocks: Iterable[int]) -> bool:
        """No copy touches these blocks any more."""
        return all(event.query() for event in _distinct(self._cache.copying.get(block) for block in blocks))

    def wait(self, blocks: Iterable[int]) -> None:
        """As `are_copied`, when it returns."""
        for event in _distinct(self._cache.copying.get(block) for block in blocks):
            event.synchronize()

    def close(self) -> None:
        if self._streams is not None:
            devices.synchronize(self._device)
        self._slabs = []
        self._blocks = torch.empty(0)

    def _copy(self, batch: Sequence[HostTierCopy], *, is_to_host: bool) -> None:
        if self._streams is None:
            self._exchange(batch, is_to_host=is_to_host)
            return
        copying, stream = self._cache.copying, self._streams[is_to_host]
        before = [copying.get(move.block) for move in batch] + [self._slots.get(move.slot) for move in batch]
        for event in _distinct([self._over, *before]):
            stream.wait(event)
        with stream:
            self._exchange(batch, is_to_host=is_to_host)
        done = stream.record()
        for move in batch:
            copying[move.block] = done
            self._slots[move.slot] = done

    def _exchange(self, batch: Sequence[HostTierCopy], *, is_to_host: bool) -> None:
        for block, slot, _ in batch:
            there, here = self._slabs[slot // self._per_slab][slot % self._per_slab], self._blocks[block]
            if is_to_host:
                there.copy_(here, non_blocking=True)
            else:
                here.copy_(there, non_blocking=True)


def _slab(device: torch.device, count: int, block_bytes: int) -> Tensor:
    """uint8 [count, block_bytes]."""
    try:
        memory = devices.pinned_memory(device, count * block_bytes)
    except RuntimeError as error:
        logger.warning("host memory of the host tier is not pinned, so copies are slow: %s", error)
        memory = torch.empty(count * block_bytes, dtype=torch.uint8)
    return memory.view(count, block_bytes)


def _batches(moves: list[HostTierCopy], size: int) -> Iterator[list[HostTierCopy]]:
    for first in range(0, len(moves), size):
        yield moves[first : first + size]


def _distinct(events: Iterable[devices.DeviceEvent | None]) -> list[devices.DeviceEvent]:
    return list({id(event): event for event in events if event is not None}.values())
