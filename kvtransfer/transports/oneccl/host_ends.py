"""Sends and receives blocks of host memory through a collective library.

Bytes are received into a buffer of the pair, and copied to the blocks from there while they are verified. A library
that cannot be interrupted may write to that buffer at any later time, but never to blocks that may have another content
by then.
"""

import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from baton_serve.kvtransfer.control_messages import Offer, Piece
from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.hostcopy import HostSender
from baton_serve.kvtransfer.transports.oneccl.pair import Pair
from baton_serve.kvtransfer.transports.oneccl.thread import PairThread
from baton_serve.kvtransfer.transports.port import (
    Announce,
    AttachRequest,
    Buffer,
    IncomingParcel,
    Intake,
    Prepared,
    Receiver,
)

MESSAGE_BYTES = 16 << 20
"""Largest message in bytes. Larger ones have erratic speed over oneCCL's tcp provider; each call costs about 42 µs of
host time on Arc.
"""


@dataclass(frozen=True, slots=True)
class Region:
    """A range of bytes in the producer's block memory: `offset` bytes from the start of its first block, `size` bytes
    long.
    """

    offset: int
    size: int


def groups(pieces: Sequence[Piece], block_bytes: int, limit: int = MESSAGE_BYTES) -> list[list[Region]]:
    """Divide the blocks or parts of a parcel, of `block_bytes` each, into messages of at most `limit` bytes, and return
    for each message the regions of the producer's memory that it contains. The regions are in the order of `pieces`,
    and neighbours in memory are joined. Both ends compute the same result from the announcement.
    """
    made: list[list[Region]] = []
    room = 0
    for run in _runs(pieces, block_bytes):
        offset, left = run.offset, run.size
        while left:
            if not room:
                made.append([])
                room = limit
            step = min(left, room)
            made[-1].append(Region(offset, step))
            offset, left, room = offset + step, left - step, room - step
    return made


def _runs(pieces: Sequence[Piece], block_bytes: int) -> list[Region]:
    runs: list[Region] = []
    for piece in pieces:
        offset = piece.source * block_bytes
        if runs and runs[-1].offset + runs[-1].size == offset:
            runs[-1] = Region(runs[-1].offset, runs[-1].size + block_bytes)
        else:
            runs.append(Region(offset, block_bytes))
    return runs


class PairSender(HostSender):
    """The producer's end of the transport `oneccl` for blocks in host memory: announces blocks, then sends their bytes
    over the pair (a connection through a collective library).
    """

    def __init__(self, offer: Offer, thread: PairThread, request: AttachRequest, settings: TransferSettings) -> None:
        super().__init__(offer, request, settings, has_window=True)
        self._thread = thread
        assert request.memory.host_view is not None
        self._view = request.memory.host_view.cast("B")

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        announce([()])
        messages = groups(pieces, self.blocks.block_bytes // prepared.parts)

        def job(pair: Pair) -> None:
            for message in messages:
                pair.send([self._view[region.offset : region.offset + region.size] for region in message])

        self._thread.submit(job)

    def close(self) -> None:
        self._thread.close()


class PairReceiver:
    """The consumer's end of the transport `oneccl` for blocks in host memory: receives parcels over the pair (a
    connection through a collective library), in the order in which they were announced.
    """

    stages = False

    def __init__(self, frames: Receiver, block_bytes: int) -> None:
        """Create a receiver for blocks of `block_bytes`. `frames` is the receiver that writes the arriving bytes of
        each block to its destination. The caller sets `thread` before the first parcel arrives.
        """
        self._frames = frames
        self._block_bytes = block_bytes
        # A mapping of its own: the library may write to it even after the pair was given up.
        self._buffer = memoryview(mmap.mmap(-1, MESSAGE_BYTES))
        self._lock = threading.Lock()
        self._waiting: list[IncomingParcel] = []
        self._is_closed = False
        self._reason = "the pair was given up"
        self.thread: PairThread | None = None

    @property
    def stream(self) -> "PairReceiver":
        return self

    def expect(self, pieces: Sequence[Piece], parcel: IncomingParcel) -> None:
        if self._is_closed or self.thread is None:
            parcel.abandon(self._reason)
            return
        self._waiting.append(parcel)
        messages = groups(pieces, self._block_bytes // parcel.parts)
        self.thread.submit(lambda pair: self._take(pair, messages, parcel))

    def intake(self, placement: BlockPlacement) -> Intake:
        return self._frames.intake(placement)

    def receive(self, placement: BlockPlacement, frames: Sequence[Buffer]) -> bool:
        raise TransportUnavailable("blocks of a pair come as a stream")

    def close(self) -> None:
        """Give up the pair (the connection through the collective library) and abandon all parcels that have not
        arrived.

        It waits for a running copy into blocks, but not for a running call of the collective library.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            waiting, self._waiting = self._waiting, []
            for parcel in waiting:
                parcel.abandon(self._reason)
        if self.thread is not None:
            self.thread.close()

    def failed(self, reason: str) -> None:
        """Give up the pair (the connection through the collective library) because of `reason`, and abandon all parcels
        that have not arrived.
        """
        self._reason = reason
        self.close()

    def _take(self, pair: Pair, messages: Sequence[Sequence[Region]], parcel: IncomingParcel) -> None:
        for message in messages:
            parts: list[memoryview] = []
            filled = 0
            for region in message:
                parts.append(self._buffer[filled : filled + region.size])
                filled += region.size
            # Without the lock: this call may never return, and `close` must not wait for it.
            pair.receive(parts)
            with self._lock:
                if self._is_closed:
                    return
                parcel.take(self._buffer[:filled])
        with self._lock:
            if not self._is_closed:
                self._waiting.remove(parcel)
                parcel.end()
