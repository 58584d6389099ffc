"""Moves blocks of devices over shared memory: device to pinned host memory to device, both copies at the same time.

The producer copies blocks into slots of a ring that both processes map. The consumer copies them out and reports it,
and the slots are free again. A ring belongs to one connection and ends with it. Its memfd has no name.
"""

import mmap
import os
import threading
from collections.abc import Callable, Sequence

from xxhash import xxh3_64_intdigest

from baton_serve.kvtransfer.block_memory import DeviceMemory, seal_size
from baton_serve.kvtransfer.control_messages import Offer, Piece
from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.devicecopy import DeviceBlocks, HostArea
from baton_serve.kvtransfer.transports.hostcopy import HostBlocks
from baton_serve.kvtransfer.transports.port import Announce, Buffer, Intake, ParcelContent, Prepared

BATCHES = 16
"""Smallest number of parcels that fill a ring, so that copies in and copies out overlap."""


class Ring:
    """Pinned host memory in a memfd with `num_slots` slots, each for one block. A producer copies blocks of a device to
    the ring, and one consumer on the same host maps it. `RingSender` owns the ring; `close` frees the memory once no
    block is being copied.
    """

    def __init__(self, memory: DeviceMemory, ring_bytes: int) -> None:
        self.device_blocks = DeviceBlocks(memory)
        self.block_bytes = memory.block_bytes
        self.num_slots = max(ring_bytes // self.block_bytes, 2)
        size = self.num_slots * self.block_bytes
        self.fd = os.memfd_create("baton-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Allocate now: a host without enough memory reports it here, and not as SIGBUS on first use.
            os.posix_fallocate(self.fd, 0, size)
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

    def stage(self, blocks: Sequence[int], parts: int = 1) -> list[int]:
        """Copy blocks from the device into free slots of the ring, and return the places of the copies. With `parts`
        above 1, `blocks` are numbers of parts of blocks, and a slot has that many places.

        The caller owns the slots until `give_back`. Raises `TransportUnavailable` if the ring is closed or has too few
        free slots; the limit of bytes in flight of its connection normally prevents that.
        """
        needed = -(-len(blocks) // parts)
        with self._lock:
            if self._is_closed or len(self._free) < needed:
                raise TransportUnavailable("the ring is closed" if self._is_closed else "the ring is full")
            # In order, so that neighbouring slots can be filled by one copy.
            slots = sorted(self._free[:needed])
            del self._free[:needed]
            self._num_staging += 1
        places = [slot * parts + part for slot in slots for part in range(parts)][: len(blocks)]
        try:
            self.device_blocks.in_parts(parts).read(blocks, self._area, places)
        finally:
            with self._lock:
                self._num_staging -= 1
                # `close` came while this thread was copying: it left the pinned memory for the last thread to free.
            is_last = self._is_closed and not self._num_staging
            if is_last:
                self._area.close()
        return places

    def give_back(self, places: Sequence[int], parts: int = 1) -> None:
        """Free the slots of `places`, all places that one call of `stage` with the same `parts` returned."""
        with self._lock:
            self._free.extend(places if parts == 1 else sorted({place // parts for place in places}))

    def view_of(self, place: int, parts: int) -> memoryview:
        """Return the bytes of the block or part at the number `place`. Each slot is divided into `parts` places of
        equal size, which are numbered from 0 over the whole ring. The ring owns the memory.
        """
        size = self.block_bytes // parts
        return self.view[place * size : (place + 1) * size]

    def close(self) -> None:
        """Close the memfd, and unpin the memory once no block is being copied to it. The consumer's mapping stays
        valid.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            is_idle = not self._num_staging
        os.close(self.fd)
        if is_idle:
            self._area.close()


class RingSender:
    """The producer's end of the transport `usm` for blocks of a device: copies them to a ring of pinned shared memory
    and announces their places there, from which the consumer on the same host copies them.
    """

    stages = True

    def __init__(self, offer: Offer, ring: Ring, settings: TransferSettings, *, on_close: Callable[[], object]) -> None:
        self.offer = offer
        self._on_close = on_close
        self.ring = ring
        self.window_bytes: int | None = ring.num_slots * ring.block_bytes
        self.batch_bytes = min(settings.device_batch_bytes, self.window_bytes // BATCHES)
        self.taper_bytes: int | None = self.batch_bytes // 4

    def is_quick(self, chosen: ParcelContent, *, is_little: bool) -> bool:
        return False

    def prepare(self, chosen: ParcelContent) -> Prepared:
        parts, places = chosen.parts, self.ring.stage(chosen.blocks, chosen.parts)
        checked = zip(places, chosen.checked, strict=True)
        sums = [
            xxh3_64_intdigest(self.ring.view_of(place, parts)) if is_checked else None for place, is_checked in checked
        ]
        return Prepared(places, sums, parts=parts)

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        announce([()])

    def taken(self, prepared: Prepared) -> None:
        self.ring.give_back(prepared.sources, prepared.parts)

    def close(self) -> None:
        self._on_close()
        self.ring.close()


class DeviceReceiver:
    """The consumer's end of the transport `usm` for blocks of a device: copies blocks to the device from host memory
    that the producer shares, a ring or its whole KV cache.
    """

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

    def receive(self, placement: BlockPlacement, frames: Sequence[Buffer]) -> bool:
        return self.receive_all([placement])[0]

    def receive_all(self, placements: Sequence[BlockPlacement]) -> list[bool]:
        """Copy several blocks to the device, and wait for the device once. Return for each whether its bytes match its
        checksum. Implements `kvtransfer.consumer.copy_jobs.ReceivesAll`.
        """
        with self._lock:
            if self._is_closed:
                raise TransportUnavailable("the connection was closed")
            self._num_copying += 1
        try:
            parts = placements[0].parts
            source, target = self._source.in_parts(parts), self._target.in_parts(parts)
            for placement in placements:
                source.address(placement.source)  # checks its bounds
            target.write(self._area, [p.source for p in placements], [p.destination for p in placements])
            return [p.checksum is None or source.checksum(p.source) == p.checksum for p in placements]
        finally:
            with self._lock:
                self._num_copying -= 1
                is_last = self._is_closed and not self._num_copying
            if is_last:
                self._area.close()

    def intake(self, placement: BlockPlacement) -> Intake:
        raise TransportUnavailable("this transport sends no bytes")

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            is_idle = not self._num_copying
        if is_idle:
            self._area.close()
