"""The memory of the host tier, and the copies between it and the blocks of the KV cache.

On hosts a copy is complete when its call returns. On a device, copies run beside the computation, on one stream for
each direction. Each copy waits for the previous use of its block and slot. The next use of the block waits for the
copy: steps by `before`, transports by `KVCache.ready_after`. The memory is pinned if possible.

Blocks may stay here for days, so each slot has a checksum from the time when it was stored, which is compared before
the slot is loaded.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from baton_serve.engine import device as devices
from baton_serve.engine.core.host_tier import HostTier, HostTierCopy
from baton_serve.engine.kv.kv_cache import KVCache

logger = logging.getLogger(__name__)

SLAB_BYTES = 1 << 30
"""Size of one allocation in bytes.

Runtimes limit a single allocation (USM host memory to 4 GiB on some cards), and torch rounds pinned allocations up to a
power of two.
"""
BATCH_BYTES = 32 << 20
"""Size of copies in bytes that share one event."""
CHECKSUM_THREADS = 4
"""Threads that compute checksums beside a device. One reads 10 to 20 GB/s, less than the memory of such hosts gives."""
COPY_TIMEOUT_S = 10.0
"""Seconds to wait for the copy of a block to the host, before the block counts as damaged."""


class SlotChecksums:
    """Finds KV blocks in host memory that have changed since they were copied there. It keeps the xxh3_64 of the bytes
    of each slot; `slot_bytes` returns the bytes of a slot.

    If the KV cache is in host memory too, checksums are computed immediately, while the bytes are in the CPU cache.
    Copies from an accelerator are still running, so threads wait for them. Errors during a copy are not found.
    """

    def __init__(self, slot_bytes: Callable[[int], Any], *, has_threads: bool) -> None:
        self._slot_bytes = slot_bytes
        self._threads = ThreadPoolExecutor(CHECKSUM_THREADS, "host-tier-checksums") if has_threads else None
        self._stored: dict[int, int | Future[dict[int, int]]] = {}

    def record(self, slots: Sequence[int], copied: devices.DeviceEvent | None) -> None:
        """Compute and keep the checksums of these slots, to which blocks were just copied. `copied` is the event at the
        end of the copies; None: they are complete."""
        if self._threads is None:
            self._stored.update(self._compute(slots, copied))
        else:
            self._stored.update(dict.fromkeys(slots, self._threads.submit(self._compute, slots, copied)))

    def find_damaged(self, slots: Sequence[int]) -> set[int]:
        """Return the slots, among these, whose bytes are not those for which `record` computed the checksum."""
        # Wait for the checksums of the stored bytes first: until then the copy to these slots may still run.
        expected = [self._expected(slot) for slot in slots]
        if self._threads is None:
            found = self._compute(slots)
        else:
            shares = [slots[first::CHECKSUM_THREADS] for first in range(CHECKSUM_THREADS)]
            found = {slot: value for share in self._threads.map(self._compute, shares) for slot, value in share.items()}
        return {slot for slot, value in zip(slots, expected, strict=True) if found[slot] != value}

    def close(self) -> None:
        """End the threads. After this call they do not read the slots, whose memory can then be freed."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _compute(self, slots: Sequence[int], copied: devices.DeviceEvent | None = None) -> dict[int, int]:
        if copied is not None:
            copied.synchronize()
        return {slot: xxh3_64_intdigest(self._slot_bytes(slot)) for slot in slots}

    def _expected(self, slot: int) -> int | None:
        stored = self._stored[slot]
        if isinstance(stored, int):
            return stored
        try:
            return stored.result(COPY_TIMEOUT_S)[slot]
        except TimeoutError:
            return None


