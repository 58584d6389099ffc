"""Both ends of a pair whose blocks lie in memory of a device: nothing touches the host.

A parcel is one message. Each end for itself sends or receives it where its blocks lie when they are neighbours, else
through memory of the pair. Several messages are under way at once, each on a lane: a stream, and memory if needed.
Messages are received into blocks only if the library can be interrupted (NCCL). Others (`+staging`) may write whenever
they like: they get memory of the pair, from where blocks are copied once the message is whole.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.frames import Offer, Piece
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.device_checksums import device_sums, is_sample, new_salt, to_host
from baton_serve.kvtransfer.transports.devicecopy import DeviceBlocks, index_of
from baton_serve.kvtransfer.transports.oneccl.device_pair import DevicePair, Wait
from baton_serve.kvtransfer.transports.oneccl.lanes import Lane, Lanes, neighbours
from baton_serve.kvtransfer.transports.oneccl.pair import Pair
from baton_serve.kvtransfer.transports.oneccl.thread import PairThread
from baton_serve.kvtransfer.transports.port import Announce, Buffer, IncomingParcel, Intake, ParcelContent, Prepared

STAGED = "+staging"
"""Of a dialect: what comes is received into memory of the pair."""


DEVICE_SHARE = 512
"""A message is no more of the device's memory than this part: where blocks are scattered, each lane takes as much."""


