"""Allocates slots of host memory for evicted KV blocks, copies blocks to and from them, and compares their checksums.

On hosts a copy is complete when its call returns. On a device, copies run beside the computation, on one stream for
each direction. Each copy waits for the previous use of its block and slot. The memory is pinned if possible.

Each of several ranks whose memory is its device's has the slots of its own part of all blocks.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from baton_serve.engine import device as devices
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


class HostSlots:
    """Slots of host memory, each for one KV block or, with several ranks on devices, for this rank's part of one. Only
    the thread that launches steps may call it."""

    def __init__(self, cache: KVCache, num_slots: int) -> None:
        """Allocate `num_slots` slots for blocks of `cache`, which the caller closes after this object."""
        self._cache = cache
        self._device = cache.device
        # In the mirror blocks are whole, but only while transports use them.
        self._blocks: Tensor = cache.device_tensor if cache.is_mirrored else cache.whole_blocks
        size = self._blocks.shape[1]
        # A stage of a pipeline without attention has parts of 0 bytes.
        self._per_slab = max(1, SLAB_BYTES // max(1, size))
        self._per_batch = max(1, BATCH_BYTES // max(1, size))
        counts = [min(self._per_slab, num_slots - first) for first in range(0, num_slots, self._per_slab)]
        self._slabs = [_slab(self._device, count, size) for count in counts]
        self._streams: tuple[devices.SideStream, devices.SideStream] | None = None
        if num_slots and not devices.is_host(self._device):
            self._streams = devices.SideStream(self._device), devices.SideStream(self._device)
            cache.order.begin()
        self._checksums = SlotChecksums(lambda slot: self.slot(slot).numpy(), has_threads=self.has_streams)
        self._copied: dict[int, devices.DeviceEvent] = {}  # by slot: the end of its last copy

    @property
    def has_streams(self) -> bool:
        """Return whether copies run beside the computation."""
        return self._streams is not None

    def slot(self, index: int) -> Tensor:
        """Return the memory of a slot, uint8 [bytes of a block, or of this rank's part]."""
        return self._slabs[index // self._per_slab][index % self._per_slab]

    def copy(self, blocks: Sequence[int], slots: Sequence[int], *, is_to_host: bool, steps_after: int) -> None:
        """Start copies between `blocks[i]` and `slots[i]`, all of one direction, in their order. `steps_after` is how
        many steps have been queued after the last one that may use the blocks."""
        if self._streams is None:
            # One by one: the checksum finds the bytes in the CPU cache.
            for pair in zip(blocks, slots, strict=True):
                self._exchange([pair], is_to_host=is_to_host)
                if is_to_host:
                    self._checksums.record([pair[1]], None)
            return
        stream = self._streams[is_to_host]  # index 0 is to the device, index 1 to the host
        pairs = list(zip(blocks, slots, strict=True))
        for first in range(0, len(pairs), self._per_batch):
            batch = pairs[first : first + self._per_batch]
            before = [self._cache.copying.get(block) for block, _ in batch]
            for event in devices.distinct([*before, *(self._copied.get(slot) for _, slot in batch)]):
                stream.wait(event)
            # The last step may still read a block that is now copied out, or that a copy fills.
            self._cache.order.wait(stream, [block for block, _ in batch], steps_after)
            with stream:
                self._exchange(batch, is_to_host=is_to_host)
            done = stream.record()
            for block, slot in batch:
                self._cache.copying[block] = done
                self._copied[slot] = done
            if is_to_host:
                self._checksums.record([slot for _, slot in batch], done)

    def forget_ended(self) -> None:
        """Forget copies that have ended; else their number would grow with every block that ever moved."""
        for events in (self._cache.copying, self._copied):
            for key in [key for key, done in events.items() if done.query()]:
                del events[key]

    def find_damaged(self, slots: Sequence[int]) -> set[int]:
        """Return the slots, among these, whose bytes have changed since a block was copied there."""
        return self._checksums.find_damaged(slots)

    def close(self) -> None:
        """Wait until all copies have ended, and free the host memory."""
        if self._streams is not None:
            devices.synchronize(self._device)
        self._checksums.close()
        self._slabs = []
        self._blocks = torch.empty(0)

    def _exchange(self, batch: Iterable[tuple[int, int]], *, is_to_host: bool) -> None:
        for block, slot in batch:
            there, here = self.slot(slot), self._blocks[block]
            if is_to_host:
                there.copy_(here, non_blocking=True)
            else:
                here.copy_(there, non_blocking=True)


def _slab(device: torch.device, count: int, block_bytes: int) -> Tensor:
    """Return new host memory for `count` KV blocks, uint8 [count, block_bytes]. It is pinned if the system allows that;
    otherwise log a warning, as copies will be slow."""
    if not block_bytes:
        return torch.empty((count, 0), dtype=torch.uint8)
    try:
        memory = devices.pinned_memory(device, count * block_bytes)
    except RuntimeError as error:
        logger.warning("cannot pin the memory of the host tier (--host-kv-gb), copies will be slow: %s", error)
        memory = torch.empty(count * block_bytes, dtype=torch.uint8)
    return memory.view(count, block_bytes)
