"""Transfer blocks of KV cache between two instance processes. This package knows nothing of models, requests or
routing.

`TransferNode` is its entry point: a consumer fetches blocks by their hashes, and a producer publishes blocks as they
are computed. docs/reference/protocol.md describes the states of a transfer, docs/architecture.md the reasons behind
them.
"""

from baton_serve.kvtransfer.block_memory import BlockMemory, HostMemory
from baton_serve.kvtransfer.consumer.fetching import FetchResult
from baton_serve.kvtransfer.context import SilentObserver, TransferObserver
from baton_serve.kvtransfer.conversion.plan import Translation
from baton_serve.kvtransfer.errors import (
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
from baton_serve.kvtransfer.ladder import Verdict
from baton_serve.kvtransfer.liveness import this_host
from baton_serve.kvtransfer.node import NodePorts, TransferNode
from baton_serve.kvtransfer.probing.running import probe_here
from baton_serve.kvtransfer.ranks.rank_port import LocalRank, RankPort, part_layout
from baton_serve.kvtransfer.ranks.ranked_node import RankedTransferNode
from baton_serve.kvtransfer.session.steps import ReleaseReason
from baton_serve.kvtransfer.settings import PeerAccess, TransferSettings
from baton_serve.kvtransfer.transports.memory import InProcess

__all__ = [
    "BlockMemory",
    "Corrupt",
    "FetchResult",
    "HostMemory",
    "InProcess",
    "Incomplete",
    "LocalRank",
    "LocalTransferError",
    "NodeClosed",
    "NodePorts",
    "PeerAccess",
    "PeerLost",
    "RankPort",
    "RankedTransferNode",
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
    "part_layout",
    "probe_here",
    "this_host",
]
