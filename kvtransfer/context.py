"""Values and interfaces that the consumer side and the producer side of one `TransferNode` share."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import zmq

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.layout import KVLayout
from baton_serve.kvtransfer.consumer.ladder_table import LadderTable
from baton_serve.kvtransfer.consumer.pages import Pages
from baton_serve.kvtransfer.conversion.staging_buffers import StagingBuffers
from baton_serve.kvtransfer.frames import Host
from baton_serve.kvtransfer.ladder import ProbeOutcome
from baton_serve.kvtransfer.memory import BlockMemory
from baton_serve.kvtransfer.session.steps import SessionLimits
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.checksum_cache import ChecksumCache
from baton_serve.kvtransfer.transports.port import Transport
from baton_serve.kvtransfer.workers import Workers


class TransferObserver(Protocol):
    """Receives transfer events for metrics. Its methods are called on the event loop and must not block."""

    def moved(
        self, *, peer: InstanceId, transport: str, direction: Literal["received", "sent"], num_bytes: int
    ) -> None:
        """Count `num_bytes` of blocks that were received from `peer`, or sent to it.

        Sent bytes are counted when the ticket has ended.
        """
        ...

    def retried(self, *, peer: InstanceId, transport: str, reason: str) -> None:
        """Count a fetch that starts another attempt, and why."""
        ...

    def mismatched(self, *, peer: InstanceId, transport: str, blocks: int) -> None:
        """Count blocks, or parts of blocks, whose bytes did not match their checksum on arrival."""
        ...

    def probed(self, *, peer: InstanceId, transport: str, outcome: ProbeOutcome) -> None:
        """Count a probe of one transport to `peer` by its outcome."""
        ...

    def switched(self, *, peer: InstanceId, transport: str, change: Literal["demoted", "promoted"]) -> None:
        """Count a transport that was given up (`demoted`) or taken into use after a probe (`promoted`)."""
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
    """Holds what one `TransferNode` creates at start and both of its sides use. Only the event loop of the node may use
    it, except for members that are documented as thread-safe.
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
    """Return the time and retry limits for the session state machines, taken from the settings of the node."""
    return SessionLimits(
        connect_timeout_s=settings.connect_timeout_s,
        answer_timeout_s=settings.answer_timeout_s,
        lease_s=settings.lease_s,
        max_attempts=settings.max_attempts,
        max_mismatches=settings.max_mismatches,
    )
