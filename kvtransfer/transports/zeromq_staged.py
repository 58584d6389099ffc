"""The transport `zeromq` for blocks of a device, staged in pinned host memory at both ends."""

from collections.abc import Sequence
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from baton_serve.kvtransfer.block_memory import DeviceMemory
from baton_serve.kvtransfer.control_messages import Offer, Piece
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.devicecopy import DeviceBlocks, HostArea
from baton_serve.kvtransfer.transports.hostcopy import BlockIntake, HostBlocks
from baton_serve.kvtransfer.transports.port import Announce, Buffer, ParcelContent, Prepared
from baton_serve.kvtransfer.transports.zeromq import frame_step


class StagedFrames:
    """Base class of producer's ends that copy the blocks of a parcel to host memory first and send them from there as
    ZeroMQ frames. `block_bytes` is the size of a block as it travels.
    """

    stages = False

    def __init__(self, offer: Offer, settings: TransferSettings, block_bytes: int) -> None:
        self.offer = offer
        self.taper_bytes: int | None = None
        self.window_bytes: int | None = settings.window_bytes
        self.batch_bytes = max(min(settings.batch_bytes, settings.window_bytes // 2), 1)
        self._frame_bytes = settings.frame_bytes
        self._inline_bytes = settings.inline_bytes
        self._block_bytes = block_bytes

    # `prepare` copies from a device, or converts, so it always runs in a thread.
    def is_quick(self, chosen: ParcelContent, *, is_little: bool) -> bool:
        return False

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        """Announce a prepared parcel and send its bytes from the staging memory, which ZeroMQ keeps alive until it has
        sent them.
        """
        (view,) = prepared.views
        size = self._block_bytes // prepared.parts
        step = frame_step(len(view), size, self._frame_bytes)
        if len(view) <= self._inline_bytes:
            announce([[view[offset : offset + size] for offset in range(0, len(view), size)]])
        else:
            announce([[], *([view[offset : offset + step]] for offset in range(0, len(view), step))])

    def taken(self, prepared: Prepared) -> None:
        return

    def close(self) -> None:
        return


class StagedFrameSender(StagedFrames):
    """The producer's end of the transport `zeromq` for blocks of a device: copies them to pinned host memory and sends
    them from there.
    """

    def __init__(self, offer: Offer, memory: DeviceMemory, settings: TransferSettings) -> None:
        super().__init__(offer, settings, memory.block_bytes)
        self._blocks = DeviceBlocks(memory)

    def prepare(self, chosen: ParcelContent) -> Prepared:
        blocks, count = self._blocks.in_parts(chosen.parts), len(chosen.blocks)
        size = blocks.block_bytes
        view = pinned(count * size, blocks.device)
        blocks.read(chosen.blocks, HostArea(view, size, blocks.device, is_pinned=True), range(count))
        views = [view[place * size : (place + 1) * size] for place in range(count)]
        return Prepared(chosen.blocks, hashed(views, chosen.checked), [view], chosen.parts)


def hashed(views: Sequence[Buffer], checked: Sequence[bool]) -> list[int | None]:
    """Return the xxh3_64 checksum of each buffer in `views` for which `checked` is true, and None for the others."""
    return [xxh3_64_intdigest(v) if is_checked else None for v, is_checked in zip(views, checked, strict=True)]


class StagedFrameReceiver:
    """The consumer's end of the transport `zeromq` for blocks of a device: copies them to the device through pinned
    host memory.
    """

    stream = None
    stages = True
    """Copies to a device wait for it, so they must not run on the event loop."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._blocks = DeviceBlocks(memory)

    def receive(self, placement: BlockPlacement, frames: Sequence[Buffer]) -> bool:
        intake = self.intake(placement)
        for frame in frames:
            intake.take(frame)
        return intake.is_right()

    def intake(self, placement: BlockPlacement) -> "StagedIntake":
        return StagedIntake(self._blocks.in_parts(placement.parts), placement)

    def close(self) -> None:
        return


class StagedIntake:
    """Receives one block that arrives in frames: collects it in pinned host memory, verifies it, and copies it to the
    device if it matches its checksum.
    """

    def __init__(self, blocks: DeviceBlocks, placement: BlockPlacement) -> None:
        view = pinned(blocks.block_bytes, blocks.device)
        self._area = HostArea(view, blocks.block_bytes, blocks.device, is_pinned=True)
        self._intake = BlockIntake(HostBlocks(view, 1, blocks.block_bytes), 0, placement.checksum)
        self._blocks = blocks
        self._destination = placement.destination
        self.take = self._intake.take

    def is_right(self) -> bool:
        matches = self._intake.is_right()
        if matches:
            self._blocks.write(self._area, [0], [self._destination])
        return matches


def pinned(size: int, device: torch.device) -> memoryview:
    """Return a buffer of `size` bytes of host memory, pinned unless `device` is the CPU. It comes from torch's cache of
    pinned memory and returns to it when the buffer is deleted.
    """
    tensor = torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    array: Any = tensor.numpy()
    return memoryview(array)
