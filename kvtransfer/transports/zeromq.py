"""`zeromq`: blocks follow their announcement as frames of 1 MB, read straight from the cache, placed straight into it.

Larger frames are slower: each would be a fresh mapping with page faults. Nothing is joined.
"""

from collections.abc import Sequence

from kvtransfer.frames import Hello, Offer, Piece, Welcome
from kvtransfer.session.steps import Placement
from kvtransfer.settings import TransferSettings
from kvtransfer.transports.hostcopy import HostBlocks, gather_block, host_blocks
from kvtransfer.transports.port import Announce, Buffer, NodeFacts


class FrameOutlet:
    def __init__(self, blocks: HostBlocks, frame_bytes: int) -> None:
        self._blocks = blocks
        self._frame_bytes = frame_bytes

    def send(self, pieces: Sequence[Piece], announce: Announce) -> None:
        size, step = self._blocks.block_bytes, self._frame_bytes
        frames: list[Buffer] = []
        for piece in pieces:
            block = self._blocks.view(piece.source)
            frames += [block[offset : offset + step] for offset in range(0, size, step)]
        announce(frames)

    def close(self) -> None:
        return


class FrameInlet:
    def __init__(self, target: HostBlocks) -> None:
        self._target = target

    def receive(self, placement: Placement, frames: Sequence[Buffer]) -> bool:
        return gather_block(frames, self._target, placement.destination, placement.checksum)

    def close(self) -> None:
        return


class ZeromqTransport:
    name = "zeromq"
    pulls = False
    buffers = True

    def __init__(self, facts: NodeFacts, settings: TransferSettings) -> None:
        self._memory = facts.memory
        self._frame_bytes = settings.frame_bytes

    async def start(self) -> None:
        return

    def offer(self, hello: Hello) -> Offer | None:
        return Offer(self.name) if self._memory.host_view is not None else None

    async def attach(self, welcome: Welcome, offer: Offer) -> FrameInlet:
        return FrameInlet(host_blocks(self._memory))

    def outlet(self) -> FrameOutlet:
        return FrameOutlet(host_blocks(self._memory), self._frame_bytes)

    async def close(self) -> None:
        return
