"""Moves blocks of KV cache between two processes. Knows nothing of models, requests or routing.

`TransferNode` has two verbs: a consumer fetches named blocks, the producer publishes them as they are computed.
The states are in docs/protocol.md, the reasons in docs/design.md.
"""

from kvtransfer.context import SilentObserver, TransferObserver
from kvtransfer.conversion.plan import Translation
from kvtransfer.errors import (
    Corrupt,
    Incomplete,
    LocalTransferError,
    NodeClosed,
    PeerLost,
    Refused,
    RemoteTransferError,
    SourceFailed,
    TooManyFetches,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    UnknownTicket,
)
from kvtransfer.fetching import FetchResult
from kvtransfer.ladder import Verdict
from kvtransfer.liveness import this_host
from kvtransfer.memory import BlockMemory, HostMemory
from kvtransfer.node import NodePorts, TransferNode
from kvtransfer.probing.here import probe_here
from kvtransfer.session.steps import ReleaseReason
from kvtransfer.settings import PeerAccess, TransferSettings
from kvtransfer.transports.memory import InProcess

__all__ = [
    "BlockMemory",
    "Corrupt",
    "FetchResult",
    "HostMemory",
    "InProcess",
    "Incomplete",
    "LocalTransferError",
    "NodeClosed",
    "NodePorts",
    "PeerAccess",
    "PeerLost",
    "Refused",
    "ReleaseReason",
    "RemoteTransferError",
    "SilentObserver",
    "SourceFailed",
    "TooManyFetches",
    "TransferCancelled",
    "TransferError",
    "TransferNode",
    "TransferObserver",
    "TransferSettings",
    "TransferTimeout",
    "Translation",
    "UnknownTicket",
    "Verdict",
    "probe_here",
    "this_host",
]
