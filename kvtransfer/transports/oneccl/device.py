"""Both ends of a pair whose blocks lie in memory of a device: sends read them there, nothing touches the host.

Direct: every block is received into its place. It needs a library that can be interrupted (NCCL). Staged: neighbours
travel as one message into memory of the pair, and are copied from there; a library that never comes back keeps that.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from kvtransfer.errors import TransportUnavailable
from kvtransfer.frames import Offer, Piece
from kvtransfer.session.steps import Placement
from kvtransfer.settings import TransferSettings
from kvtransfer.transports.devicecopy import DeviceBlocks
from kvtransfer.transports.oneccl.device_pair import DevicePair, Wait
from kvtransfer.transports.oneccl.pair import Pair
from kvtransfer.transports.oneccl.regions import Region, groups
from kvtransfer.transports.oneccl.thread import PairThread
from kvtransfer.transports.port import Announce, Buffer, Intake, Landing, Prepared

STAGED = "+staging"
"""Of a dialect: blocks are received into memory of the pair first."""
STAGING_BYTES = 64 << 20


class DeviceOutlet:
    may_wait = True
    stages = False

    def __init__(self, offer: Offer, thread: PairThread, blocks: DeviceBlocks, settings: TransferSettings) -> None:
        self.offer = offer
        self.batch_bytes = settings.device_batch_bytes
        self.window_bytes: int | None = settings.device_window_bytes
        self._thread = thread
        self._blocks = blocks

    def prepare(self, blocks: Sequence[int], checked: Sequence[bool]) -> Prepared:
        """Checksums are made where the blocks lie."""
        sums = iter(self._blocks.checksums([b for b, is_checked in zip(blocks, checked, strict=True) if is_checked]))
        return Prepared(blocks, [next(sums) if is_checked else None for is_checked in checked])

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        announce([()])
        is_staged, blocks = self.offer.dialect.endswith(STAGED), self._blocks
        flat = blocks.tensor.view(-1)

        def job(pair: Pair) -> None:
            assert isinstance(pair, DevicePair)
            with blocks.on_stream():
                blocks.after_computing()
            if not is_staged:
                pair.post([blocks.tensor[piece.source] for piece in pieces], is_send=True)()
                return
            waits = [
                pair.post([flat[r.offset : r.offset + r.size] for r in message], is_send=True)
                for message in groups(pieces, blocks.block_bytes, STAGING_BYTES)
            ]
            for wait in waits:
                wait()

        self._thread.submit(job)

    def taken(self, prepared: Prepared) -> None:
        return

    def close(self) -> None:
        self._thread.close()


class PairStream:
    """What both kinds of inlets share: parcels in their order, and what becomes of them when the pair breaks."""

    stages = False

    def __init__(self, blocks: DeviceBlocks) -> None:
        self.blocks = blocks
        self.thread: PairThread | None = None
        self.lock = threading.Lock()
        self.waiting: list[Landing] = []
        self.is_closed = False
        self.reason = "the pair was given up"

    @property
    def stream(self) -> "PairStream":
        return self

    def expect(self, pieces: Sequence[Piece], landing: Landing) -> None:
        if self.is_closed or self.thread is None:
            landing.abandon(self.reason)
            return
        self.waiting.append(landing)
        self.thread.submit(lambda pair: self.take(pair, pieces, landing))

    def take(self, pair: Pair, pieces: Sequence[Piece], landing: Landing) -> None:
        raise NotImplementedError

    def receive(self, placement: Placement, frames: Sequence[Buffer]) -> bool:
        raise TransportUnavailable("blocks of a pair come as a stream")

    def intake(self, placement: Placement) -> Intake:
        raise TransportUnavailable("blocks of a device's pair do not come through the host")

    def close(self) -> None:
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            waiting, self.waiting = self.waiting, []
            for landing in waiting:
                landing.abandon(self.reason)
        if self.thread is not None:
            self.thread.close()

    def failed(self, reason: str) -> None:
        self.reason = reason
        self.close()

    def place(self, landing: Landing, placements: Sequence[Placement]) -> None:
        """They are there: verify those that have a checksum."""
        checked = [placement for placement in placements if placement.checksum is not None]
        sums = self.blocks.checksums([placement.destination for placement in checked])
        wrong = {p.index for p, found in zip(checked, sums, strict=True) if found != p.checksum}
        for placement in placements:
            landing.placed(placement, matches=placement.index not in wrong)
        landing.end()


class DirectInlet(PairStream):
    def __init__(self, blocks: DeviceBlocks) -> None:
        super().__init__(blocks)
        self._unwanted = torch.empty(blocks.block_bytes, dtype=torch.uint8, device=blocks.device)

    def take(self, pair: Pair, pieces: Sequence[Piece], landing: Landing) -> None:
        """From here on this thread answers for the landing: `close` must not while the library may write."""
        assert isinstance(pair, DevicePair)
        with self.lock:
            if self.is_closed:
                return
            self.waiting.remove(landing)
        placements = {placement.position: placement for placement in landing.placements}
        self.blocks.check([placement.destination for placement in placements.values()])
        parts: list[Tensor] = []
        for position in range(len(pieces)):
            wanted = placements.get(position)
            parts.append(self._unwanted if wanted is None else self.blocks.tensor[wanted.destination])
        try:
            pair.post(parts, is_send=False)()
            self.place(landing, list(placements.values()))
        except Exception as exc:
            landing.abandon(str(exc))
            raise


class StagedInlet(PairStream):
    def __init__(self, blocks: DeviceBlocks) -> None:
        super().__init__(blocks)
        self._staging = [torch.empty(STAGING_BYTES, dtype=torch.uint8, device=blocks.device) for _ in range(2)]

    def take(self, pair: Pair, pieces: Sequence[Piece], landing: Landing) -> None:
        """The next message travels while this one's blocks are copied to their places."""
        assert isinstance(pair, DevicePair)
        messages = groups(pieces, self.blocks.block_bytes, STAGING_BYTES)
        placements = {placement.position: placement for placement in landing.placements}
        self.blocks.check([placement.destination for placement in placements.values()])
        waits = [self._post(pair, messages, 0)]
        done = 0
        for number, message in enumerate(messages):
            waits[number]()
            if number + 1 < len(messages):
                waits.append(self._post(pair, messages, number + 1))
            size = sum(region.size for region in message)
            with self.lock:
                if self.is_closed:
                    return
                self._copy(self._staging[number % 2][:size], done, placements)
            done += size
        with self.lock:
            if not self.is_closed:
                self.waiting.remove(landing)
                self.place(landing, list(placements.values()))

    def _post(self, pair: DevicePair, messages: Sequence[Sequence[Region]], number: int) -> Wait:
        parts: list[Tensor] = []
        filled = 0
        for region in messages[number]:
            parts.append(self._staging[number % 2][filled : filled + region.size])
            filled += region.size
        return pair.post(parts, is_send=False)

    def _copy(self, staging: Tensor, first: int, placements: dict[int, Placement]) -> None:
        """`first`: which of the parcel's bytes the staging begins with."""
        size, taken = self.blocks.block_bytes, 0
        with self.blocks.on_stream():
            while taken < len(staging):
                position, inner = divmod(first + taken, size)
                step = min(size - inner, len(staging) - taken)
                placement = placements.get(position)
                if placement is not None:
                    target = self.blocks.tensor[placement.destination]
                    target[inner : inner + step].copy_(staging[taken : taken + step], non_blocking=True)
                taken += step
        self.blocks.wait()
