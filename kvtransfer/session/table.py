"""States and transitions of both ends of a transfer. The drawing in docs/reference/protocol.md is generated from here.

A trigger that a state does not list is late or repeated and changes nothing.
"""

from collections.abc import Mapping
from enum import StrEnum


class ConsumerState(StrEnum):
    LINKING = "linking"
    """No connection yet, or copies of an earlier attempt still run. Ends with `connect_timeout_s`."""
    REQUESTED = "requested"
    """Fetch sent, not acknowledged. Ends with `answer_timeout_s`."""
    STREAMING = "streaming"
    """Blocks arrive as they are computed. Ends with the ticket's deadline."""
    DRAINING = "draining"
    """The producer is done; blocks are still on their way. Ends with the ticket's deadline."""
    SETTLING = "settling"
    """Given up; copies into the destination still run. Ends when the last one returns: each is bounded."""
    ENDED = "ended"


class ConsumerTrigger(StrEnum):
    LINKED = "linked"
    ACCEPTED = "accepted"
    DONE = "done"
    COMPLETE = "complete"
    RETRY = "retry"
    FAULT = "fault"
    SETTLED = "settled"


class ProducerState(StrEnum):
    PARKED = "parked"
    """A fetch came before the ticket was opened here. Ends with `answer_timeout_s`, or the fetch's own
    deadline."""
    OPEN = "open"
    """Opened, nobody has fetched yet. Ends with the ticket's deadline."""
    STREAMING = "streaming"
    """A consumer is attached. Ends when its lease or the ticket's deadline does."""
    ORPHANED = "orphaned"
    """The connection broke, the consumer may come back. Ends with its lease."""
    ENDING = "ending"
    """Given up here; the consumer may still copy. Ends with its lease."""
    DRAINING = "draining"
    """Nobody wants the blocks any more; frames made of them may still lie in the transport."""
    ENDED = "ended"
    """The blocks may be freed. A tombstone answers late messages."""


class ProducerTrigger(StrEnum):
    OPENED = "opened"
    FETCHED = "fetched"
    LET_GO = "let go"
    """The consumer released, died, or its lease ran out."""
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
