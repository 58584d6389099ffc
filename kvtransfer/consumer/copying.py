"""Placing the bytes that messages announce or carry: what runs in a thread, or inline when it is little."""

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
"""What arrived is told, and credit returned, at least this often."""


@dataclass(slots=True)
class StopFlag:
    is_set: bool = False


@dataclass(slots=True)
class CopyResult:
    copied: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    error: str = ""

    def __bool__(self) -> bool:
        return bool(self.copied or self.damaged or self.abandoned)


Report = Callable[[CopyResult, int], None]
"""Called on the loop with what became of placements, and how many bytes were taken out of the connection."""


@runtime_checkable
class ReceivesAll(Protocol):
    """An inlet that places all blocks of a message at once more cheaply than one after another."""

    def receive_all(self, placements: Sequence[BlockPlacement]) -> list[bool]:
        """As `Receiver.receive`, for each."""
        ...


@runtime_checkable
class ReceivesWholeBlocks(Protocol):
    """An inlet that places blocks which lie whole in a frame more cheaply at once than one after another."""

    def take_whole(self, placements: Sequence[BlockPlacement], offsets: Sequence[int], frame: memoryview) -> list[bool]:
        """As `Receiver.receive`, for each: its bytes begin at its offset in the frame."""
        ...


@dataclass(frozen=True, slots=True)
class CopyJob:
    receiver: Receiver
    placements: Sequence[BlockPlacement]
    frames: Sequence[Sequence[Buffer]]
    """Of each placement."""
    stop: StopFlag

    def run(self) -> CopyResult:
        """Never raises: the session must hear of every placement."""
        result = CopyResult()
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
                logger.exception("a copy failed")
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
                logger.exception("a copy failed")
            result.error = f"{type(exc).__name__}: {exc}"
            result.abandoned += [placement.index for placement in self.placements]
            return
        for placement, matches in zip(self.placements, right, strict=True):
            (result.copied if matches else result.damaged).append(placement.index)


class ParcelAssembly:
    """Blocks of one parcel from bytes that come in order, cut anywhere. Knows no thread; never raises."""

    def __init__(self, receiver: Receiver, placements: Sequence[BlockPlacement], block_bytes: int) -> None:
        self.open = {placement.position: placement for placement in placements}
        self.num_taken = 0
        """Bytes, wanted or not."""
        self._receiver = receiver
        self._block_bytes = block_bytes
        self._position = 0
        self._intake: Intake | None = None
        self._in_block = 0
        self._result = CopyResult()

    @property
    def has_trouble(self) -> bool:
        return bool(self._result.damaged or self._result.abandoned)

    def pop_result(self) -> CopyResult:
        """What happened since the last call."""
        result, self._result = self._result, CopyResult()
        return result

    def take(self, frame: Buffer) -> None:
        """A frame may end one block and begin the next."""
        rest = memoryview(frame)
        try:
            if (
                self._in_block == 0
                and len(rest) >= self._block_bytes
                and isinstance(self._receiver, ReceivesWholeBlocks)
            ):
                rest = self._take_whole(self._receiver, rest)
            while len(rest):
                step = min(self._block_bytes - self._in_block, len(rest))
                self._take_of_block(rest[:step])
                rest = rest[step:]
        except TransportUnavailable as exc:
            self.abandon(str(exc))
        except Exception as exc:
            logger.exception("a copy failed")
            self.abandon(f"{type(exc).__name__}: {exc}")
        self.num_taken += len(frame)

    def placed(self, placement: BlockPlacement, *, matches: bool) -> None:
        """The transport has placed this block itself."""
        if self.open.pop(placement.position, None) is not None:
            (self._result.copied if matches else self._result.damaged).append(placement.index)

    def abandon(self, reason: str) -> None:
        self._result.error = self._result.error or reason
        self._result.abandoned += [placement.index for placement in self.open.values()]
        self.open.clear()
        self._intake = None

    def _take_whole(self, receiver: ReceivesWholeBlocks, frame: memoryview) -> memoryview:
        """Returns what follows the frame's last whole block."""
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
        """Blocks whose placement is not (or no longer) wanted are skipped."""
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
    """`transports.port.Landing`: a parcel that a transport's own thread takes out of its stream."""

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
        self._heed()
        return list(self._assembly.open.values())

    def take(self, frame: Buffer) -> None:
        self._heed()
        self._assembly.take(frame)

    def placed(self, placement: BlockPlacement, *, matches: bool) -> None:
        self._assembly.placed(placement, matches=matches)

    def end(self) -> None:
        self._tell(self._assembly.pop_result(), self._num_bytes)

    def abandon(self, reason: str) -> None:
        self._assembly.abandon(reason)
        self._tell(self._assembly.pop_result(), self._num_bytes)

    def _tell(self, result: CopyResult, credit: int) -> None:
        self._workers.post(partial(self._report, result, credit))

    def _heed(self) -> None:
        if self._stop.is_set:
            self._assembly.abandon("")


class BufferedParcel:
    """A parcel whose bytes come in several messages: copied as they come, by one thread at a time."""

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
        """True when these were the parcel's last."""
        self._missing -= sum(len(frame) for frame in frames)
        with self._lock:
            self._frames.extend(frames)
        self.schedule_run()
        return self._missing <= 0

    def schedule_run(self) -> None:
        """Let a thread look at what is here, and whether to stop."""
        with self._lock:
            if self._is_scheduled:
                return
            self._is_scheduled = True
        self._workers.submit(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                frame = self._frames.popleft() if self._frames else None
            if self.stop.is_set:
                self._assembly.abandon("")
            if frame is not None:
                self._assembly.take(frame)
                self._credit += len(frame)
            if self._is_news():
                self._tell()
            if frame is None and self._is_left_alone():
                return

    def _is_news(self) -> bool:
        """Trouble, the parcel's end, or enough to be worth waking the loop."""
        is_whole = self._assembly.num_taken >= self._num_bytes
        return self._assembly.has_trouble or self._credit >= MIN_REPORT_BYTES or (is_whole and self._credit > 0)

    def _is_left_alone(self) -> bool:
        """The last thing this thread does here: from then on another may run."""
        with self._lock:
            if self._frames or (self.stop.is_set and self._assembly.open):
                return False
            self._is_scheduled = False
            return True

    def _tell(self) -> None:
        self._workers.post(partial(self._report, self._assembly.pop_result(), self._credit))
        self._credit = 0
