"""Copies blocks between host addresses, and verifies their checksums at the same time."""

from collections.abc import Sequence

from xxhash import xxh3_64

from baton_serve.kvtransfer.block_memory import BlockMemory, address_of, copy_bytes, parts_of
from baton_serve.kvtransfer.control_messages import Offer
from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.native.copyhash import CHUNK_BYTES, copy_hash
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.port import AttachRequest, ParcelContent, Prepared

TAPER = 4
"""The first and last parcels of a prompt are this many times smaller than the others, because one end waits while they
are prepared or copied.
"""


class HostBlocks:
    """Gives access by number to the KV blocks in `view`, host memory. It checks that the numbers exist, because they
    may come from another process.
    """

    def __init__(self, view: memoryview, num_blocks: int, block_bytes: int) -> None:
        if view.nbytes < num_blocks * block_bytes:
            raise TransportUnavailable(f"{view.nbytes} bytes cannot hold {num_blocks} blocks of {block_bytes}")
        self._address = address_of(view)
        self._view = view
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._parts: dict[int, HostBlocks] = {}

    def in_parts(self, count: int) -> "HostBlocks":
        """Return access to the same memory with each block divided into `count` parts."""
        if count == 1:
            return self
        if count not in self._parts:
            self._parts[count] = HostBlocks(self._view, self.num_blocks * count, self.block_bytes // count)
        return self._parts[count]

    def address(self, block: int) -> int:
        """Return the memory address of a block's first byte. Raises `TransportUnavailable` if its number is out of
        range.
        """
        # The number comes from the peer: without the check it could name any address of this process.
        if not 0 <= block < self.num_blocks:
            raise TransportUnavailable(f"block {block} is not one of {self.num_blocks}")
        return self._address + block * self.block_bytes

    def view(self, block: int, count: int = 1) -> memoryview:
        """Return a view of the bytes of `count` neighbouring blocks, from number `block` on. Raises
        `TransportUnavailable` if they do not exist.
        """
        if not 0 <= block <= self.num_blocks - count:
            raise TransportUnavailable(f"block {block} is not one of {self.num_blocks}")
        return self._view[block * self.block_bytes : (block + count) * self.block_bytes]

    def checksum(self, block: int) -> int:
        """Return the xxh3_64 checksum of the block with this number. Raises `TransportUnavailable` if the block does
        not exist.
        """
        return copy_hash().checksums([self.address(block)], self.block_bytes)[0]


def host_blocks(memory: BlockMemory) -> HostBlocks:
    """Return access to the blocks in `memory`. Raises `TransportUnavailable` if the CPU cannot address them."""
    view = memory.host_view
    if view is None:
        raise TransportUnavailable("this memory is not addressable by the host")
    return HostBlocks(view.cast("B"), memory.num_blocks, memory.block_bytes)


class HostSender:
    """Base class of senders (the producer's end of a transport) for blocks in host memory. The blocks are read where
    they lie, without a copy to staging memory.
    """

    stages = False
    taper_bytes: int | None
    window_bytes: int | None = None

    def __init__(
        self, offer: Offer, request: AttachRequest, settings: TransferSettings, *, has_window: bool = False
    ) -> None:
        self.offer = offer
        self.batch_bytes = settings.batch_bytes
        self.taper_bytes = max(settings.batch_bytes // TAPER, 1)
        if has_window:
            self.window_bytes = settings.window_bytes
            # With at least two parcels in a window, one is sent while credit for the other one is on its way.
            self.batch_bytes = max(min(settings.batch_bytes, settings.window_bytes // 2), 1)
            self.taper_bytes = None
        self.blocks = host_blocks(request.memory)
        self._memory = request.memory
        self._sums = request.sums

    def is_quick(self, chosen: ParcelContent, *, is_little: bool) -> bool:
        """Return whether `prepare` of the parcel `chosen` is quicker than waking a thread: the parcel is small
        (`is_little`), or the checksums of all its blocks are cached, so that no bytes are read.
        """
        return is_little or self._sums.knows(parts_of(self._memory, chosen.parts), chosen.to_sum())

    def prepare(self, chosen: ParcelContent) -> Prepared:
        blocks, to_sum = self.blocks.in_parts(chosen.parts), chosen.to_sum()
        memory = parts_of(self._memory, chosen.parts)
        sums = iter(self._sums.of(memory, to_sum, [blocks.address(block) for block in to_sum]))
        checksums = [next(sums) if is_checked else None for is_checked in chosen.checked]
        return Prepared(chosen.blocks, checksums, parts=chosen.parts)

    def taken(self, prepared: Prepared) -> None:
        return

    def close(self) -> None:
        return


def copy_blocks(source: HostBlocks, target: HostBlocks, placements: Sequence[BlockPlacement]) -> list[bool]:
    """Copy blocks, or parts of equal size, from the producer's memory `source` to this node's memory `target`. Return
    for each placement whether its bytes match its checksum; True if it has none.
    """
    source = source.in_parts(placements[0].parts)
    return copy_from([source.address(placement.source) for placement in placements], target, placements)


def copy_from(starts: Sequence[int], target: HostBlocks, placements: Sequence[BlockPlacement]) -> list[bool]:
    """Copy blocks, or parts of equal size, from the memory addresses `starts`, one for each placement, to this node's
    memory `target`. Return for each placement whether its bytes match its checksum; True if it has none.
    """
    target = target.in_parts(placements[0].parts)
    size, sums = target.block_bytes, dict[int, int]()
    ends = [target.address(placement.destination) for placement in placements]
    # Two calls, one that hashes and one that only copies: each gives up the GIL once for all its blocks.
    checked = [place for place, placement in enumerate(placements) if placement.checksum is not None]
    if checked:
        found = copy_hash().copy([ends[place] for place in checked], [starts[place] for place in checked], size)
        sums = dict(zip(checked, found, strict=True))
    others = [place for place, placement in enumerate(placements) if placement.checksum is None]
    copy_hash().move([ends[place] for place in others], [starts[place] for place in others], size)
    return [placement.checksum == sums.get(place) for place, placement in enumerate(placements)]


class BlockIntake:
    """Receives one block that arrives in frames, and writes it to block `destination` of host memory. Each frame is
    copied and hashed while it is still in the CPU cache.
    """

    def __init__(self, target: HostBlocks, destination: int, checksum: int | None) -> None:
        self._end = target.address(destination)
        self._landed = target.view(destination)
        self._checksum = checksum
        self._digest = xxh3_64() if checksum is not None else None
        self._taken = 0

    def take(self, frame: bytes | memoryview) -> None:
        start, size = address_of(frame), len(frame)
        if self._taken + size > len(self._landed):
            raise TransportUnavailable(f"more bytes came than a block of {len(self._landed)} has")
        # Copy and hash in chunks that fit the cache; without a checksum one copy is enough.
        chunk = size if self._digest is None else CHUNK_BYTES
        for inner in range(0, size, chunk):
            step = min(chunk, size - inner)
            copy_bytes(self._end + self._taken, start + inner, step)
            if self._digest is not None:
                self._digest.update(self._landed[self._taken : self._taken + step])
            self._taken += step

    def is_right(self) -> bool:
        # A short block must not pass: without a checksum nothing else would notice it.
        if self._taken != len(self._landed):
            raise TransportUnavailable(f"{self._taken} bytes came for a block of {len(self._landed)}")
        return self._digest is None or self._digest.intdigest() == self._checksum
