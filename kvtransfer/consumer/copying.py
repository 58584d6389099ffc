"""Place the bytes that messages announce or carry, in a worker thread, or on the event loop if they are few."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.transports.port import Buffer, Intake, Receiver
from baton_serve.kvtransfer.workers import Workers

logger = logging.getLogger(__name__)

MIN_REPORT_BYTES = 2 << 20
"""Bytes after which a parcel in progress reports what has arrived and returns credit, so that the producer can send
more.
"""


@dataclass(slots=True)
class StopFlag:
    """A flag that prevents further copies of one attempt. The event loop sets it and worker threads read it."""

    is_set: bool = False


@dataclass(slots=True)
class CopyResult:
    """Which placements were copied, damaged (wrong checksum) or abandoned, as lists of `BlockPlacement.index`, and the
    error if a copy failed.
    """

    copied: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    error: str = ""

    def __bool__(self) -> bool:
        return bool(self.copied or self.damaged or self.abandoned)


Report = Callable[[CopyResult, int], None]
"""Callback on the event loop: receives the result of some placements, and the number of bytes that were taken out of
the connection.
"""


@runtime_checkable
class ReceivesAll(Protocol):
    """A receiver that places all blocks of a message by one call, which costs less than one call for each."""

    def receive_all(self, placements: Sequence[BlockPlacement]) -> list[bool]:
        """Place each block as `Receiver.receive` does. Return for each whether it matches its checksum."""
        ...


@runtime_checkable
class ReceivesWholeBlocks(Protocol):
    """A receiver that places several blocks of one frame by one call, if the frame contains them whole."""

    def take_whole(self, placements: Sequence[BlockPlacement], offsets: Sequence[int], frame: memoryview) -> list[bool]:
        """Place blocks whose bytes begin at these offsets of the frame. Return for each whether it matches its
        checksum.
        """
        ...


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Places blocks whose bytes are available already: in the producer's memory or in the frames of one message."""

    receiver: Receiver
    placements: Sequence[BlockPlacement]
    frames: Sequence[Sequence[Buffer]]
    """The frames of each placement; empty if the receiver reads the producer's memory."""
    stop: StopFlag

    def run(self) -> CopyResult:
        """Copy the blocks, and return a result for every placement. It never raises, because the session waits for a
        result of each placement.
        """
        result = CopyResult()
        # One call for all blocks: it waits for a device, or gives up the GIL, only once.
        if isinstance(self.receiver, ReceivesAll) and not self.stop.is_set:
            self._receive_all(self.receiver, result)
            return result
        for placement, frames in zip(self.placements, self.frames, strict=True):
            if self.stop.is_set or result.error:
                result.abandoned.append(placement.index)
                continue
            try:
                matches = self.receiver.receive(placement, frames)
            except TransportUnavailable as exc:
                result.error = str(exc)
                result.abandoned.append(placement.index)
            except Exception as exc:
                logger.exception("copying a received block failed")
                result.error = f"{type(exc).__name__}: {exc}"
                result.abandoned.append(placement.index)
            else:
                (result.copied if matches else result.damaged).append(placement.index)
        return result

    def _receive_all(self, receiver: ReceivesAll, result: CopyResult) -> None:
        try:
            right = receiver.receive_all(self.placements)
        except Exception as exc:
            if not isinstance(exc, TransportUnavailable):
                logger.exception("copying received blocks failed")
            result.error = f"{type(exc).__name__}: {exc}"
            result.abandoned += [placement.index for placement in self.placements]
            return
        for placement, matches in zip(self.placements, right, strict=True):
            (result.copied if matches else result.damaged).append(placement.index)


class ParcelAssembly:
    """Assembles the blocks of one parcel from frames that come in order and may be cut anywhere. It knows nothing of
    threads and never raises.
    """

    def __init__(self, receiver: Receiver, placements: Sequence[BlockPlacement], block_bytes: int) -> None:
        self.open = {placement.position: placement for placement in placements}
        """Placements that have no result yet, by their position in the parcel."""
        self.num_taken = 0
        """Bytes of the parcel taken so far, whether they were wanted or not."""
        self._receiver = receiver
        self._block_bytes = block_bytes
        self._position = 0
        self._intake: Intake | None = None
        self._in_block = 0
        self._result = CopyResult()

    @property
    def has_trouble(self) -> bool:
        """Return whether the results since the last `pop_result` contain damaged or abandoned placements."""
        return bool(self._result.damaged or self._result.abandoned)

    def pop_result(self) -> CopyResult:
        """Return the results that were recorded since the last call."""
        result, self._result = self._result, CopyResult()
        return result

    def take(self, frame: Buffer) -> None:
        """Copy the next bytes of the parcel to their blocks. A frame may contain the end of one block and the beginning
        of the next.
        """
        rest = memoryview(frame)
        try:
            if (
                self._in_block == 0
                and len(rest) >= self._block_bytes
                and isinstance(self._receiver, ReceivesWholeBlocks)
            ):
                # The frame starts at the beginning of a block: place its whole blocks by one call.
                rest = self._take_whole(self._receiver, rest)
            while len(rest):
                step = min(self._block_bytes - self._in_block, len(rest))
                self._take_of_block(rest[:step])
                rest = rest[step:]
        except TransportUnavailable as exc:
            self.abandon(str(exc))
        except Exception as exc:
            logger.exception("copying a received block failed")
            self.abandon(f"{type(exc).__name__}: {exc}")
        # Counted in any case: the producer gets credit for bytes that could not be placed, too.
        self.num_taken += len(frame)

    def placed(self, placement: BlockPlacement, *, matches: bool) -> None:
        """Record that the transport has written a block itself, and whether the bytes matched the checksum."""
        if self.open.pop(placement.position, None) is not None:
            (self._result.copied if matches else self._result.damaged).append(placement.index)

    def abandon(self, reason: str) -> None:
        """Give up all placements that have no result yet. `reason` says why; it is empty if they were stopped on
        purpose.
        """
        self._result.error = self._result.error or reason
        self._result.abandoned += [placement.index for placement in self.open.values()]
        self.open.clear()
        self._intake = None

    def _take_whole(self, receiver: ReceivesWholeBlocks, frame: memoryview) -> memoryview:
        """Place the whole blocks at the start of a frame. Return the rest of the frame behind them."""
        size, first = self._block_bytes, self._position
        count = len(frame) // size
        wanted = [self.open[position] for position in range(first, first + count) if position in self.open]
        if wanted:
            right = receiver.take_whole(wanted, [(p.position - first) * size for p in wanted], frame)
            for placement, matches in zip(wanted, right, strict=True):
                self.placed(placement, matches=matches)
        self._position += count
        return frame[count * size :]

    def _take_of_block(self, part: memoryview) -> None:
        """Take bytes of the current block, or skip them if the block is not wanted any more."""
        placement = self.open.get(self._position)
        if placement is not None:
            if self._in_block == 0:
                self._intake = self._receiver.intake(placement)
            if self._intake is not None:
                self._intake.take(part)
        self._in_block += len(part)
        if self._in_block < self._block_bytes:
            return
        if placement is not None and self._intake is not None:
            self.placed(placement, matches=self._intake.is_right())
        self._position, self._in_block, self._intake = self._position + 1, 0, None


