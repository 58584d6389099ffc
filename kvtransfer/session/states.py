"""Defines states and transitions of both ends of a transfer.

A trigger that a state does not list comes late or twice, and changes nothing.
"""

from collections.abc import Mapping
from enum import StrEnum


class ConsumerState(StrEnum):
    """States of a fetch at the consumer. The fetch leaves every state but ENDED in bounded time."""

    LINKING = "linking"
    """A connection is not ready yet, or copies of an earlier attempt still run. It ends after `connect_timeout_s`."""
    REQUESTED = "requested"
    """The fetch was sent and is not acknowledged yet. It ends after `answer_timeout_s`."""
    STREAMING = "streaming"
    """Blocks arrive as they are computed. It ends at the ticket's deadline."""
    DRAINING = "draining"
    """The producer has finished, and some blocks are still on their way. It ends at the ticket's deadline."""
    SETTLING = "settling"
    """The fetch was given up, and copies into its blocks still run. It ends with the last copy; each is bounded in
    time.
    """
    ENDED = "ended"


class ConsumerTrigger(StrEnum):
    """Events that change the state of a fetch at the consumer."""

    LINKED = "linked"
    ACCEPTED = "accepted"
    DONE = "done"
    COMPLETE = "complete"
    RETRY = "retry"
    FAULT = "fault"
    SETTLED = "settled"


class ProducerState(StrEnum):
    """States of a served ticket at the producer. The states before DRAINING end after a bounded time; DRAINING ends
    when no frame that is being sent and no thread reads the blocks any more.
    """

    PARKED = "parked"
    """A fetch came before the ticket was opened here. It ends after `answer_timeout_s`, or at the fetch's own deadline.
    """
    OPEN = "open"
    """The ticket was opened, and no fetch has come yet. It ends at the ticket's deadline."""
    STREAMING = "streaming"
    """A consumer is attached. It ends with the consumer's lease or at the ticket's deadline."""
    ORPHANED = "orphaned"
    """The connection broke, and the consumer may come back. It ends with the lease."""
    ENDING = "ending"
    """The ticket was given up here, and the consumer may still copy. It ends with the lease."""
    DRAINING = "draining"
    """The blocks are not needed any more, but the transport may still read frames that point into them."""
    ENDED = "ended"
    """The blocks may be freed. A tombstone answers late messages."""


class ProducerTrigger(StrEnum):
    """Events that change the state of a served ticket at the producer."""

    OPENED = "opened"
    FETCHED = "fetched"
    LET_GO = "let go"
    """The consumer released the ticket or died, or its lease ran out."""
    LINK_LOST = "link lost"
    GIVE_UP = "give up"
    QUIET = "quiet"


_C, _CT = ConsumerState, ConsumerTrigger
_P, _PT = ProducerState, ProducerTrigger

CONSUMER: Mapping[ConsumerState, Mapping[ConsumerTrigger, ConsumerState]] = {
    _C.LINKING: {_CT.LINKED: _C.REQUESTED, _CT.RETRY: _C.LINKING, _CT.FAULT: _C.SETTLING},
    _C.REQUESTED: {_CT.ACCEPTED: _C.STREAMING, _CT.RETRY: _C.LINKING, _CT.FAULT: _C.SETTLING},
    _C.STREAMING: {_CT.DONE: _C.DRAINING, _CT.RETRY: _C.LINKING, _CT.FAULT: _C.SETTLING},
    _C.DRAINING: {_CT.COMPLETE: _C.ENDED, _CT.RETRY: _C.LINKING, _CT.FAULT: _C.SETTLING},
    _C.SETTLING: {_CT.SETTLED: _C.ENDED},
    _C.ENDED: {},
}

PRODUCER: Mapping[ProducerState, Mapping[ProducerTrigger, ProducerState]] = {
    _P.PARKED: {
        _PT.OPENED: _P.STREAMING,
        _PT.LET_GO: _P.ENDED,
        _PT.LINK_LOST: _P.ENDED,
        _PT.GIVE_UP: _P.ENDED,
    },
    _P.OPEN: {_PT.FETCHED: _P.STREAMING, _PT.LET_GO: _P.DRAINING, _PT.GIVE_UP: _P.DRAINING},
    _P.STREAMING: {
        _PT.FETCHED: _P.STREAMING,
        _PT.LET_GO: _P.DRAINING,
        _PT.LINK_LOST: _P.ORPHANED,
        _PT.GIVE_UP: _P.ENDING,
    },
    _P.ORPHANED: {_PT.FETCHED: _P.STREAMING, _PT.LET_GO: _P.DRAINING, _PT.GIVE_UP: _P.ENDING},
    _P.ENDING: {_PT.LET_GO: _P.DRAINING},
    _P.DRAINING: {_PT.QUIET: _P.ENDED},
    _P.ENDED: {},
}
