"""Defines the steps that a session asks its driver to do, and the limits of a session. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec

from baton_serve.contracts.identity import BlockHash
from baton_serve.kvtransfer.control_messages import Again, Done, Fail, Fetch, Ready, Release

ReleaseReason = Literal["received", "cancelled", "expired", "lost", "failed", "closed"]
"""Why a producer may free the blocks of a ticket."""


class Fault(StrEnum):
    """The reason why a fetch failed. The caller of the fetch gets the exception that `fetching.ERROR_OF` has for this
    fault.
    """

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
    """The timeouts in seconds and the limits of retries of one transfer; producer and consumer both use them."""

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
    """An action that the state machine of a fetch requests: send `message` to the producer."""

    message: Fetch | Again | Release


@dataclass(frozen=True, slots=True)
class Tell:
    """An action that the state machine of a served ticket requests: send `message` to the consumer."""

    message: Ready | Done | Fail


# A long prompt has thousands of these: a Struct that the garbage collector ignores is cheaper than a dataclass.
class BlockPlacement(msgspec.Struct, frozen=True, gc=False):
    """One block to copy: from number `source` of the producer's memory to number `destination` of this node's. With
    `parts` above 1, it is a part of a block, and both numbers count parts.

    `index` identifies the placement in its fetch: the number of its first part, if all wanted blocks are counted in the
    parts of the connection. `position` is its place in the `Blocks` message. `checksum` is None if the bytes are not
    checked.
    """

    index: int
    position: int
    source: int
    destination: int
    checksum: int | None
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Copy:
    """An action that the state machine of a fetch requests: copy these received blocks to their destinations. The
    caller reports each placement once, by `copied`, `damaged` or `abandoned`.
    """

    attempt: int
    placements: Sequence[BlockPlacement]


@dataclass(frozen=True, slots=True)
class Arrived:
    """An action that the state machine of a fetch requests: report to the fetch's caller that the blocks with these
    hashes have arrived and are verified.
    """

    names: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class Relink:
    """An action that the state machine of a fetch requests: find a connection to the producer again, then call
    `linked`. If `demote` names a transport, do not use it between these two instances until a probe has proved it
    again.
    """

    reason: str
    demote: str | None = None


@dataclass(frozen=True, slots=True)
class StopCopies:
    """An action that the state machine of a fetch requests: prevent the copies of this attempt that have not begun."""


@dataclass(frozen=True, slots=True)
class Succeed:
    """An action that the state machine of a fetch requests: end the fetch successfully. The producer passed `payload`
    to `finish`, at the time `finished_at` of the producer's clock.
    """

    payload: bytes
    finished_at: float


@dataclass(frozen=True, slots=True)
class Give:
    """An action that the state machine of a fetch requests: end the fetch with the error `fault`. At this time no copy
    writes to the fetch's blocks any more.
    """

    fault: Fault
    reason: str


ConsumerStep = Ask | Copy | Arrived | Relink | StopCopies | Succeed | Give


@dataclass(frozen=True, slots=True)
class Serve:
    """An action that the state machine of a served ticket requests: announce these blocks to the consumer, and send
    their bytes if the transport sends any. Each pair is (index in the fetch, number in this node's memory).

    With `parts` above 1, both numbers count parts of blocks.
    """

    attempt: int
    blocks: Sequence[tuple[int, int]]
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Drain:
    """An action that the state machine of a served ticket requests: remove the ticket's blocks from the send queues,
    and call `quiet` once nothing reads these blocks any more.
    """


@dataclass(frozen=True, slots=True)
class Released:
    """An action that the state machine of a served ticket requests: report to the code that opened the ticket that its
    blocks may be freed.
    """

    reason: ReleaseReason


ProducerStep = Tell | Serve | Drain | Released