class HostTierMemory:
    """The host memory of evicted KV blocks (the host tier). It executes the copies that `tier` has planned; if `tier`
    is None it does nothing. Only the engine's thread may call it."""

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
        self._checksums = SlotChecksums(lambda slot: self._slot(slot).numpy(), has_threads=self._streams is not None)
        if tier is not None:
            tier.damaged_slots = self._damaged_slots
        self._slots: dict[int, devices.DeviceEvent] = {}  # by slot: the end of its last copy
        self._over: devices.DeviceEvent | None = None  # the end of the last finished step

    def record_step_end(self) -> devices.DeviceEvent | None:
        """Return an event at the end of the step that was just launched, to be passed to `on_step_end`; None if copies
        need not wait for it (on the CPU, or without a host tier)."""
        return devices.record(self._device) if self._streams is not None else None

    def on_step_end(self, event: devices.DeviceEvent | None) -> None:
        """Record that a step has ended. Copies that start from now on wait for `event`: a block that is free now is
        used by that step at the latest."""
        self._over = event
        # Forget copies that are done; else the dicts would grow with every block that ever moved.
        for events in (self._cache.copying, self._slots):
            for key in [key for key, done in events.items() if done.query()]:
                del events[key]

    def move(self) -> None:
        """Start all copies between device and host memory that the tier has planned since the last call, in their
        order. Call it before anything else uses their blocks."""
        moves = self.tier.take_tier_copies() if self.tier is not None else []
        for is_to_host, group in groupby(moves, key=lambda move: move.is_to_host):
            for batch in _batches(list(group), self._per_batch):
                self._copy(batch, is_to_host=is_to_host)

    def before(self, blocks: Iterable[int]) -> None:
        """Make the device's main stream wait until running copies from or to these blocks have ended. Call it before
        the launch of a step that uses them."""
        copying = self._cache.copying
        if copying:
            for event in _distinct(copying.get(block) for block in blocks):
                devices.order_after(self._device, event)

    def are_copied(self, blocks: Iterable[int]) -> bool:
        """Return whether all copies from or to these blocks have ended."""
        return all(event.query() for event in _distinct(self._cache.copying.get(block) for block in blocks))

    def wait(self, blocks: Iterable[int]) -> None:
        """Wait until all copies from or to these blocks have ended."""
        for event in _distinct(self._cache.copying.get(block) for block in blocks):
            event.synchronize()

    def close(self) -> None:
        """Wait until all copies have ended, and free the host memory."""
        if self._streams is not None:
            devices.synchronize(self._device)
        self._checksums.close()
        self._slabs = []
        self._blocks = torch.empty(0)

    def _copy(self, batch: Sequence[HostTierCopy], *, is_to_host: bool) -> None:
        if self._streams is None:
            # One by one: the checksum finds the bytes in the CPU cache.
            for move in batch:
                self._exchange([move], is_to_host=is_to_host)
                self._record_checksums([move], None, is_to_host=is_to_host)
            return
        copying, stream = self._cache.copying, self._streams[is_to_host]
        # Index 0 of the streams is to the device, index 1 to the host.
        before = [copying.get(move.block) for move in batch] + [self._slots.get(move.slot) for move in batch]
        # The last step may still read a block that is now copied out, or that a copy fills.
        for event in _distinct([self._over, *before]):
            stream.wait(event)
        with stream:
            self._exchange(batch, is_to_host=is_to_host)
        done = stream.record()
        for move in batch:
            copying[move.block] = done
            self._slots[move.slot] = done
        self._record_checksums(batch, done, is_to_host=is_to_host)

    def _record_checksums(
        self, batch: Sequence[HostTierCopy], copied: devices.DeviceEvent | None, *, is_to_host: bool
    ) -> None:
        if is_to_host:
            self._checksums.record([move.slot for move in batch], copied)

    def _damaged_slots(self, slots: Sequence[int]) -> set[int]:
        # A slot may be filled by a copy that was only decided so far.
        self.move()
        damaged = self._checksums.find_damaged(slots)
        if damaged:
            logger.error(
                "%d of %d KV blocks from the host tier (--host-kv-gb) do not match their checksums; they are dropped"
                " and computed again. If this repeats, test the memory of this host",
                len(damaged),
                len(slots),
            )
        return damaged

    def _slot(self, slot: int) -> Tensor:
        return self._slabs[slot // self._per_slab][slot % self._per_slab]

    def _exchange(self, batch: Sequence[HostTierCopy], *, is_to_host: bool) -> None:
        for block, slot, _ in batch:
            there, here = self._slot(slot), self._blocks[block]
            if is_to_host:
                there.copy_(here, non_blocking=True)
            else:
                here.copy_(there, non_blocking=True)


def _slab(device: torch.device, count: int, block_bytes: int) -> Tensor:
    """Return new host memory for `count` KV blocks, uint8 [count, block_bytes]. It is pinned if the system allows that;
    otherwise log a warning, as copies will be slow."""
    try:
        memory = devices.pinned_memory(device, count * block_bytes)
    except RuntimeError as error:
        logger.warning("cannot pin the memory of the host tier (--host-kv-gb), copies will be slow: %s", error)
        memory = torch.empty(count * block_bytes, dtype=torch.uint8)
    return memory.view(count, block_bytes)


def _batches(moves: list[HostTierCopy], size: int) -> Iterator[list[HostTierCopy]]:
    for first in range(0, len(moves), size):
        yield moves[first : first + size]


def _distinct(events: Iterable[devices.DeviceEvent | None]) -> list[devices.DeviceEvent]:
    """Return each event once, in order, and leave out None."""
    return list({id(event): event for event in events if event is not None}.values())
