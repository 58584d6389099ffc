"""Placing the bytes that messages announce or carry: what runs in a copy thread, or inline when it is little."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtransfer.errors import TransportUnavailable
from kvtransfer.session.steps import Placement
from kvtransfer.transports.port import Buffer, Inlet, Intake
from kvtransfer.workers import Workers

logger = logging.getLogger(__name__)

REPORT_BYTES = 2 << 20
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


@dataclass(frozen=True, slots=True)
class CopyJob:
    inlet: Inlet
    placements: Sequence[Placement]
    frames: Sequence[Sequence[Buffer]]
    """Of each placement."""
    stop: StopFlag

    def run(self) -> CopyResult:
        """Never raises: the session must hear of every placement."""
        result = CopyResult()
        for placement, frames in zip(self.placements, self.frames, strict=True):
            if self.stop.is_set or result.error:
                result.abandoned.append(placement.index)
                continue
            try:
                matches = self.inlet.receive(placement, frames)
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


class Receipt:
    """A parcel whose bytes come in several messages: copied as they come, by one thread at a time.

    `report` is called on the loop with what became of placements and how many bytes were taken out of the connection.
    """

    def __init__(
        self,
        inlet: Inlet,
        placements: Sequence[Placement],
        *,
        num_bytes: int,
        block_bytes: int,
        stop: StopFlag,
        workers: Workers,
        report: Callable[[CopyResult, int], None],
    ) -> None:
        self.stop = stop
        self._inlet = inlet
        self._open = {placement.position: placement for placement in placements}
        self._num_bytes = self._missing = num_bytes
        self._block_bytes = block_bytes
        self._workers = workers
        self._report = report
        self._frames: deque[Buffer] = deque()
        self._lock = threading.Lock()
        self._is_scheduled = False
        self._position = 0
        self._intake: Intake | None = None
        self._in_block = 0
        self._result = CopyResult()
        self._credit = 0

    def feed(self, frames: Sequence[Buffer]) -> bool:
        """True when these were the parcel's last."""
        self._missing -= sum(len(frame) for frame in frames)
        with self._lock:
            self._frames.extend(frames)
        self.kick()
        return self._missing <= 0

    def kick(self) -> None:
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
                self._abandon("")
            if frame is not None:
                self._guarded_take(frame)
                self._credit += len(frame)
            if self._is_news():
                self._tell()
            if frame is None and self._is_left_alone():
                return

    def _is_news(self) -> bool:
        """Trouble, the parcel's end, or enough to be worth waking the loop."""
        is_whole = self._position * self._block_bytes >= self._num_bytes
        has_trouble = bool(self._result.damaged or self._result.abandoned)
        return has_trouble or self._credit >= REPORT_BYTES or (is_whole and self._credit > 0)

    def _is_left_alone(self) -> bool:
        """The last thing this thread does here: from then on another may run."""
        with self._lock:
            if self._frames or (self.stop.is_set and self._open):
                return False
            self._is_scheduled = False
            return True

    def _tell(self) -> None:
        self._workers.post(partial(self._report, self._result, self._credit))
        self._result, self._credit = CopyResult(), 0

    def _guarded_take(self, frame: Buffer) -> None:
        try:
            self._take(frame)
        except TransportUnavailable as exc:
            self._abandon(str(exc))
        except Exception as exc:
            logger.exception("a copy failed")
            self._abandon(f"{type(exc).__name__}: {exc}")

    def _take(self, frame: Buffer) -> None:
        """A frame may end one block and begin the next."""
        rest = memoryview(frame)
        while len(rest):
            step = min(self._block_bytes - self._in_block, len(rest))
            self._take_of_block(rest[:step])
            rest = rest[step:]

    def _take_of_block(self, part: memoryview) -> None:
        """Blocks whose placement is not (or no longer) wanted are skipped."""
        placement = self._open.get(self._position)
        if placement is not None:
            if self._in_block == 0:
                self._intake = self._inlet.intake(placement)
            if self._intake is not None:
                self._intake.take(part)
        self._in_block += len(part)
        if self._in_block < self._block_bytes:
            return
        if placement is not None and self._intake is not None:
            matches = self._intake.is_right()
            (self._result.copied if matches else self._result.damaged).append(placement.index)
            del self._open[self._position]
        self._position, self._in_block, self._intake = self._position + 1, 0, None

    def _abandon(self, reason: str) -> None:
        self._result.error = self._result.error or reason
        self._result.abandoned += [placement.index for placement in self._open.values()]
        self._open.clear()
        self._intake = None
