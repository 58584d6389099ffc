"""Defines what the consumer side and the producer side of one `TransferNode` share."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import zmq

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.kvtransfer.block_memory import BlockMemory
from baton_serve.kvtransfer.consumer.ladder_table import LadderTable
from baton_serve.kvtransfer.consumer.pages import Pages
from baton_serve.kvtransfer.control_messages import Host
from baton_serve.kvtransfer.conversion.staging_buffers import StagingBuffers
from baton_serve.kvtransfer.copy_threads import Workers
from baton_serve.kvtransfer.ladder import ProbeOutcome
from baton_serve.kvtransfer.session.steps import SessionLimits
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.checksum_cache import ChecksumCache
from baton_serve.kvtransfer.transports.port import Transport


class TransferObserver(Protocol):
    """Receives events of transfers, to count them in metrics. `peer` is the other instance and `transport` the name of
    the transport. The methods are called on the event loop and must not block.
    """

    def moved(
        self, *, peer: InstanceId, transport: str, direction: Literal["received", "sent"], num_bytes: int
    ) -> None:
        """Count `num_bytes` of blocks that were received from `peer`, or sent to it (`direction`), by `transport`.

        Sent bytes are counted when the ticket has ended.
        """
        ...

    def retried(self, *, peer: InstanceId, transport: str, reason: str) -> None:
        """Count a fetch from `peer` that starts another attempt. `transport` carried the failed attempt, and `reason`
        says why it failed.
        """
        ...

    def mismatched(self, *, peer: InstanceId, transport: str, blocks: int) -> None:
        """Count `blocks` blocks or parts of blocks from `peer` whose bytes, sent by `transport`, did not match their
        checksums on arrival.
        """
        ...

    def probed(self, *, peer: InstanceId, transport: str, outcome: ProbeOutcome) -> None:
        """Count a probe of one transport to `peer`. `outcome` is its result, such as `proved` or `crashed`."""
        ...

    def switched(self, *, peer: InstanceId, transport: str, change: Literal["demoted", "promoted"]) -> None:
        """Count that the connection to `peer` stopped using `transport` because it failed (`demoted`), or began to use
        it after a probe (`promoted`).
        """
        ...


class SilentObserver:
    """Ignores all transfer events. It is the default of `NodePorts`."""

    def moved(
        self, *, peer: InstanceId, transport: str, direction: Literal["received", "sent"], num_bytes: int
    ) -> None:
        return

    def retried(self, *, peer: InstanceId, transport: str, reason: str) -> None:
        return

    def mismatched(self, *, peer: InstanceId, transport: str, blocks: int) -> None:
        return

    def probed(self, *, peer: InstanceId, transport: str, outcome: ProbeOutcome) -> None:
        return

    def switched(self, *, peer: InstanceId, transport: str, change: Literal["demoted", "promoted"]) -> None:
        return


@dataclass(frozen=True, slots=True)
class NodeContext:
    """Holds what one `TransferNode` creates at start and both its consumer side and its producer side use. Use it only
    on the node's event loop, except for members that are documented as usable from several threads.
    """

    instance: InstanceId
    generation: Generation
    layout: KVLayout
    memory: BlockMemory
    settings: TransferSettings
    limits: SessionLimits
    host: Host
    clock: Callable[[], float]
    observer: TransferObserver
    transports: dict[str, Transport]
    ladders: LadderTable
    zmq: "zmq.Context[zmq.Socket[bytes]]"
    loop: asyncio.AbstractEventLoop
    workers: Workers
    staging_buffers: StagingBuffers
    sums: ChecksumCache
    """Checksums of this node's blocks in host memory; used from several threads."""
    pages: Pages
    probe_command: Sequence[str]
    """Command line of the throw-away process that probes a transport."""


def limits_of(settings: TransferSettings) -> SessionLimits:
    """Return the timeouts (in seconds) and retry limits of one transfer, taken from the settings of the node."""
    return SessionLimits(
        connect_timeout_s=settings.connect_timeout_s,
        answer_timeout_s=settings.answer_timeout_s,
        lease_s=settings.lease_s,
        max_attempts=settings.max_attempts,
        max_mismatches=settings.max_mismatches,
    )
