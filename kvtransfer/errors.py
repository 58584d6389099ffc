"""Defines the exceptions of transfers, divided by whose fault they are, because this decides whether a retry
can help.

TransferError
 ├── LocalTransferError      the caller or this node made a mistake; a retry does not help
 │   ├── UnknownTicket       the ticket was not opened here, or it names another instance
 │   ├── TooManyFetches      this node already runs as many fetches as `max_fetches` allows
 │   └── NodeClosed          the node was not started, or was closed during the call
 ├── TransferCancelled       `cancel()` was called on this node
 └── RemoteTransferError     the peer or the link failed; another attempt may succeed
     ├── PeerLost            the peer died, froze or is unreachable, or another generation answers at its address
     ├── TransferTimeout     a deadline passed
     ├── Refused             the peer does not serve this node: other layout, unknown ticket, too busy
     ├── SourceFailed        the producer called `fail()` or `cancel()`
     ├── Incomplete          the producer finished without publishing all wanted blocks
     ├── Corrupt             the bytes did not match their checksums on any transport that was tried
     └── TransportUnavailable  one transport cannot connect this pair; the caller tries the next one of the ladder
"""

# ruff: noqa: N818 -- each name states what happened, so a suffix "Error" would add nothing


class TransferError(Exception):
    """Base class of all errors that a transfer of KV blocks can raise."""


class LocalTransferError(TransferError):
    """A call of `TransferNode` was wrong, or this node could not carry it out. A retry does not help."""


class UnknownTicket(LocalTransferError):
    """This node does not know the ticket: it was not opened here, or it names another instance or generation."""


class TooManyFetches(LocalTransferError):
    """This node already runs as many fetches as `TransferSettings.max_fetches` allows."""


class NodeClosed(LocalTransferError):
    """The `TransferNode` was not started yet, or it was closed while the call ran."""


class TransferCancelled(TransferError):
    """The fetch was cancelled by a call of `TransferNode.cancel` on this node."""


class RemoteTransferError(TransferError):
    """The other instance, or the connection to it, failed. Another attempt, or another instance, may succeed."""


class PeerLost(RemoteTransferError):
    """The peer died, froze or is unreachable, or another generation answers at its address."""


class TransferTimeout(RemoteTransferError):
    """A deadline of the transfer passed: that of its ticket, of the consumer's lease, or for opening the ticket at the
    producer.
    """


class Refused(RemoteTransferError):
    """The peer does not serve this node: its layout differs, the ticket is unknown there, or it is too busy."""


class SourceFailed(RemoteTransferError):
    """The producer gave the transfer up: it called `TransferNode.fail` or `TransferNode.cancel`, or it shuts down."""


class Incomplete(RemoteTransferError):
    """The producer finished without publishing all wanted blocks."""


class Corrupt(RemoteTransferError):
    """Bytes did not match their checksums on any transport that was tried."""


class TransportUnavailable(RemoteTransferError):
    """A transport cannot connect these two instances, or it broke. The caller tries the next transport
    of the ladder.
    """
