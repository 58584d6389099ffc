"""Two transfer nodes in one event loop, and what the contract suite does with them."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer import BlockMemory, HostMemory, InProcess, NodePorts, TransferNode, TransferSettings
from baton_serve.kvtransfer.ladder import ProbeOutcome
from baton_serve.kvtransfer.probing.running import COMMAND
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.transports import build
from baton_serve.kvtransfer.transports.port import Buffer, Intake, NodeFacts, Receiver, Transport

LAYOUT = KVLayout(fingerprint="tiny", num_layers=2, num_kv_heads=2, block_tokens=16, head_dim=64, dtype="float32")
NUM_BLOCKS = 48
SETTINGS = TransferSettings(
    heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0, connect_timeout_s=3.0, tick_s=0.01, inline_bytes=64 << 10
)
"""Ten heartbeats may be missing: on a busy machine a process may not run for several tenths of a second."""
LONG_SILENCE_S = 2 * SETTINGS.heartbeat_timeout_s

THREE = "zeromq by three connections"


def by_three(settings: TransferSettings) -> TransferSettings:
    """Parcels so small that each of three connections gets some."""
    return msgspec.structs.replace(settings, zeromq_connections=3, batch_bytes=4 * LAYOUT.block_bytes)


def name(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(16, "big"))


def content(seed: int, layout: KVLayout = LAYOUT) -> bytes:
    return random.Random(seed).randbytes(layout.block_bytes)


@dataclass
class Tally:
    """Counts what a node reports."""

    bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    retries: list[str] = field(default_factory=list)
    mismatches: int = 0
    probes: list[tuple[str, str]] = field(default_factory=list)
    changes: list[tuple[str, str]] = field(default_factory=list)

    def moved(
        self, *, peer: InstanceId, transport: str, direction: Literal["received", "sent"], num_bytes: int
    ) -> None:
        self.bytes[transport, direction] = self.bytes.get((transport, direction), 0) + num_bytes

    def retried(self, *, peer: InstanceId, transport: str, reason: str) -> None:
        self.retries.append(reason)

    def mismatched(self, *, peer: InstanceId, transport: str, blocks: int) -> None:
        self.mismatches += blocks

    def probed(self, *, peer: InstanceId, transport: str, outcome: ProbeOutcome) -> None:
        self.probes.append((transport, outcome))

    def switched(self, *, peer: InstanceId, transport: str, change: Literal["demoted", "promoted"]) -> None:
        self.changes.append((transport, change))


class Meddler:
    """Stands between a transport and the consumer's memory: `before` and `after` each placed block."""

    def __init__(self) -> None:
        self.before: Callable[[BlockPlacement], None] = lambda placement: None
        self.after: Callable[[str, BlockPlacement], None] = lambda transport, placement: None

    def wrap(self, receiver: Receiver, transport: str, facts: NodeFacts) -> Receiver:
        meddler = self

        class Watched:
            def __init__(self, intake: Intake, placement: BlockPlacement) -> None:
                self.take = intake.take
                self._intake = intake
                self._placement = placement

            def is_right(self) -> bool:
                return self._intake.is_right() and meddler.after(transport, self._placement) is None

        class Between:
            stream = receiver.stream
            stages = receiver.stages

            def receive(self, placement: BlockPlacement, frames: Sequence[Buffer]) -> bool:
                meddler.before(placement)
                matches = receiver.receive(placement, frames)
                return matches and meddler.after(transport, placement) is None

            def intake(self, placement: BlockPlacement) -> Intake:
                meddler.before(placement)
                return Watched(receiver.intake(placement), placement)

            def close(self) -> None:
                receiver.close()

        return Between()


class Blocks(BlockMemory, Protocol):
    """Memory that a test looks into."""

    def block(self, index: int) -> memoryview: ...
    def close(self) -> None: ...


class TensorMemory:
    """Blocks that the host must not touch: a tensor, here of the CPU."""

    shared_fd = None
    host_view = None

    def __init__(self, num_blocks: int, block_bytes: int, device: str = "cpu") -> None:
        import torch

        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.device_tensor = torch.zeros((num_blocks, block_bytes), dtype=torch.uint8, device=device)

    def ready_after(self, blocks: Iterable[int]) -> Sequence[Any]:
        return ()

    def block(self, index: int) -> memoryview:
        array: Any = self.device_tensor[index].numpy()
        return memoryview(array)

    def close(self) -> None:
        return


