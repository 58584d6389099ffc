"""The class `TransferNode`, by which an instance process publishes, fetches and releases blocks; it assembles consumer
and producer side.

A node belongs to one event loop and may be used from its thread only. It owns its sockets, threads and mappings, but
never the blocks.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, TicketId
from baton_serve.contracts.instance import LinkStatus
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer.block_memory import BlockMemory
from baton_serve.kvtransfer.consumer.consumer_side import ConsumerSide
from baton_serve.kvtransfer.consumer.fetching import FetchOptions, FetchResult, OnBlocks, OnEnd
from baton_serve.kvtransfer.consumer.ladder_table import LadderTable
from baton_serve.kvtransfer.consumer.pages import Pages
from baton_serve.kvtransfer.context import NodeContext, SilentObserver, TransferObserver, limits_of
from baton_serve.kvtransfer.conversion.plan import Translation
from baton_serve.kvtransfer.conversion.staging_buffers import StagingBuffers
from baton_serve.kvtransfer.copy_threads import Workers
from baton_serve.kvtransfer.errors import LocalTransferError, NodeClosed
from baton_serve.kvtransfer.liveness import this_host
from baton_serve.kvtransfer.native.copyhash import copy_hash
from baton_serve.kvtransfer.probing.running import COMMAND
from baton_serve.kvtransfer.producer.producer_side import FetchHandler, ProducerSide
from baton_serve.kvtransfer.session.steps import ReleaseReason
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports import build
from baton_serve.kvtransfer.transports.checksum_cache import ChecksumCache
from baton_serve.kvtransfer.transports.memory import InProcess
from baton_serve.kvtransfer.transports.port import NodeFacts, Transport

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 1.0
"""Seconds that `close` waits for consumers that are still copying blocks."""
DEVICE_THREADS = 4
"""Minimum number of copy threads for memory of a device."""
MAX_REASON_CHARS = 1024
"""Longest `LinkStatus.reason` in characters: it is part of each load report to the router."""

TransportFactory = Callable[[NodeFacts, TransferSettings, InProcess | None], dict[str, Transport]]


@dataclass(frozen=True, slots=True)
class NodePorts:
    """Optional dependencies of a `TransferNode`. `observer` counts events for metrics. `in_process` enables the
    transport `memory` between nodes of one process. `transports` creates the node's transports; None creates those of
    the settings. `probe_command` is the command line that starts the separate process of a probe.
    """

    observer: TransferObserver = field(default_factory=SilentObserver)
    in_process: InProcess | None = None
    transports: TransportFactory | None = None
    probe_command: Sequence[str] = COMMAND


class TransferNode:
    """Fetches KV blocks from other instances and serves this instance's blocks to them. Call `start` before any other
    method, and `close` at the end. All methods belong to one event loop.
    """

    def __init__(
        self,
        *,
        instance: InstanceId,
        generation: Generation,
        layout: KVLayout,
        memory: BlockMemory,
        settings: TransferSettings,
        clock: Callable[[], float] = time.monotonic,
        ports: NodePorts | None = None,
    ) -> None:
        if layout.block_bytes != memory.block_bytes:
            raise LocalTransferError(f"blocks of {memory.block_bytes} bytes do not fit {layout}")
        # A part is `block_bytes / parts` bytes at both ends, so the division must be exact.
        if memory.block_bytes % settings.parts:
            raise LocalTransferError(f"blocks of {memory.block_bytes} bytes have no {settings.parts} equal parts")
        self._instance, self._generation, self._layout = instance, generation, layout
        self._memory, self._settings, self._clock = memory, settings, clock
        ports = ports or NodePorts()
        self._ports = ports
        host = this_host()
        facts = NodeFacts(instance, generation, memory, host)
        self._host = host
        make = ports.transports or build
        self._transports = make(facts, settings, ports.in_process)
        self._context: NodeContext | None = None
        self._producer: ProducerSide | None = None
        self._consumer: ConsumerSide | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self.address = ""
        """The address at which peers reach this node; empty before `start`."""

    async def start(self) -> None:
        """Open the sockets and threads, and serve other instances from now on. Raises `LocalTransferError` if the
        address of the settings cannot be bound.
        """
        settings, loop = self._settings, asyncio.get_running_loop()
        self._context = NodeContext(
            instance=self._instance,
            generation=self._generation,
            layout=self._layout,
            memory=self._memory,
            settings=settings,
            limits=limits_of(settings),
            host=self._host,
            clock=self._clock,
            observer=self._ports.observer,
            transports=self._transports,
            ladders=LadderTable(settings, self._transports),
            # Each connection of a peer can use an I/O thread of its own; one thread moves only a part of a fast link.
            zmq=zmq.Context(max(settings.io_threads, settings.zeromq_connections)),
            loop=loop,
            workers=Workers(loop, _num_threads(settings, self._memory)),
            staging_buffers=StagingBuffers(self._layout),
            sums=ChecksumCache(),
            pages=Pages(self._memory),
            probe_command=self._ports.probe_command,
        )
        # The first call may compile the C++ copy loop, which takes seconds: do it before the first fetch, and not on
        # the loop.
        await asyncio.to_thread(copy_hash)
        for transport in self._transports.values():
            await transport.start()
        try:
            self._producer = ProducerSide(self._context)
        except zmq.ZMQError as exc:
            await self._free(self._context)
            self._context = None
            raise LocalTransferError(f"cannot bind {settings.bind}: {exc}") from exc
        self._consumer = ConsumerSide(self._context)
        self.address = _advertised(self._producer.address, settings.advertise_host)
        self._ticking = loop.call_later(settings.tick_s, self._tick)

    async def close(self) -> None:
        """Stop serving and fetching. Running fetches raise `NodeClosed`. `released` returns `closed` for tickets that
        are still served, once no peer copies their blocks, or after `CLOSE_TIMEOUT_S`.
        """
        if self._context is None:
            return
        context, self._context = self._context, None
        await self._consuming.close()
        await self._producing.close(CLOSE_TIMEOUT_S)
        if self._ticking is not None:
            self._ticking.cancel()
        await self._free(context)

    async def connect(self, address: str) -> None:
        """Connect to the node of another instance at `address` now, so that the first fetch from it is faster. Raises
        `RemoteTransferError` if it cannot be reached within `connect_timeout_s`.
        """
        await self._consuming.connections.warm(address)

    def open(self, ticket: Ticket, on_fetched: Callable[[], None] | None = None) -> None:
        """Start serving the blocks of a ticket. A fetch of it that arrived before is served now. `on_fetched` is called
        after each attempt of the consumer to fetch the blocks has arrived.

        Raises `UnknownTicket` if the ticket names another instance or generation as its source, and
        `LocalTransferError` if it was opened before.
        """
        self._producing.open(ticket, on_fetched)

    def publish(self, ticket: TicketId, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        """Offer computed blocks (hash, block number in this node's memory) to the consumer of an open ticket. The
        blocks must not move or change until `released` returns.
        """
        self._producing.publish(ticket, blocks)

    def publish_parts(self, ticket: TicketId, blocks: Sequence[tuple[BlockHash, int]], parts: range) -> None:
        """Offer the parts with the numbers `parts` of each block (hash, block number), of the `settings.parts` parts
        that a block has. A block counts as complete only when `publish` names it.

        Raises `LocalTransferError` if `parts` is out of range.
        """
        if not 0 <= parts.start < parts.stop <= self._settings.parts:
            raise LocalTransferError(f"parts {parts.start} to {parts.stop - 1} are not all of {self._settings.parts}")
        self._producing.publish_parts(ticket, blocks, parts)

    def finish(self, ticket: TicketId, payload: bytes) -> None:
        """Declare that nothing more will be published for a ticket. The consumer's fetch returns `payload` (up to 256
        KiB) in its result.
        """
        self._producing.finish(ticket, payload)

    def fail(self, ticket: TicketId, reason: str) -> None:
        """Stop serving a ticket that this node has opened: the consumer's fetch raises `SourceFailed(reason)`."""
        self._producing.give_up(ticket, "failed", reason)

    async def released(self, ticket: TicketId) -> ReleaseReason:
        """Wait until nothing reads the blocks that were published for a ticket any more, and return why. The caller may
        then free the blocks.
        """
        # Several callers may wait for one outcome: cancelling one of them must not cancel the future.
        return await asyncio.shield(self._producing.outcome(ticket))

    async def fetch(
        self,
        ticket: Ticket,
        wanted: Sequence[tuple[BlockHash, int]],
        *,
        on_blocks: OnBlocks | None = None,
        on_end: OnEnd | None = None,
        partial: bool = False,
        translation: Translation | None = None,
    ) -> FetchResult:
        """Fetch the blocks `wanted` of a ticket from its producer, and return the result with the producer's payload.
        Each pair is a block hash and the number of the block of this node that the bytes are written to.

        `on_blocks` is called with the hashes of blocks as they arrive. `on_end` is called with the result before the
        caller's task runs again. With `partial`, the producer may send fewer blocks than wanted; `FetchResult.names`
        lists the blocks that came. If the producer's layout differs from this node's, `translation` gives the
        producer's hashes of the same tokens; `wanted` must then be the last blocks of these tokens, in order.

        Raises a subclass of `TransferError` if it fails. After an error or a cancellation of the task, nothing writes
        to the wanted blocks any more.
        """
        options = FetchOptions(on_blocks=on_blocks, on_end=on_end, partial=partial, translation=translation)
        return await self._consuming.fetch(ticket, wanted, options)

    def cancel(self, ticket: TicketId) -> None:
        """Cancel a ticket that this node serves or fetches, at any time. A later `open` or `fetch` of it ends
        immediately.
        """
        self._producing.cancel(ticket)
        self._consuming.cancel(ticket)

    def on_fetch(self, handler: FetchHandler) -> None:
        """Set the function that serves partial fetches (pulls of cached blocks) whose ticket this node has not opened.
        It is called with the ticket and the wanted hashes.

        The handler acts like any producer: it calls `open`, publishes the blocks that exist, calls `finish`, and awaits
        `released` before it allows the blocks to be evicted.
        """
        self._producing.on_fetch = handler

    def links(self) -> list[LinkStatus]:
        """Return the state of each connection of this node to a producer: the transport in use, its measured speed, and
        why it is used.
        """
        return [
            LinkStatus(
                peer=link.name,
                transport=link.transport.name,
                bytes_per_second=link.meter.bytes_per_second,
                probed_bytes_per_second=link.ladder.speed(),
                choice=link.ladder.choice(),
                reason="; ".join(link.ladder.why())[:MAX_REASON_CHARS],
            )
            for link in self._consuming.connections.current()
            if link.is_ready() and link.transport is not None and link.ladder is not None
        ]

    def num_sessions(self) -> int:
        """Return the number of running transfers of this node: fetches and served tickets together."""
        return self._producing.num_sessions() + self._consuming.num_sessions()

    def check_invariants(self) -> None:
        """Assert that the state of all transfers of this node is consistent. Only tests call it."""
        self._producing.check_invariants()
        self._consuming.check_invariants()

    @property
    def _producing(self) -> ProducerSide:
        if self._producer is None:
            raise NodeClosed("the node was not started")
        return self._producer

    @property
    def _consuming(self) -> ConsumerSide:
        if self._consumer is None:
            raise NodeClosed("the node was not started")
        return self._consumer

    async def _free(self, context: NodeContext) -> None:
        for transport in self._transports.values():
            await transport.close()
        context.workers.close()
        context.pages.close()
        context.zmq.destroy(linger=0)

    def _tick(self) -> None:
        # Schedule the next tick first, so that an exception below does not end the deadlines of all transfers.
        self._ticking = asyncio.get_running_loop().call_later(self._settings.tick_s, self._tick)
        now = self._clock()
        self._producing.tick(now)
        self._consuming.tick(now)


def _num_threads(settings: TransferSettings, memory: BlockMemory) -> int:
    """Return the number of threads that copy blocks. For memory of a device it is at least `DEVICE_THREADS`, because
    these threads spend most of their time waiting for the device.
    """
    return max(settings.copy_threads, DEVICE_THREADS) if memory.host_view is None else settings.copy_threads


def _advertised(endpoint: str, host: str) -> str:
    """Return the address that peers connect to: `endpoint`, with its host replaced by `host` unless that is empty."""
    if not host:
        return endpoint
    # The bound address may be 0.0.0.0, to which peers cannot connect: keep only its port.
    scheme, _, rest = endpoint.partition("://")
    port = rest.rpartition(":")[2]
    return f"{scheme}://{host}:{port}"
