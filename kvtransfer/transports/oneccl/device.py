"""Both ends of a pair whose blocks lie in memory of a device: nothing touches the host.

A parcel is one message. Each end for itself sends or receives it where its blocks lie when they are neighbours, else
through memory of the pair. Several messages are under way at once, each on a lane: a stream, and memory if needed.
Messages are received into blocks only if the library can be interrupted (NCCL). Others (`+staging`) may write whenever
they like: they get memory of the pair, from where blocks are copied once the message is whole.
"""

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvtransfer.errors import TransportUnavailable
from kvtransfer.frames import Offer, Piece
from kvtransfer.session.steps import Placement
from kvtransfer.settings import TransferSettings
from kvtransfer.transports.devicecopy import DeviceBlocks
from kvtransfer.transports.devicesums import is_sample, start_sums, sums_of, values_of
from kvtransfer.transports.oneccl.device_pair import DevicePair, Wait
from kvtransfer.transports.oneccl.lanes import Lane, Lanes, neighbours
from kvtransfer.transports.oneccl.pair import Pair
from kvtransfer.transports.oneccl.thread import PairThread
from kvtransfer.transports.port import Announce, Buffer, Intake, Landing, Prepared

STAGED = "+staging"
"""Of a dialect: what comes is received into memory of the pair."""


