"""What can go wrong, split by fault.

TransferError
├── LocalTransferError      our side is wrong; never retried
│   ├── UnknownTicket       the ticket was not opened here, or names another instance
│   ├── TooManyFetches      this node already runs as many fetches as its settings allow
│   └── NodeClosed          the node was closed meanwhile
├── TransferCancelled       `cancel()` was called here
└── RemoteTransferError     the peer or the link; another attempt may succeed
    ├── PeerLost            died, froze, unreachable, or another generation answers at its address
    ├── TransferTimeout     a deadline passed
    ├── Refused             the peer does not serve us: other layout, unknown ticket, too busy
    ├── SourceFailed        the producer called `fail()` or `cancel()`
    ├── Incomplete          the producer finished without blocks that were wanted
    └── Corrupt             bytes did not match their checksum on every transport tried
"""

# ruff: noqa: N818 -- the names say what happened


class TransferError(Exception):
    pass


class LocalTransferError(TransferError):
    pass


class UnknownTicket(LocalTransferError):
    pass


class TooManyFetches(LocalTransferError):
    pass


class NodeClosed(LocalTransferError):
    pass


class TransferCancelled(TransferError):
    pass


class RemoteTransferError(TransferError):
    pass


class PeerLost(RemoteTransferError):
    pass


class TransferTimeout(RemoteTransferError):
    pass


class Refused(RemoteTransferError):
    pass


class SourceFailed(RemoteTransferError):
    pass


class Incomplete(RemoteTransferError):
    pass


class Corrupt(RemoteTransferError):
    pass


class TransportUnavailable(RemoteTransferError):
    """A transport cannot connect this pair; the ladder's next one is tried."""
