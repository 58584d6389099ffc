"""The transport `zeromq`, between hosts: the bytes of blocks are ZeroMQ frames, without further copies.

Each frame costs some 0.3 ms of Python at both ends, so long prompts travel in frames of 8 MiB. Frames are never joined.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import msgspec

from baton_serve.kvtransfer.block_memory import address_of, keep_freed_memory
from baton_serve.kvtransfer.control_messages import Hello, Offer, Piece, Welcome
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.hostcopy import BlockIntake, HostBlocks, HostSender, copy_from, host_blocks
from baton_serve.kvtransfer.transports.port import (
    Announce,
    AttachRequest,
    Buffer,
    NodeFacts,
    Prepared,
    Receiver,
    ReceiveTarget,
    Sender,
)

MIN_FRAME_BYTES = 1 << 20
"""Smallest frame in bytes; smaller frames would cost more messages than they save time."""


def frame_step(num_bytes: int, block_bytes: int, longest: int) -> int:
    """Return the size in bytes of the ZeroMQ frames in which a parcel of `num_bytes` is sent; `longest` is the upper
    bound.

    A small parcel is divided in two, so that one half is placed while the other one arrives. Frames contain whole
    blocks if possible, because one call places them.
    """
    step = longest if num_bytes >= longest else min(max(num_bytes // 2, MIN_FRAME_BYTES), longest)
    return step - step % block_bytes if step >= block_bytes else step


class FrameSender(HostSender):
    """The producer's end of the transport `zeromq` for blocks in host memory: sends them as ZeroMQ frames without
    copying them.
    """

    def __init__(self, offer: Offer, request: AttachRequest, settings: TransferSettings) -> None:
        super().__init__(offer, request, settings, has_window=True)
        self._frame_bytes = settings.frame_bytes
        self._inline_bytes = settings.inline_bytes

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        """Send the blocks of a small parcel (up to `inline_bytes`) in the message that announces them. Send the blocks
        of a larger parcel in later messages, one frame in each.
        """
        blocks = self.blocks.in_parts(prepared.parts)
        if len(pieces) * blocks.block_bytes <= self._inline_bytes:
            announce([[blocks.view(piece.source) for piece in pieces]])
        else:
            announce([[], *([frame] for frame in self._frames(blocks, pieces))])

    def _frames(self, blocks: HostBlocks, pieces: Sequence[Piece]) -> Iterator[Buffer]:
        """Return the frames that contain the blocks of a parcel (`pieces`), in order. Blocks that are neighbours in
        memory share frames, so that small blocks need not mean small frames.
        """
        step = frame_step(len(pieces) * blocks.block_bytes, blocks.block_bytes, self._frame_bytes)
        first = 0
        for last, piece in enumerate(pieces):
            if last + 1 < len(pieces) and pieces[last + 1].source == piece.source + 1:
                continue
            run = blocks.view(pieces[first].source, last + 1 - first)
            yield from (run[offset : offset + step] for offset in range(0, len(run), step))
            first = last + 1


class FrameReceiver:
    """The consumer's end of the transport `zeromq` for blocks in host memory: writes the blocks that arrive as ZeroMQ
    frames to their destinations.
    """

    stream = None
    stages = False

    def __init__(self, target: HostBlocks) -> None:
        self._target = target

    def receive(self, placement: BlockPlacement, frames: Sequence[Buffer]) -> bool:
        intake = self.intake(placement)
        for frame in frames:
            intake.take(frame)
        return intake.is_right()

    def take_whole(self, placements: Sequence[BlockPlacement], offsets: Sequence[int], frame: memoryview) -> list[bool]:
        """Copy several whole blocks out of one frame; `offsets` has the position in the frame at which each begins.
        Return for each whether it matches its checksum. Implements `kvtransfer.consumer.copy_jobs.ReceivesWholeBlocks`.
        """
        start = address_of(frame)
        return copy_from([start + offset for offset in offsets], self._target, placements)

    def intake(self, placement: BlockPlacement) -> BlockIntake:
        return BlockIntake(self._target.in_parts(placement.parts), placement.destination, placement.checksum)

    def close(self) -> None:
        return


class ZeromqTransport:
    """The transport `zeromq`: sends the bytes of blocks over the same ZeroMQ connections as the control messages, so it
    works between any two instances that can exchange messages.
    """

    name = "zeromq"
    pulls = False
    buffers = True
    streams = False
    narrows = True
    dialects: Sequence[str] = ()

    def __init__(self, facts: NodeFacts, settings: TransferSettings) -> None:
        self._settings = settings

    async def start(self) -> None:
        # The setting helps receiving, which happens in ZeroMQ's I/O threads.
        keep_freed_memory()

    def serves(self, hello: Hello) -> bool:
        return True

    async def sender(self, request: AttachRequest, on_failed: Callable[[str], None]) -> Sender:
        settings = self._settings_for(request.hello)
        if request.wire != request.layout:
            narrowing: Sender = _loaded("baton_serve.kvtransfer.conversion.senders").NarrowingSender(
                Offer(self.name), request.memory, settings, layout=request.layout, wire=request.wire
            )
            return narrowing
        if request.memory.host_view is not None:
            return FrameSender(Offer(self.name), request, settings)
        staged = _loaded("baton_serve.kvtransfer.transports.zeromq_staged")
        sender: Sender = staged.StagedFrameSender(Offer(self.name), request.memory, settings)
        return sender

    async def attach(self, welcome: Welcome, offer: Offer, target: ReceiveTarget) -> Receiver:
        if target.converter is not None:
            converting: Receiver = _loaded("baton_serve.kvtransfer.conversion.receivers").ConvertingFrameReceiver(
                target.converter
            )
            return converting
        if target.memory.host_view is not None:
            return FrameReceiver(host_blocks(target.memory))
        receiver: Receiver = _loaded("baton_serve.kvtransfer.transports.zeromq_staged").StagedFrameReceiver(
            target.memory
        )
        return receiver

    async def close(self) -> None:
        return

    def _settings_for(self, hello: Hello) -> TransferSettings:
        """Return the node's settings with the limit of bytes in flight for all connections together that the consumer
        of `hello` will open.
        """
        num_connections = min(self._settings.zeromq_connections, hello.connections)
        # `SendQueue` has one window for all connections of a consumer together.
        return msgspec.structs.replace(self._settings, window_bytes=self._settings.window_bytes * num_connections)


def _loaded(module: str) -> ModuleType:
    """Import and return a module that needs torch. It is called only for memory of a device, or if layouts differ."""
    return importlib.import_module(module)