class DeviceSender:
    stages = False

    def __init__(self, offer: Offer, thread: PairThread, blocks: DeviceBlocks, settings: TransferSettings) -> None:
        self.offer = offer
        is_staged = offer.dialect.endswith(STAGED)
        batch_bytes = min(settings.device_batch_bytes, blocks.total_bytes() // DEVICE_SHARE)
        self.batch_bytes = max(batch_bytes // 4 if is_staged else batch_bytes, 1)
        self.taper_bytes: int | None = None
        self.window_bytes: int | None = settings.device_window_bytes
        self._mode = settings.checksum
        self._thread = thread
        self._blocks = blocks
        self._lanes = Lanes(blocks)

    def is_quick(self, chosen: ParcelContent, *, is_little: bool) -> bool:
        return self._blocks.in_parts(chosen.parts).is_computed(chosen.blocks)

    def prepare(self, chosen: ParcelContent) -> Prepared:
        """Waits until they are computed: a receiving kernel would hold a part of the peer's device meanwhile."""
        blocks = self._blocks.in_parts(chosen.parts)
        blocks.check(chosen.blocks)
        blocks.wait_for_computing(chosen.blocks)
        salt = None if self._mode == "off" else new_salt(sample=self._mode == "sampled")
        return Prepared(chosen.blocks, [salt] * len(chosen.blocks), parts=chosen.parts)

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        announce([()])
        sources, salt = prepared.sources, prepared.checksums[0]
        blocks = self._blocks.in_parts(prepared.parts)

        def job(pair: Pair) -> Wait:
            assert isinstance(pair, DevicePair)
            lane = self._lanes.next()
            with lane:
                part = neighbours(blocks, sources)
                if part is None:
                    part = lane.staging(len(sources), prepared.parts)
                    blocks.gather(sources, part)
                message = [part.view(-1)]
                if salt is not None:
                    message.append(device_sums(blocks, sources, sample=is_sample(salt)).add_(salt).view(torch.uint8))
                wait = pair.post(message, is_send=True, stream=lane.stream)
                wait.until(lane.mark())
            return wait

        self._thread.submit(job)

    def taken(self, prepared: Prepared) -> None:
        return

    def close(self) -> None:
        self._thread.close()


@dataclass(frozen=True, slots=True)
class DeviceMessage:
    """What comes out of the pair: so many blocks or parts, and perhaps their sums."""

    count: int
    is_summed: bool

    def tensors(self, part: Tensor, lane: Lane) -> list[Tensor]:
        """`part` and, behind it, memory of the lane."""
        return [part.view(-1), *([lane.sums(self.count).view(torch.uint8)] if self.is_summed else [])]


class PairStream:
    """Parcels in their order, and what becomes of them when the pair breaks."""

    stages = False

    def __init__(self, blocks: DeviceBlocks) -> None:
        self.blocks = blocks
        self.lanes = Lanes(blocks)
        self.thread: PairThread | None = None
        self.lock = threading.Lock()
        self.waiting: list[IncomingParcel] = []
        self.is_closed = False
        self.reason = "the pair was given up"

    @property
    def stream(self) -> "PairStream":
        return self

    def expect(self, pieces: Sequence[Piece], landing: IncomingParcel) -> None:
        if self.is_closed or self.thread is None:
            landing.abandon(self.reason)
            return
        self.waiting.append(landing)
        message = DeviceMessage(len(pieces), is_summed=pieces[0].checksum is not None)
        self.thread.submit(lambda pair: self.take(pair, message, landing))

    def take(self, pair: Pair, message: "DeviceMessage", landing: IncomingParcel) -> "DeviceArrival | None":
        """Begin to receive the landing's blocks."""
        raise NotImplementedError

    def receive(self, placement: BlockPlacement, frames: Sequence[Buffer]) -> bool:
        raise TransportUnavailable("blocks of a pair come as a stream")

    def intake(self, placement: BlockPlacement) -> Intake:
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


class DirectReceiver(PairStream):
    """What it begins to receive, its thread answers for: `close` must not while the library may write."""

    def take(self, pair: Pair, message: DeviceMessage, landing: IncomingParcel) -> "DeviceArrival | None":
        assert isinstance(pair, DevicePair)
        with self.lock:
            if self.is_closed:
                return None
            self.waiting.remove(landing)
        try:
            return self._begin(pair, message, landing)
        except Exception as exc:
            landing.abandon(str(exc))
            raise

    def _begin(self, pair: DevicePair, message: DeviceMessage, landing: IncomingParcel) -> "DirectArrival":
        blocks, placements = self.blocks.in_parts(landing.parts), list(landing.placements)
        places = [placement.destination for placement in placements]
        blocks.check(places)
        lane = self.lanes.next()
        with lane:
            blocks.after_computing(places, lane.stream)
            part, staged = neighbours(blocks, places) if len(places) == message.count else None, None
            if part is None:
                part = staged = lane.staging(message.count, landing.parts)
            wait = pair.post(message.tensors(part, lane), is_send=False, stream=lane.stream)
            arrival = DirectArrival(blocks, lane, landing, placements, wait, message, staged)
            if wait.is_ordered:
                arrival.place()
            return arrival


class DeviceArrival:
    """`placements` in their order are those of `landing` that were wanted when its message was begun."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        lane: Lane,
        landing: IncomingParcel,
        placements: Sequence[BlockPlacement],
        wait: Wait,
        message: DeviceMessage,
        staged: Tensor | None,
    ) -> None:
        self.blocks, self.lane, self.landing, self.placements = blocks, lane, landing, placements
        self.wait, self.message, self.staged = wait, message, staged
        self._found: Tensor | None = None

    def __call__(self) -> None:
        raise NotImplementedError

    def place(self) -> None:
        """On the lane: what was staged goes to its blocks, and those are summed up."""
        places = [placement.destination for placement in self.placements]
        if self.staged is not None and places:
            self.blocks.scatter(self.staged, [placement.position for placement in self.placements], places)
        if self.message.is_summed and places:
            sums = self.lane.sums(self.message.count)
            if len(places) < self.message.count:
                sums = sums[index_of([placement.position for placement in self.placements], self.blocks.device)]
            sample = is_sample(self.placements[0].checksum)
            self._found = to_host(sums - device_sums(self.blocks, places, sample=sample))
        self.wait.until(self.lane.mark())

    def tell(self) -> None:
        """The device has done all of it."""
        salts = [None] * len(self.placements) if self._found is None else self._found.tolist()
        for placement, salt in zip(self.placements, salts, strict=True):
            self.landing.placed(placement, matches=placement.checksum == salt)
        self.landing.end()


class DirectArrival(DeviceArrival):
    """On a device all of it is queued on the lane at once."""

    def __call__(self) -> None:
        try:
            self.wait()
            if not self.wait.is_ordered:
                with self.lane:
                    self.place()
        except Exception as exc:
            self.landing.abandon(str(exc))
            raise
        self.tell()


class StagedReceiver(PairStream):
    def take(self, pair: Pair, message: DeviceMessage, landing: IncomingParcel) -> "DeviceArrival | None":
        assert isinstance(pair, DevicePair)
        blocks, lane = self.blocks.in_parts(landing.parts), self.lanes.next()
        with lane:
            staged = lane.staging(message.count, landing.parts)
            wait = pair.post(message.tensors(staged, lane), is_send=False, stream=lane.stream)
            wait.until(lane.mark())
        return StagedArrival(self, blocks, lane, landing, wait, message, staged)


class StagedArrival(DeviceArrival):
    """Blocks are written once the message is whole, and not if it was given up meanwhile."""

    def __init__(
        self,
        receiver: PairStream,
        blocks: DeviceBlocks,
        lane: Lane,
        landing: IncomingParcel,
        wait: Wait,
        message: DeviceMessage,
        staged: Tensor,
    ) -> None:
        super().__init__(blocks, lane, landing, (), wait, message, staged)
        self._receiver = receiver

    def __call__(self) -> None:
        self.wait()
        with self._receiver.lock:
            if self._receiver.is_closed:
                return
            self.placements = list(self.landing.placements)
            places = [placement.destination for placement in self.placements]
            self.blocks.check(places)
            with self.lane:
                self.blocks.after_computing(places, self.lane.stream)
                self.place()
            self.wait()
            self._receiver.waiting.remove(self.landing)
            self.tell()