class StreamedParcel:
    """Implements `transports.port.IncomingParcel`: a parcel that a transport's own thread reads from its channel."""

    def __init__(
        self, assembly: ParcelAssembly, stop: StopFlag, num_bytes: int, workers: Workers, report: Report, *, parts: int
    ) -> None:
        self.parts = parts
        self._assembly = assembly
        self._stop = stop
        self._num_bytes = num_bytes
        self._workers = workers
        self._report = report

    @property
    def placements(self) -> Sequence[BlockPlacement]:
        """Return the placements that are neither copied nor abandoned yet.

        If the copies of the attempt were stopped, abandon all placements and return an empty list.
        """
        self._check_stop()
        return list(self._assembly.open.values())

    def take(self, frame: Buffer) -> None:
        self._check_stop()
        self._assembly.take(frame)

    def placed(self, placement: BlockPlacement, *, matches: bool) -> None:
        self._assembly.placed(placement, matches=matches)

    def end(self) -> None:
        self._post_report(self._assembly.pop_result(), self._num_bytes)

    def abandon(self, reason: str) -> None:
        self._assembly.abandon(reason)
        self._post_report(self._assembly.pop_result(), self._num_bytes)

    def _post_report(self, result: CopyResult, credit: int) -> None:
        self._workers.post(partial(self._report, result, credit))

    def _check_stop(self) -> None:
        if self._stop.is_set:
            self._assembly.abandon("")


class BufferedParcel:
    """A parcel whose bytes come in several messages. They are copied as they arrive, by one worker thread at a time."""

    def __init__(
        self, assembly: ParcelAssembly, *, num_bytes: int, stop: StopFlag, workers: Workers, report: Report
    ) -> None:
        self.stop = stop
        self._assembly = assembly
        self._num_bytes = self._missing = num_bytes
        self._workers = workers
        self._report = report
        self._frames: deque[Buffer] = deque()
        self._lock = threading.Lock()
        self._is_scheduled = False
        self._credit = 0

    def feed(self, frames: Sequence[Buffer]) -> bool:
        """Queue the frames of one message. Return True if all bytes of the parcel have been queued now. Event loop
        only.
        """
        self._missing -= sum(len(frame) for frame in frames)
        with self._lock:
            self._frames.extend(frames)
        self.schedule_run()
        return self._missing <= 0

    def schedule_run(self) -> None:
        """Let a worker thread handle the queued frames and check the stop flag, unless one is doing so already."""
        with self._lock:
            if self._is_scheduled:
                return
            self._is_scheduled = True
        self._workers.submit(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                # The lock is held for the queue only. Copies run without it, while the event loop adds frames.
                frame = self._frames.popleft() if self._frames else None
            if self.stop.is_set:
                self._assembly.abandon("")
            if frame is not None:
                self._assembly.take(frame)
                self._credit += len(frame)
            if self._is_news():
                self._post_report()
            if frame is None and self._is_left_alone():
                return

    def _is_news(self) -> bool:
        """Return whether there is something worth waking the event loop for: damage, the end of the parcel, or
        `MIN_REPORT_BYTES`.
        """
        is_whole = self._assembly.num_taken >= self._num_bytes
        return self._assembly.has_trouble or self._credit >= MIN_REPORT_BYTES or (is_whole and self._credit > 0)

    def _is_left_alone(self) -> bool:
        """Return whether nothing is left to do. Call it last: after True another thread may run this parcel."""
        with self._lock:
            # Check and release under one lock: a frame that was queued in between would otherwise wait for a thread in
            # vain.
            if self._frames or (self.stop.is_set and self._assembly.open):
                return False
            self._is_scheduled = False
            return True

    def _post_report(self) -> None:
        self._workers.post(partial(self._report, self._assembly.pop_result(), self._credit))
        self._credit = 0
