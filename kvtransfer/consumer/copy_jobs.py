"""Copies received blocks in worker threads, verifies their checksums, and reports what was copied."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

from baton_serve.kvtransfer.copy_threads import Workers
from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.transports.port import Buffer, Intake, Receiver

logger = logging.getLogger(__name__)

MIN_REPORT_BYTES = 2 << 20
"""Bytes after which a parcel in progress reports what has arrived and returns credit, so that the producer can send
more.
"""


@dataclass(slots=True)
class StopFlag:
    """A flag that prevents the copies of one attempt of a fetch that have not begun yet. The event loop sets it, and
    worker threads read it before each copy.
    """

    is_set: bool = False


@dataclass(slots=True)
class CopyResult:
    """The results of copies of received blocks: the placements that were copied, damaged (wrong checksum) or abandoned
    (not copied), as lists of `BlockPlacement.index`. `error` is the reason if a copy failed, otherwise empty.
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
    """A transport's receiver that can place all blocks of a message by one call, which costs less than one call for
    each block.
    """

    def receive_all(self, placements: Sequence[BlockPlacement]) -> list[bool]:
        """Place all these blocks, each as `Receiver.receive` does. Return one value for each placement: whether the
        block's bytes match its checksum.
        """
        ...


@runtime_checkable
class ReceivesWholeBlocks(Protocol):
    """A transport's receiver that can place several blocks of one frame by one call, if the frame contains them from
    their first to their last byte.
    """

    def take_whole(self, placements: Sequence[BlockPlacement], offsets: Sequence[int], frame: memoryview) -> list[bool]:
        """Copy whole blocks out of `frame` to their destinations. `offsets` has the byte position in the frame at which
        the block of each placement begins. Return one value for each: whether the bytes match the block's checksum.
        """
        ...


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One job of a worker thread: place blocks whose bytes are available already, in the producer's memory or in the
    frames of one message.
    """

    receiver: Receiver
    placements: Sequence[BlockPlacement]
    frames: Sequence[Sequence[Buffer]]
    """The frames of each placement; empty if the receiver reads the producer's memory."""
    stop: StopFlag

    def run(self) -> CopyResult:
        """Copy the blocks to their destinations. Return a result for every placement, also after an error or a stop;
        never raise, because the fetch waits for all results.
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
    """Writes the blocks of one parcel to their destinations, from frames that come in order and may be cut anywhere,
    also inside a block. Errors become results of the placements: it never raises. It has no lock: one thread at a time
    may use it.
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
        """Return whether any block was found damaged or was abandoned since the last call of `pop_result`."""
        return bool(self._result.damaged or self._result.abandoned)

    def pop_result(self) -> CopyResult:
        """Return the results of the placements that ended since the last call of this method, and forget them."""
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
        """Record that the transport has written the block of `placement` itself. `matches` says whether its bytes
        matched its checksum.
        """
        if self.open.pop(placement.position, None) is not None:
            (self._result.copied if matches else self._result.damaged).append(placement.index)

    def abandon(self, reason: str) -> None:
        """Record all placements without a result as abandoned: their blocks are not copied. `reason` is the error that
        caused it; it is empty if the copies were stopped on purpose.
        """
        self._result.error = self._result.error or reason
        self._result.abandoned += [placement.index for placement in self.open.values()]
        self.open.clear()
        self._intake = None

    def _take_whole(self, receiver: ReceivesWholeBlocks, frame: memoryview) -> memoryview:
        """Let `receiver` place the blocks that lie completely in `frame`, which begins at the start of a block. Return
        the bytes of the frame behind them, the beginning of the next block.
        """
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
        """Copy `part`, the next bytes of the block that is being received, to its destination, or skip them if the
        fetch does not want the block any more.
        """
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
    """A parcel that a transport's own thread reads from the transport's channel. Implements
    `transports.port.IncomingParcel`.
    """

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
        """Return the placements of this parcel whose blocks are neither copied nor abandoned yet.

        If the copies of the fetch's attempt were stopped, abandon all placements and return an empty list.
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
    """A parcel whose bytes come in several ZeroMQ messages. Worker threads copy the bytes to the blocks as they arrive,
    only one thread at a time.
    """

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
        """Queue the frames of one message for a worker thread. Return True if all bytes of the parcel have been queued
        now. Call it only on the event loop.
        """
        self._missing -= sum(len(frame) for frame in frames)
        with self._lock:
            self._frames.extend(frames)
        self.schedule_run()
        return self._missing <= 0

    def schedule_run(self) -> None:
        """Let a worker thread copy the queued frames, or abandon the parcel if the stop flag is set. Do nothing if a
        thread is at work on this parcel already.
        """
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
        """Return whether the event loop must be informed now: a block was damaged or abandoned, the parcel is complete,
        or at least `MIN_REPORT_BYTES` have arrived since the last report.
        """
        is_whole = self._assembly.num_taken >= self._num_bytes
        return self._assembly.has_trouble or self._credit >= MIN_REPORT_BYTES or (is_whole and self._credit > 0)

    def _is_left_alone(self) -> bool:
        """Return whether the worker thread has nothing left to do for this parcel. If so, it must not touch the parcel
        any more, because another thread may start to work on it.
        """
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