class DeviceOutlet:
    may_wait = True
    stages = False

    def __init__(self, offer: Offer, thread: PairThread, blocks: DeviceBlocks, settings: TransferSettings) -> None:
        self.offer = offer
        is_staged = offer.dialect.endswith(STAGED)
        self.batch_bytes = max(settings.device_batch_bytes // 2, 1) if is_staged else settings.device_batch_bytes
        self.taper_bytes: int | None = None
        self.window_bytes: int | None = settings.device_window_bytes
        self._mode = settings.checksum
        self._thread = thread
        self._blocks = blocks
        self._lanes = Lanes(blocks)

    def knows(self, blocks: Sequence[int], checked: Sequence[bool]) -> bool:
        return False

    def prepare(self, blocks: Sequence[int], checked: Sequence[bool]) -> Prepared:
        """Waits until they are computed: a receiving kernel would hold a part of the peer's device meanwhile."""
        self._blocks.check(blocks)
        self._blocks.wait_for_computing(blocks)
        if self._mode == "off":
            return Prepared(blocks, [None] * len(blocks))
        return Prepared(blocks, sums_of(self._blocks, blocks, sample=self._mode == "sampled"))

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        announce([()])
        sources = [piece.source for piece in pieces]

        def job(pair: Pair) -> Wait:
            assert isinstance(pair, DevicePair)
            lane = self._lanes.next()
            with lane:
                part = neighbours(self._blocks, sources)
                if part is None:
                    part = lane.staging(len(sources))
                    self._blocks.gather(sources, part)
                return pair.post([part.view(-1)], is_send=True, stream=lane.stream)

        self._thread.submit(job)

    def taken(self, prepared: Prepared) -> None:
        return

    def close(self) -> None:
        self._thread.close()


class PairStream:
    """Parcels in their order, and what becomes of them when the pair breaks."""

    stages = False

    def __init__(self, blocks: DeviceBlocks) -> None:
        self.blocks = blocks
        self.lanes = Lanes(blocks)
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
        count = len(pieces)
        self.thread.submit(lambda pair: self.take(pair, count, landing))

    def take(self, pair: Pair, count: int, landing: Landing) -> "Arrival | None":
        """Begin to receive the landing's `count` blocks."""
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


class DirectInlet(PairStream):
    """What it begins to receive, its thread answers for: `close` must not while the library may write."""

    def take(self, pair: Pair, count: int, landing: Landing) -> "Arrival | None":
        assert isinstance(pair, DevicePair)
        with self.lock:
            if self.is_closed:
                return None
            self.waiting.remove(landing)
        try:
            return self._begin(pair, count, landing)
        except Exception as exc:
            landing.abandon(str(exc))
            raise

    def _begin(self, pair: DevicePair, count: int, landing: Landing) -> "DirectArrival":
        placements = list(landing.placements)
        places = [placement.destination for placement in placements]
        self.blocks.check(places)
        lane = self.lanes.next()
        with lane:
            self.blocks.after_computing(places, lane.stream)
            part, staged = neighbours(self.blocks, places) if len(places) == count else None, None
            if part is None:
                part = staged = lane.staging(count)
            wait = pair.post([part.view(-1)], is_send=False, stream=lane.stream)
            return DirectArrival(self.blocks, lane, landing, placements, wait, staged)


class Arrival:
    """`placements` in their order are those of `landing` that were wanted when its message was begun."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        lane: Lane,
        landing: Landing,
        placements: Sequence[Placement],
        wait: Wait,
        staged: Tensor | None,
    ) -> None:
        self.blocks, self.lane, self.landing, self.placements = blocks, lane, landing, placements
        self.wait, self.staged = wait, staged
        self._checked = [placement for placement in placements if placement.checksum is not None]
        self._sums: Tensor | None = None

    def is_done(self) -> bool:
        return self.wait.is_done()

    def __call__(self) -> None:
        raise NotImplementedError

    def place(self) -> None:
        """On the lane: what was staged goes to its blocks, and those are summed up."""
        if self.staged is not None and self.placements:
            positions = [placement.position for placement in self.placements]
            self.blocks.scatter(self.staged, positions, [placement.destination for placement in self.placements])
        if self._checked:
            sample = is_sample(self._checked[0].checksum)
            self._sums = start_sums(self.blocks, [placement.destination for placement in self._checked], sample=sample)

    def tell(self) -> None:
        """The device has done all of it."""
        sample = bool(self._checked) and is_sample(self._checked[0].checksum)
        found = [] if self._sums is None else values_of(self._sums, sample=sample)
        wrong = {p.index for p, value in zip(self._checked, found, strict=True) if value != p.checksum}
        for placement in self.placements:
            self.landing.placed(placement, matches=placement.index not in wrong)
        self.landing.end()


class DirectArrival(Arrival):
    """All of it is queued on the lane at once."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._is_placed = False
        if self.wait.is_ordered:
            self._place()

    def __call__(self) -> None:
        try:
            self.wait()
            if not self._is_placed:
                with self.lane:
                    self._place()
            self.wait()
        except Exception as exc:
            self.landing.abandon(str(exc))
            raise
        self.tell()

    def _place(self) -> None:
        self.place()
        self._is_placed = True
        self.wait.extend(self.lane.mark())


class StagedInlet(PairStream):
    def take(self, pair: Pair, count: int, landing: Landing) -> "Arrival | None":
        assert isinstance(pair, DevicePair)
        lane = self.lanes.next()
        with lane:
            staged = lane.staging(count)
            wait = pair.post([staged.view(-1)], is_send=False, stream=lane.stream)
        return StagedArrival(self, lane, landing, wait, staged)


class StagedArrival(Arrival):
    """Blocks are written once the message is whole, and not if it was given up meanwhile."""

    def __init__(self, inlet: PairStream, lane: Lane, landing: Landing, wait: Wait, staged: Tensor) -> None:
        super().__init__(inlet.blocks, lane, landing, (), wait, staged)
        self._inlet = inlet

    def __call__(self) -> None:
        self.wait()
        with self._inlet.lock:
            if self._inlet.is_closed:
                return
            placements = list(self.landing.placements)
            places = [placement.destination for placement in placements]
            self.blocks.check(places)
            arrival = Arrival(self.blocks, self.lane, self.landing, placements, self.wait, self.staged)
            with self.lane:
                self.blocks.after_computing(places, self.lane.stream)
                arrival.place()
                self.wait.extend(self.lane.mark())
            self.wait()
            self._inlet.waiting.remove(self.landing)
            arrival.tell()
