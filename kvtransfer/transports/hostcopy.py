"""Copies between host addresses, verified while the bytes are still in the cache."""

from collections.abc import Sequence

from xxhash import xxh3_64

from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.frames import Offer
from baton_serve.kvtransfer.memory import BlockMemory, address_of, copy_bytes, parts_of
from baton_serve.kvtransfer.native.copyhash import CHUNK_BYTES, copy_hash
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.port import AttachRequest, ParcelContent, Prepared

TAPER = 4
"""The first and the last parcels of a prompt are so much smaller than others: one end waits for them."""


class HostBlocks:
    """Blocks of a buffer by index, with bounds checked."""

    def __init__(self, view: memoryview, num_blocks: int, block_bytes: int) -> None:
        if view.nbytes < num_blocks * block_bytes:
            raise TransportUnavailable(f"{view.nbytes} bytes cannot hold {num_blocks} blocks of {block_bytes}")
        self._address = address_of(view)
        self._view = view
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._parts: dict[int, HostBlocks] = {}

    def in_parts(self, count: int) -> "HostBlocks":
        """The same bytes, each block as so many."""
        if count == 1:
            return self
        if count not in self._parts:
            self._parts[count] = HostBlocks(self._view, self.num_blocks * count, self.block_bytes // count)
        return self._parts[count]

    def address(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise TransportUnavailable(f"block {block} is not one of {self.num_blocks}")
        return self._address + block * self.block_bytes

    def view(self, block: int, count: int = 1) -> memoryview:
        """`count` neighbours, from `block` on."""
        if not 0 <= block <= self.num_blocks - count:
            raise TransportUnavailable(f"block {block} is not one of {self.num_blocks}")
        return self._view[block * self.block_bytes : (block + count) * self.block_bytes]

    def checksum(self, block: int) -> int:
        return copy_hash().checksums([self.address(block)], self.block_bytes)[0]


def host_blocks(memory: BlockMemory) -> HostBlocks:
    view = memory.host_view
    if view is None:
        raise TransportUnavailable("this memory is not addressable by the host")
    return HostBlocks(view.cast("B"), memory.num_blocks, memory.block_bytes)


class HostSender:
    """What outlets of blocks in host memory share: they are read where they lie."""

    stages = False
    taper_bytes: int | None
    window_bytes: int | None = None

    def __init__(
        self, offer: Offer, wish: AttachRequest, settings: TransferSettings, *, has_window: bool = False
    ) -> None:
        self.offer = offer
        self.batch_bytes = settings.batch_bytes
        self.taper_bytes = max(settings.batch_bytes // TAPER, 1)
        if has_window:
            self.window_bytes = settings.window_bytes
            self.batch_bytes = max(min(settings.batch_bytes, settings.window_bytes // 2), 1)
            self.taper_bytes = None
        self.blocks = host_blocks(wish.memory)
        self._memory = wish.memory
        self._sums = wish.sums

    def is_quick(self, chosen: ParcelContent, *, is_little: bool) -> bool:
        """Also where nothing is to be read."""
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
    """For each: False when what was copied does not match the checksum. Checked ones go first, in one call. All are
    blocks, or parts of one size."""
    source = source.in_parts(placements[0].parts)
    return copy_from([source.address(placement.source) for placement in placements], target, placements)


def copy_from(starts: Sequence[int], target: HostBlocks, placements: Sequence[BlockPlacement]) -> list[bool]:
    """As `copy_blocks`, from addresses: one for each placement."""
    target = target.in_parts(placements[0].parts)
    size, sums = target.block_bytes, dict[int, int]()
    ends = [target.address(placement.destination) for placement in placements]
    checked = [place for place, placement in enumerate(placements) if placement.checksum is not None]
    if checked:
        found = copy_hash().copy([ends[place] for place in checked], [starts[place] for place in checked], size)
        sums = dict(zip(checked, found, strict=True))
    others = [place for place, placement in enumerate(placements) if placement.checksum is None]
    copy_hash().move([ends[place] for place in others], [starts[place] for place in others], size)
    return [placement.checksum == sums.get(place) for place, placement in enumerate(placements)]


class BlockIntake:
    """A block that comes in frames: each is placed and hashed while it is still in the cache."""

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
        chunk = size if self._digest is None else CHUNK_BYTES
        for inner in range(0, size, chunk):
            step = min(chunk, size - inner)
            copy_bytes(self._end + self._taken, start + inner, step)
            if self._digest is not None:
                self._digest.update(self._landed[self._taken : self._taken + step])
            self._taken += step

    def is_right(self) -> bool:
        if self._taken != len(self._landed):
            raise TransportUnavailable(f"{self._taken} bytes came for a block of {len(self._landed)}")
        return self._digest is None or self._digest.intdigest() == self._checksum
