"""Placing the blocks of one message: what runs in a copy thread, or inline when it is little."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.errors import TransportUnavailable
from kvtransfer.session.steps import Placement
from kvtransfer.transports.port import Buffer, Inlet

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StopFlag:
    is_set: bool = False


@dataclass(slots=True)
class CopyResult:
    copied: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyJob:
    inlet: Inlet
    placements: Sequence[Placement]
    frames: Sequence[Sequence[Buffer]]
    """Of each placement."""
    stop: StopFlag

    def run(self) -> CopyResult:
        """Never raises: the session must hear of every placement."""
        result, began = CopyResult(), time.perf_counter()
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
        result.seconds = time.perf_counter() - began
        return result
