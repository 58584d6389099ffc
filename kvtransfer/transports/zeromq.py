"""`zeromq`: blocks follow their announcement as frames, read straight from the cache, placed straight into it.

A frame costs both ends' Python some 0.3 ms, so long prompts travel in frames of 8 MiB. Nothing is joined.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import msgspec

from baton_serve.kvtransfer.frames import Hello, Offer, Piece, Welcome
from baton_serve.kvtransfer.memory import address_of, keep_freed_memory
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
"""Smaller ones cost more messages than they save."""


def frame_step(num_bytes: int, block_bytes: int, longest: int) -> int:
    """Size of the frames of a parcel: half of a small one, which is placed while the other half comes, and of whole
    blocks where it can be, which are placed by one call."""
    step = longest if num_bytes >= longest else min(max(num_bytes // 2, MIN_FRAME_BYTES), longest)
    return step - step % block_bytes if step >= block_bytes else step


class FrameSender(HostSender):
    def __init__(self, offer: Offer, wish: AttachRequest, settings: TransferSettings) -> None:
        super().__init__(offer, wish, settings, has_window=True)
        self._frame_bytes = settings.frame_bytes
        self._inline_bytes = settings.inline_bytes

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        """Few bytes travel with their announcement, more of them a frame at a time behind it."""
        blocks = self.blocks.in_parts(prepared.parts)
        if len(pieces) * blocks.block_bytes <= self._inline_bytes:
            announce([[blocks.view(piece.source) for piece in pieces]])
        else:
            announce([[], *([frame] for frame in self._frames(blocks, pieces))])

    def _frames(self, blocks: HostBlocks, pieces: Sequence[Piece]) -> Iterator[Buffer]:
        """Neighbours in memory share frames: small blocks need not mean small frames."""
        step = frame_step(len(pieces) * blocks.block_bytes, blocks.block_bytes, self._frame_bytes)
        first = 0
        for last, piece in enumerate(pieces):
            if last + 1 < len(pieces) and pieces[last + 1].source == piece.source + 1:
                continue
            run = blocks.view(pieces[first].source, last + 1 - first)
            yield from (run[offset : offset + step] for offset in range(0, len(run), step))
            first = last + 1


class FrameReceiver:
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
        """`kvtransfer.consumer.copying.TakesWhole`: one call, which gives Python's lock away once."""
        start = address_of(frame)
        return copy_from([start + offset for offset in offsets], self._target, placements)

    def intake(self, placement: BlockPlacement) -> BlockIntake:
        return BlockIntake(self._target.in_parts(placement.parts), placement.destination, placement.checksum)

    def close(self) -> None:
        return


class ZeromqTransport:
    name = "zeromq"
    pulls = False
    buffers = True
    streams = False
    narrows = True
    dialects: Sequence[str] = ()

    def __init__(self, facts: NodeFacts, settings: TransferSettings) -> None:
        self._settings = settings

    async def start(self) -> None:
        keep_freed_memory()

    def serves(self, hello: Hello) -> bool:
        return True

    async def sender(self, wish: AttachRequest, on_failed: Callable[[str], None]) -> Sender:
        settings = self._settings_for(wish.hello)
        if wish.wire != wish.layout:
            narrowing: Sender = _loaded("baton_serve.kvtransfer.conversion.senders").NarrowingSender(
                Offer(self.name), wish.memory, settings, layout=wish.layout, wire=wish.wire
            )
            return narrowing
        if wish.memory.host_view is not None:
            return FrameSender(Offer(self.name), wish, settings)
        staged = _loaded("baton_serve.kvtransfer.transports.staged")
        sender: Sender = staged.StagedFrameSender(Offer(self.name), wish.memory, settings)
        return sender

    async def attach(self, welcome: Welcome, offer: Offer, target: ReceiveTarget) -> Receiver:
        if target.converter is not None:
            converting: Receiver = _loaded("baton_serve.kvtransfer.conversion.receivers").ConvertingFrameReceiver(
                target.converter
            )
            return converting
        if target.memory.host_view is not None:
            return FrameReceiver(host_blocks(target.memory))
        receiver: Receiver = _loaded("baton_serve.kvtransfer.transports.staged").StagedFrameReceiver(target.memory)
        return receiver

    async def close(self) -> None:
        return

    def _settings_for(self, hello: Hello) -> TransferSettings:
        """With a window that keeps all connections busy."""
        num_connections = min(self._settings.zeromq_connections, hello.connections)
        return msgspec.structs.replace(self._settings, window_bytes=self._settings.window_bytes * num_connections)


def _loaded(module: str) -> ModuleType:
    """With torch: only for memory of a device, or where layouts differ."""
    return importlib.import_module(module)
