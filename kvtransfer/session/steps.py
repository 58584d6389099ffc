"""The steps that a session asks its driver to do, and the limits of a session. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec

from baton_serve.contracts.identity import BlockHash
from baton_serve.kvtransfer.frames import Again, Done, Fail, Fetch, Ready, Release

ReleaseReason = Literal["received", "cancelled", "expired", "lost", "failed", "closed"]
"""Why a producer may free the blocks of a ticket."""


class Fault(StrEnum):
    """Why a fetch failed. The driver raises the matching exception (`fetching.ERROR_OF`)."""

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
    """Time and retry limits of a session; times in seconds."""

    connect_timeout_s: float = 5.0
    answer_timeout_s: float = 10.0
    lease_s: float = 10.0
    lease_grace_s: float = 0.5
    """Seconds that a producer keeps blocks longer than the consumer expects, because their clocks may drift."""
    max_attempts: int = 4
    """Fetches of one transfer, including the first."""
    max_mismatches: int = 2
    """Checksum errors of one transfer after which its transport is demoted."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a message to the producer."""

    message: Fetch | Again | Release


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to the consumer."""

    message: Ready | Done | Fail


# A long prompt has thousands of these: a Struct that the garbage collector ignores is cheaper than a dataclass.
class BlockPlacement(msgspec.Struct, frozen=True, gc=False):
    """One block to copy: from number `source` of the producer's memory to number `destination` here. With `parts` above
    1, both numbers count parts of blocks.

    `index` is its first part among the ticket's wanted blocks, counted in the connection's parts. `position` is its
    place in the `Blocks` message.
    """

    index: int
    position: int
    source: int
    destination: int
    checksum: int | None
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy these blocks. The driver answers once for each placement, with `copied`, `damaged` or `abandoned`."""

    attempt: int
    placements: Sequence[BlockPlacement]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Report to the caller that these blocks have arrived and are verified."""

    names: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class Relink:
    """Find a connection again and call `linked`. If `demote` is set, bar this transport between the two peers until a
    probe has proved it again.
    """

    reason: str
    demote: str | None = None


@dataclass(frozen=True, slots=True)
class StopCopies:
    """Skip the copies that have not begun."""


@dataclass(frozen=True, slots=True)
class Succeed:
    """End the fetch successfully. `finished_at` is a time of the producer's clock."""

    payload: bytes
    finished_at: float


@dataclass(frozen=True, slots=True)
class Give:
    """End the fetch with an error. No copy writes to its blocks any more."""

    fault: Fault
    reason: str


ConsumerStep = Ask | Copy | Arrived | Relink | StopCopies | Succeed | Give


@dataclass(frozen=True, slots=True)
class Serve:
    """Announce these blocks, and send them if the transport pushes: (index among the wanted, number in this memory).

    With `parts` above 1, both numbers count parts of blocks.
    """

    attempt: int
    blocks: Sequence[tuple[int, int]]
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Drain:
    """Drop what is queued for this ticket, and call `quiet` once nothing reads its blocks any more."""


@dataclass(frozen=True, slots=True)
class Released:
    """The blocks of the ticket may be freed."""

    reason: ReleaseReason


ProducerStep = Tell | Serve | Drain | Released
