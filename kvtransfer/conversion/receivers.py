"""Receives blocks of another layout: verifies the bytes as they travelled, then places their tokens in this node's
blocks.

The destination of a placement is a place of `StagingBuffers`. Host memory and memory of a device are written in the
same way, as tensors.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.kvtransfer.block_memory import BlockMemory, DeviceMemory, address_of
from baton_serve.kvtransfer.conversion.staging_buffers import StagingBuffers
from baton_serve.kvtransfer.conversion.tensors import place
from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.transports.devicecopy import DeviceBlocks
from baton_serve.kvtransfer.transports.hostcopy import BlockIntake, HostBlocks
from baton_serve.kvtransfer.transports.port import Buffer, Intake


class HostTensor:
    """Gives `memory`, KV blocks in host memory, the interface `kvtransfer.block_memory.DeviceMemory`, so that one
    implementation converts blocks in both kinds of memory.
    """

    shared_fd = None
    host_view = None

    def __init__(self, memory: BlockMemory) -> None:
        assert memory.host_view is not None
        self.num_blocks = memory.num_blocks
        self.block_bytes = memory.block_bytes
        self.device_tensor: Any = as_tensor(memory.host_view).view(self.num_blocks, self.block_bytes)

    def ready_after(self, blocks: Iterable[int]) -> Sequence[Any]:
        """Return no events: host memory can always be read."""
        return ()


def as_tensors(memory: BlockMemory) -> DeviceBlocks:
    """Return access to the blocks of `memory`, on the host or on a device, as torch tensors."""
    if memory.host_view is not None:
        return DeviceBlocks(HostTensor(memory))
    device: Any = memory
    checked: DeviceMemory = device
    return DeviceBlocks(checked)


def as_tensor(view: memoryview) -> Tensor:
    """Return the bytes of `view` as a uint8 tensor that shares its memory. The caller must keep that memory alive as
    long as the tensor is used.
    """
    size = view.nbytes
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address_of(view)), dtype=torch.uint8)


class LayoutConverter:
    """Converts blocks that arrive in the memory layout `wire` to a node's own `layout`, and writes their tokens to the
    blocks in the node's `memory`. Any thread may call it.
    """

    def __init__(self, staging_buffers: StagingBuffers, wire: KVLayout, layout: KVLayout, memory: BlockMemory) -> None:
        self.wire = wire
        self._staging_buffers = staging_buffers
        self._layout = layout
        self._blocks = as_tensors(memory)
        self.waits = memory.host_view is None
        """True if `place` waits for a device."""

    def place(self, destination: int, block: memoryview) -> None:
        """Convert `block`, one whole verified block of the producer, write its tokens to this node's blocks, and wait
        until they are written. `destination` is the number that `StagingBuffers` gave to the arriving block.
        """
        targets = self._staging_buffers.targets(destination)
        blocks = [target.block for target in targets]
        self._blocks.check(blocks)
        with self._blocks.on_stream():
            # The engine may still read the previous content of these blocks.
            self._blocks.after_computing(blocks)
            place(as_tensor(block).to(self._blocks.device), self.wire, targets, self._blocks.tensor, self._layout)
        self._blocks.wait()


class MappedReceiver:
    """Receives blocks of a producer with another layout, whose memory this process has mapped: it converts them
    directly out of the producer's KV cache, or out of the ring of shared memory in which the producer stages them
    (`is_ring`).
    """

    stream = None

    def __init__(self, source: HostBlocks, converter: LayoutConverter, *, is_ring: bool = False) -> None:
        self.stages = is_ring or converter.waits
        self._source: HostBlocks | None = source
        self._converter = converter

    def receive(self, placement: BlockPlacement, frames: Sequence[Buffer]) -> bool:
        source = self._source
        if source is None:
            raise TransportUnavailable("the connection was closed")
        # Verify before the conversion: the checksum covers the bytes as they travelled.
        if placement.checksum is not None and source.checksum(placement.source) != placement.checksum:
            return False
        self._converter.place(placement.destination, source.view(placement.source))
        return True

    def intake(self, placement: BlockPlacement) -> Intake:
        raise TransportUnavailable("this transport sends no bytes")

    def close(self) -> None:
        # Drop the mapping, but a running copy keeps its own reference to it.
        self._source = None


class ConvertingFrameReceiver:
    """Receives blocks of a producer with another layout that arrive as frames: it collects the frames of each block,
    and converts the block when it is complete.
    """

    stream = None

    def __init__(self, converter: LayoutConverter) -> None:
        self.stages = converter.waits
        self._converter = converter

    def receive(self, placement: BlockPlacement, frames: Sequence[Buffer]) -> bool:
        intake = self.intake(placement)
        for frame in frames:
            intake.take(frame)
        return intake.is_right()

    def intake(self, placement: BlockPlacement) -> "GatheredIntake":
        return GatheredIntake(self._converter, placement)

    def close(self) -> None:
        return


class GatheredIntake:
    """Collects the frames of one block in a buffer, because the conversion to another layout needs all bytes of the
    block together.
    """

    def __init__(self, converter: LayoutConverter, placement: BlockPlacement) -> None:
        size = converter.wire.block_bytes
        # Conversion needs the whole block: frames may be cut anywhere, also inside a token.
        self._view = memoryview(bytearray(size))
        self._intake = BlockIntake(HostBlocks(self._view, 1, size), 0, placement.checksum)
        self._converter = converter
        self._destination = placement.destination
        self.take = self._intake.take

    def is_right(self) -> bool:
        matches = self._intake.is_right()
        if matches:
            self._converter.place(self._destination, self._view)
        return matches
