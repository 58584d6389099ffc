"""What both sides of a node share. Values and ports only."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import zmq

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.layout import KVLayout
from baton_serve.kvtransfer.consumer.ladders import Ladders
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
    """Told on the event loop; must be quick."""

    def moved(
        self, *, peer: InstanceId, transport: str, direction: Literal["received", "sent"], num_bytes: int
    ) -> None: ...
    def retried(self, *, peer: InstanceId, transport: str, reason: str) -> None: ...
    def mismatched(self, *, peer: InstanceId, transport: str, blocks: int) -> None: ...
    def probed(self, *, peer: InstanceId, transport: str, outcome: ProbeOutcome) -> None: ...
    def switched(self, *, peer: InstanceId, transport: str, change: Literal["demoted", "promoted"]) -> None: ...


class SilentObserver:
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
    ladders: Ladders
    zmq: "zmq.Context[zmq.Socket[bytes]]"
    loop: asyncio.AbstractEventLoop
    workers: Workers
    staging_buffers: StagingBuffers
    sums: ChecksumCache
    pages: Pages
    probe_command: Sequence[str]


def limits_of(settings: TransferSettings) -> SessionLimits:
    return SessionLimits(
        connect_timeout_s=settings.connect_timeout_s,
        answer_timeout_s=settings.answer_timeout_s,
        lease_s=settings.lease_s,
        max_attempts=settings.max_attempts,
        max_mismatches=settings.max_mismatches,
    )
