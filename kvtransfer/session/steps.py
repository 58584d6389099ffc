"""What a session asks of its driver, and the few settings it needs. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec

from baton_serve.contracts.identity import BlockHash
from baton_serve.kvtransfer.frames import Again, Done, Fail, Fetch, Ready, Release

ReleaseReason = Literal["received", "cancelled", "expired", "lost", "failed", "closed"]
"""Why a producer may free a ticket's blocks."""


class Fault(StrEnum):
    """Why a fetch failed. The driver turns it into an exception."""

    LOST = "lost"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    SOURCE_FAILED = "source failed"
    INCOMPLETE = "incomplete"
    CORRUPT = "corrupt"
    CANCELLED = "cancelled"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class SessionLimits:
    connect_timeout_s: float = 5.0
    answer_timeout_s: float = 10.0
    lease_s: float = 10.0
    lease_grace_s: float = 0.5
    """A producer waits so much longer than the consumer counts on: their clocks may drift."""
    max_attempts: int = 4
    max_mismatches: int = 2


@dataclass(frozen=True, slots=True)
class Ask:
    """Send to the producer."""

    message: Fetch | Again | Release


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to the consumer."""

    message: Ready | Done | Fail


class BlockPlacement(msgspec.Struct, frozen=True, gc=False):
    """Copy the producer's block `source` to block `destination` here, or a part: one of `parts` of each block.

    `index` counts the ticket's wanted blocks by the connection's parts, `position` the pieces of the `Blocks` message.
    """

    index: int
    position: int
    source: int
    destination: int
    checksum: int | None
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Copy:
    """Answered once by `copied`, `damaged` or `abandoned` for each placement."""

    attempt: int
    placements: Sequence[BlockPlacement]


@dataclass(frozen=True, slots=True)
class Arrived:
    """These blocks are here and verified."""

    names: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class Relink:
    """Find a connection again and call `linked`. `demote`: never use this transport with this peer again."""

    reason: str
    demote: str | None = None


@dataclass(frozen=True, slots=True)
class StopCopies:
    """Skip copies that have not begun."""


@dataclass(frozen=True, slots=True)
class Succeed:
    payload: bytes
    finished_at: float


@dataclass(frozen=True, slots=True)
class Give:
    """The fetch is over with an error; no copy runs any more."""

    fault: Fault
    reason: str


ConsumerStep = Ask | Copy | Arrived | Relink | StopCopies | Succeed | Give


@dataclass(frozen=True, slots=True)
class Serve:
    """Announce (and push, where the transport pushes) these blocks, or of `parts` of a block each: (index among the
    wanted, block here)."""

    attempt: int
    blocks: Sequence[tuple[int, int]]
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Drain:
    """Forget what is queued for this ticket; call `quiet` when nothing reads its blocks any more."""


@dataclass(frozen=True, slots=True)
class Released:
    reason: ReleaseReason


ProducerStep = Tell | Serve | Drain | Released
