"""Blocks of a device over shared memory: device → pinned host → device, parcel by parcel, both copies at once.

The producer copies blocks into slots of a ring that both processes map; the consumer copies them out and says so, and
the slot is free again. A ring belongs to one connection and ends with it. Its memfd has no name.
"""

import mmap
import os
import threading
from collections.abc import Callable, Sequence

from xxhash import xxh3_64_intdigest

from kvtransfer.errors import TransportUnavailable
from kvtransfer.frames import Offer, Piece
from kvtransfer.memory import DeviceMemory, seal_size
from kvtransfer.session.steps import Placement
from kvtransfer.settings import TransferSettings
from kvtransfer.transports.devicecopy import DeviceBlocks, HostArea
from kvtransfer.transports.hostcopy import HostBlocks
from kvtransfer.transports.port import Announce, Buffer, Intake, Prepared

BATCHES = 16
"""At least so many parcels fill a ring: copies in and out then overlap."""


class Ring:
    """`num_slots` blocks in a memfd, pinned for the device. `close` frees it once nothing is being staged."""

    def __init__(self, memory: DeviceMemory, ring_bytes: int) -> None:
        self.device_blocks = DeviceBlocks(memory)
        self.block_bytes = memory.block_bytes
        self.num_slots = max(ring_bytes // self.block_bytes, 2)
        size = self.num_slots * self.block_bytes
        self.fd = os.memfd_create("baton-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, size)  # a host without room says so now, not by SIGBUS when it is used
        except OSError:
            os.close(self.fd)
            raise
        seal_size(self.fd)
        self.view = memoryview(mmap.mmap(self.fd, size))
        self._area = HostArea(self.view, self.block_bytes, self.device_blocks.device)
        self._area.pin()
        self._lock = threading.Lock()
        self._free = list(range(self.num_slots))
        self._num_staging = 0
        self._is_closed = False

    def stage(self, blocks: Sequence[int]) -> list[int]:
        """Slots that hold these blocks now. The caller's window leaves room for them."""
        with self._lock:
            if self._is_closed or len(self._free) < len(blocks):
                raise TransportUnavailable("the ring is closed" if self._is_closed else "the ring is full")
            slots = sorted(self._free[: len(blocks)])
            del self._free[: len(blocks)]
            self._num_staging += 1
        try:
            self.device_blocks.read(blocks, self._area, slots)
        finally:
            with self._lock:
                self._num_staging -= 1
                is_last = self._is_closed and not self._num_staging
            if is_last:
                self._area.close()
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._free.extend(slots)

    def slot(self, slot: int) -> memoryview:
        return self.view[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            is_idle = not self._num_staging
        os.close(self.fd)
        if is_idle:
            self._area.close()


class RingOutlet:
    may_wait = True
    stages = True

    def __init__(self, offer: Offer, ring: Ring, settings: TransferSettings, *, on_close: Callable[[], object]) -> None:
        self.offer = offer
        self._on_close = on_close
        self.ring = ring
        self.window_bytes: int | None = ring.num_slots * ring.block_bytes
        self.batch_bytes = min(settings.device_batch_bytes, self.window_bytes // BATCHES)
        self.taper_bytes: int | None = self.batch_bytes // 4

    def knows(self, blocks: Sequence[int], checked: Sequence[bool]) -> bool:
        return False

    def prepare(self, blocks: Sequence[int], checked: Sequence[bool]) -> Prepared:
        slots = self.ring.stage(blocks)
        views = [self.ring.slot(slot) for slot in slots]
        sums = [xxh3_64_intdigest(v) if is_checked else None for v, is_checked in zip(views, checked, strict=True)]
        return Prepared(slots, sums, views)

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        announce([()])

    def taken(self, prepared: Prepared) -> None:
        self.ring.give_back(prepared.sources)

    def close(self) -> None:
        self._on_close()
        self.ring.close()


class DeviceInlet:
    """Copies from mapped host memory of the producer, a ring or its whole cache, to blocks of a device."""

    stream = None

    def __init__(self, source: HostBlocks, mapping: memoryview, target: DeviceBlocks, *, is_ring: bool) -> None:
        self.stages = is_ring
        self._source = source
        self._area = HostArea(mapping, source.block_bytes, target.device)
        if is_ring:
            self._area.pin()
        self._target = target
        self._lock = threading.Lock()
        self._num_copying = 0
        self._is_closed = False

    def receive(self, placement: Placement, frames: Sequence[Buffer]) -> bool:
        return self.receive_all([placement])[0]

    def receive_all(self, placements: Sequence[Placement]) -> list[bool]:
        """`kvtransfer.copying.Gathers`: the host waits once."""
        with self._lock:
            if self._is_closed:
                raise TransportUnavailable("the connection was closed")
            self._num_copying += 1
        try:
            source = self._source
            for placement in placements:
                source.address(placement.source)  # checks its bounds
            self._target.write(self._area, [p.source for p in placements], [p.destination for p in placements])
            return [p.checksum is None or source.checksum(p.source) == p.checksum for p in placements]
        finally:
            with self._lock:
                self._num_copying -= 1
                is_last = self._is_closed and not self._num_copying
            if is_last:
                self._area.close()

    def intake(self, placement: Placement) -> Intake:
        raise TransportUnavailable("this transport sends no bytes")

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            is_idle = not self._num_copying
        if is_idle:
            self._area.close()
