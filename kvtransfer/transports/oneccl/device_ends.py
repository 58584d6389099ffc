"""Sends and receives blocks of a device's memory through a collective library. No byte passes through the host.

A parcel is one message. Each end sends or receives it where its blocks lie if they are neighbours, otherwise through
memory of the pair. Several messages are in flight together, each on a lane: a stream, with memory if needed. A message
is received directly into blocks only if the library can be interrupted (NCCL). Other libraries (`+staging`) may write
at any later time, so they get memory of the pair, from which the blocks are copied when the message is complete.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_serve.kvtransfer.control_messages import Offer, Piece
from baton_serve.kvtransfer.errors import TransportUnavailable
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
"""Suffix of a dialect whose messages are received into memory of the pair."""


DEVICE_SHARE = 512
"""A message has at most this fraction (1 / DEVICE_SHARE) of the device's memory. If blocks are scattered, each lane
allocates as much.
"""


class DeviceSender:
    """The producer's end of the transport `oneccl` for blocks in a device's memory, for one consumer. A thread of its
    own, `PairThread`, calls the collective library.
    """

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
        """Return whether the engine has computed the blocks of the parcel `chosen` already, so that `prepare` does not
        wait. `is_little` is not used.
        """
        return self._blocks.in_parts(chosen.parts).is_computed(chosen.blocks)

    def prepare(self, chosen: ParcelContent) -> Prepared:
        """Wait until the engine has computed the blocks: if they were announced before, the consumer's receive would
        occupy its device while it waits. Return the parcel with a new random number (salt) that is added to its
        checksums, unless checksums are off.
        """
        blocks = self._blocks.in_parts(chosen.parts)
        blocks.check(chosen.blocks)
        blocks.wait_for_computing(chosen.blocks)
        salt = None if self._mode == "off" else new_salt(sample=self._mode == "sampled")
        return Prepared(chosen.blocks, [salt] * len(chosen.blocks), parts=chosen.parts)

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        # Announce first: the consumer must start to receive, or the send below would wait for it.
        announce([()])
        sources, salt = prepared.sources, prepared.checksums[0]
        blocks = self._blocks.in_parts(prepared.parts)

        def job(pair: Pair) -> Wait:
            assert isinstance(pair, DevicePair)
            lane = self._lanes.next()
            with lane:
                # Neighbours can be sent where they lie; scattered blocks are gathered into memory of the lane first.
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
    """The shape of one message of a collective library: the number of blocks or parts (`count`), and whether their
    checksums follow them (`is_summed`).
    """

    count: int
    is_summed: bool

    def tensors(self, part: Tensor, lane: Lane) -> list[Tensor]:
        """Return the tensors that are sent or received as this message: `part`, which holds the blocks, and behind it
        memory of `lane` for the checksums, if the message has any.
        """
        return [part.view(-1), *([lane.sums(self.count).view(torch.uint8)] if self.is_summed else [])]


class PairStream:
    """Base class of the consumer's ends of the transport `oneccl` for a device's memory. It keeps the announced parcels
    in order, and abandons them if the pair (the connection through the collective library) breaks. The event loop
    announces parcels and closes it; the pair's thread receives. `lock` guards what both change.
    """

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

    def expect(self, pieces: Sequence[Piece], parcel: IncomingParcel) -> None:
        if self.is_closed or self.thread is None:
            parcel.abandon(self.reason)
            return
        self.waiting.append(parcel)
        message = DeviceMessage(len(pieces), is_summed=pieces[0].checksum is not None)
        self.thread.submit(lambda pair: self.take(pair, message, parcel))

    def take(self, pair: Pair, message: "DeviceMessage", parcel: IncomingParcel) -> "DeviceArrival | None":
        """Start to receive `message`, which contains the blocks of `parcel`, in the pair's thread. Return the object to
        call until it is complete, or None if the pair was closed.
        """
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
            for parcel in waiting:
                parcel.abandon(self.reason)
        if self.thread is not None:
            self.thread.close()

    def failed(self, reason: str) -> None:
        """Give up the pair (the connection through the collective library) because of `reason`, and abandon all parcels
        that have not arrived.
        """
        self.reason = reason
        self.close()


class DirectReceiver(PairStream):
    """Receives messages of a collective library directly into the destination blocks if these are consecutive,
    otherwise through staging memory of the device. Once a parcel has begun, only the thread that calls the library ends
    it: `close` must not abandon it while the library may still write to its blocks.
    """

    def take(self, pair: Pair, message: DeviceMessage, parcel: IncomingParcel) -> "DeviceArrival | None":
        assert isinstance(pair, DevicePair)
        with self.lock:
            if self.is_closed:
                return None
            # From here on `close` does not abandon this parcel: the library may write into its blocks until it has
            # ended.
            self.waiting.remove(parcel)
        try:
            return self._begin(pair, message, parcel)
        except Exception as exc:
            parcel.abandon(str(exc))
            raise

    def _begin(self, pair: DevicePair, message: DeviceMessage, parcel: IncomingParcel) -> "DirectArrival":
        blocks, placements = self.blocks.in_parts(parcel.parts), list(parcel.placements)
        places = [placement.destination for placement in placements]
        blocks.check(places)
        lane = self.lanes.next()
        with lane:
            # The engine may still read the previous content of these blocks.
            blocks.after_computing(places, lane.stream)
            part, staged = neighbours(blocks, places) if len(places) == message.count else None, None
            if part is None:
                part = staged = lane.staging(message.count, parcel.parts)
            wait = pair.post(message.tensors(part, lane), is_send=False, stream=lane.stream)
            arrival = DirectArrival(blocks, lane, parcel, placements, wait, message, staged)
            if wait.is_ordered:
                arrival.place()
            return arrival


class DeviceArrival:
    """A message of a collective library that is being received into a device's memory. Calling this object waits for
    the end of the message and reports its blocks.

    `placements` are the blocks of the parcel that were still wanted when the receive began, in the order of the parcel.
    `staged` is the staging memory that the message is received into, or None if it is received into the destination
    blocks.
    """

    def __init__(
        self,
        blocks: DeviceBlocks,
        lane: Lane,
        parcel: IncomingParcel,
        placements: Sequence[BlockPlacement],
        wait: Wait,
        message: DeviceMessage,
        staged: Tensor | None,
    ) -> None:
        self.blocks, self.lane, self.parcel, self.placements = blocks, lane, parcel, placements
        self.wait, self.message, self.staged = wait, message, staged
        self._found: Tensor | None = None

    def __call__(self) -> None:
        raise NotImplementedError

    def place(self) -> None:
        """Queue work on the device, behind the message: copy staged blocks to their destinations, and compute the
        checksums of all received blocks.
        """
        places = [placement.destination for placement in self.placements]
        if self.staged is not None and places:
            self.blocks.scatter(self.staged, [placement.position for placement in self.placements], places)
        if self.message.is_summed and places:
            # The sums arrived behind the blocks: subtracting the sums of what arrived leaves the salt if both are
            # equal.
            sums = self.lane.sums(self.message.count)
            if len(places) < self.message.count:
                sums = sums[index_of([placement.position for placement in self.placements], self.blocks.device)]
            sample = is_sample(self.placements[0].checksum)
            self._found = to_host(sums - device_sums(self.blocks, places, sample=sample))
        self.wait.until(self.lane.mark())

    def report(self) -> None:
        """Report each block of the parcel as placed, with the result of its checksum, then the end of the parcel. Call
        it when the device has finished the work of `place`.
        """
        salts = [None] * len(self.placements) if self._found is None else self._found.tolist()
        for placement, salt in zip(self.placements, salts, strict=True):
            self.parcel.placed(placement, matches=placement.checksum == salt)
        self.parcel.end()


class DirectArrival(DeviceArrival):
    """A message that a `DirectReceiver` is receiving. On a device, the copies and checksums that follow it are queued
    at once, so that the host waits only once.
    """

    def __call__(self) -> None:
        try:
            self.wait()
            if not self.wait.is_ordered:
                with self.lane:
                    self.place()
        except Exception as exc:
            self.parcel.abandon(str(exc))
            raise
        self.report()


class StagedReceiver(PairStream):
    """Receives messages of a collective library into staging memory of the device, and copies the blocks from there to
    their destinations when a message is complete.
    """

    def take(self, pair: Pair, message: DeviceMessage, parcel: IncomingParcel) -> "DeviceArrival | None":
        assert isinstance(pair, DevicePair)
        blocks, lane = self.blocks.in_parts(parcel.parts), self.lanes.next()
        with lane:
            staged = lane.staging(message.count, parcel.parts)
            wait = pair.post(message.tensors(staged, lane), is_send=False, stream=lane.stream)
            wait.until(lane.mark())
        return StagedArrival(self, blocks, lane, parcel, wait, message, staged)


class StagedArrival(DeviceArrival):
    """A message that a `StagedReceiver` is receiving into staging memory. The message's blocks are written when it is
    complete, or not at all if the receiver was closed before.
    """

    def __init__(
        self,
        receiver: PairStream,
        blocks: DeviceBlocks,
        lane: Lane,
        parcel: IncomingParcel,
        wait: Wait,
        message: DeviceMessage,
        staged: Tensor,
    ) -> None:
        super().__init__(blocks, lane, parcel, (), wait, message, staged)
        self._receiver = receiver

    def __call__(self) -> None:
        self.wait()
        with self._receiver.lock:
            # The parcel was abandoned, and its blocks may hold something else by now.
            if self._receiver.is_closed:
                return
            self.placements = list(self.parcel.placements)
            places = [placement.destination for placement in self.placements]
            self.blocks.check(places)
            with self.lane:
                self.blocks.after_computing(places, self.lane.stream)
                self.place()
            self.wait()
            self._receiver.waiting.remove(self.parcel)
            self.report()
