"""The transport `memory`, for tests: both nodes are in one process and share an `InProcess`. It is the reference for
other transports, and the test double.
"""

import importlib
from collections.abc import Callable, Sequence

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.kvtransfer.block_memory import BlockMemory
from baton_serve.kvtransfer.control_messages import Hello, Offer, Piece, Welcome
from baton_serve.kvtransfer.errors import TransportUnavailable
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.hostcopy import HostBlocks, HostSender, copy_blocks, host_blocks
from baton_serve.kvtransfer.transports.port import (
    Announce,
    AttachRequest,
    Buffer,
    Converter,
    Intake,
    NodeFacts,
    Prepared,
    Receiver,
    ReceiveTarget,
)


class InProcess:
    """The block memories of all nodes of one process, by which the transport `memory` finds them. Give the same object
    to each node (`NodePorts.in_process`).
    """

    def __init__(self) -> None:
        self.memories: dict[tuple[InstanceId, Generation], BlockMemory] = {}


class AnnounceOnly(HostSender):
    """The producer's end of a transport that sends no bytes: it only announces blocks, and the consumer copies them out
    of this node's memory.
    """

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        announce([()])


class HostReceiver:
    """The consumer's end of a transport: copies blocks out of a producer's memory that this process can address.
    `stages` says that the producer must be notified of the end of the copies, because it frees that memory then.
    """

    stream = None

    def __init__(self, source: HostBlocks, target: HostBlocks, *, stages: bool = False) -> None:
        self.stages = stages
        self._source: HostBlocks | None = source
        self._target = target

    def receive(self, placement: BlockPlacement, frames: Sequence[Buffer]) -> bool:
        return self.receive_all([placement])[0]

    def receive_all(self, placements: Sequence[BlockPlacement]) -> list[bool]:
        """Copy several blocks from the producer's memory to this node's by one call. Return for each whether its bytes
        match its checksum. Implements `kvtransfer.consumer.copy_jobs.ReceivesAll`.
        """
        source = self._source
        if source is None:
            raise TransportUnavailable("the connection was closed")
        return copy_blocks(source, self._target, placements)

    def intake(self, placement: BlockPlacement) -> Intake:
        raise TransportUnavailable("this transport sends no bytes")

    def close(self) -> None:
        self._source = None


def converting(source: HostBlocks, converter: Converter, *, is_ring: bool = False) -> Receiver:
    """Create the consumer's end of a transport that converts blocks, because the producer's layout differs. `source` is
    the producer's mapped memory: its whole KV cache, or with `is_ring` a ring in which it stages blocks. It imports
    torch.
    """
    module = importlib.import_module("baton_serve.kvtransfer.conversion.receivers")
    receiver: Receiver = module.MappedReceiver(source, converter, is_ring=is_ring)
    return receiver


class MemoryTransport:
    """The transport `memory`, between two nodes of one process: the consumer copies blocks directly out of the
    producer's memory. `start` registers the node's memory in `InProcess`, `close` removes it.
    """

    name = "memory"
    pulls = True
    buffers = False
    streams = False
    narrows = False
    dialects: Sequence[str] = ()

    def __init__(self, facts: NodeFacts, settings: TransferSettings, in_process: InProcess) -> None:
        self._settings = settings
        self._facts = facts
        self._shared = in_process
        self._key = (facts.instance, facts.generation)

    async def start(self) -> None:
        self._shared.memories[self._key] = self._facts.memory

    def serves(self, hello: Hello) -> bool:
        return (hello.instance, hello.generation) in self._shared.memories

    async def sender(self, request: AttachRequest, on_failed: Callable[[str], None]) -> AnnounceOnly:
        return AnnounceOnly(Offer(self.name), request, self._settings)

    async def attach(self, welcome: Welcome, offer: Offer, target: ReceiveTarget) -> Receiver:
        memory = self._shared.memories.get((welcome.instance, welcome.generation))
        # The producer may have been closed since it was offered.
        if memory is None:
            raise TransportUnavailable("the producer is not in this process")
        whole = host_blocks(memory)
        # Take the producer's blocks in the size in which they travel: the layouts may differ.
        source = HostBlocks(whole.view(0, whole.num_blocks), welcome.num_blocks, target.block_bytes)
        if target.converter is not None:
            return converting(source, target.converter)
        return HostReceiver(source, host_blocks(target.memory))

    async def close(self) -> None:
        self._shared.memories.pop(self._key, None)