@dataclass
class Node:
    node: TransferNode
    memory: Blocks
    tally: Tally
    instance: InstanceId
    generation: Generation

    def fill(self, block: int, seed: int) -> None:
        self.memory.block(block)[:] = content(seed)

    def holds(self, block: int, seed: int) -> bool:
        return bytes(self.memory.block(block)) == content(seed)


@dataclass
class Pair:
    producer: Node
    consumer: Node
    number: int = 0

    def ticket(self, timeout_s: float = 5.0) -> Ticket:
        self.number += 1
        return Ticket(
            ticket=TicketId(f"ticket-{self.number}"),
            source=self.producer.instance,
            source_generation=self.producer.generation,
            source_address=self.producer.node.address,
            sink=self.consumer.instance,
            sink_generation=self.consumer.generation,
            timeout_s=timeout_s,
        )

    async def both_know(self) -> None:
        """The link carries what was asked of it, and the fetch has had time to arrive."""
        for _ in range(400):
            if self.consumer.node.links() and self.producer.node.num_sessions():
                await asyncio.sleep(0.05)
                return
            await asyncio.sleep(0.005)
        raise AssertionError("no link came up")

    async def becomes_clean(self) -> None:
        """No session is left on either side, and invariants hold."""
        for node in (self.producer.node, self.consumer.node):
            node.check_invariants()
        for _ in range(400):
            if not self.producer.node.num_sessions() + self.consumer.node.num_sessions():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("a session is left")


@contextlib.asynccontextmanager
async def running(  # noqa: PLR0913 - whatever a test changes of a node
    instance: str,
    settings: TransferSettings,
    *,
    generation: int = 1,
    layout: KVLayout = LAYOUT,
    in_process: InProcess | None = None,
    meddler: Meddler | None = None,
    memory: Blocks | None = None,
    probe_command: Sequence[str] = COMMAND,
) -> AsyncIterator[Node]:
    memory, tally = memory or HostMemory(NUM_BLOCKS, layout.block_bytes), Tally()

    def make(facts: NodeFacts, settings: TransferSettings, shared: InProcess | None) -> dict[str, Transport]:
        made = build(facts, settings, shared)
        return made if meddler is None else {name: _meddled(t, meddler, facts) for name, t in made.items()}

    ports = NodePorts(observer=tally, in_process=in_process, transports=make, probe_command=probe_command)
    identity, number = InstanceId(instance), Generation(generation)
    node = TransferNode(
        instance=identity, generation=number, layout=layout, memory=memory, settings=settings, ports=ports
    )
    try:
        await node.start()
        yield Node(node, memory, tally, identity, number)
    finally:
        await node.close()
        memory.close()


@contextlib.asynccontextmanager
async def pair_of(
    settings: TransferSettings,
    *,
    meddler: Meddler | None = None,
    producer_layout: KVLayout = LAYOUT,
    consumer_layout: KVLayout = LAYOUT,
    memories: Sequence[Blocks | None] = (None, None),
    probe_command: Sequence[str] = COMMAND,
    consumer_settings: TransferSettings | None = None,
) -> AsyncIterator[Pair]:
    shared, (source, target) = InProcess(), memories
    async with (
        running(
            "prefill-0",
            settings,
            generation=11,
            in_process=shared,
            layout=producer_layout,
            memory=source,
            probe_command=probe_command,
        ) as producer,
        running(
            "decode-0",
            consumer_settings or settings,
            generation=22,
            in_process=shared,
            meddler=meddler,
            layout=consumer_layout,
            memory=target,
            probe_command=probe_command,
        ) as consumer,
    ):
        pair = Pair(producer, consumer)
        yield pair
        await pair.becomes_clean()


def _meddled(transport: Transport, meddler: Meddler, facts: NodeFacts) -> Transport:
    attach = transport.attach

    async def wrapped(welcome, offer, target):  # type: ignore[no-untyped-def]
        return meddler.wrap(await attach(welcome, offer, target), transport.name, facts)

    transport.attach = wrapped  # type: ignore[method-assign]
    return transport
