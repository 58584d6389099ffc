"""Defines the interface of a transport. Sessions, credits, the bookkeeping of checksums, and liveness are done by its
callers.

A consumer attaches to a transport: the producer creates a `Sender` for it, which announces blocks once their bytes are
available, and the consumer creates a `Receiver`, which places them. If a transport `pulls`, the consumer's copies read
the producer's memory, so the producer keeps blocks until the lease ends. The package's docstring lists the steps of
adding a transport.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.kvtransfer.block_memory import BlockMemory
from baton_serve.kvtransfer.control_messages import Hello, Host, Offer, Piece, Welcome
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.transports.checksum_cache import ChecksumCache

Buffer = bytes | memoryview
Announce = Callable[[Sequence[Sequence[Buffer]]], None]
"""Sends the `Blocks` message and, if the bytes travel with it, the bytes: the first group of frames behind it, and each
other group behind a `Bytes` message. Called on the event loop, once for each `send`.
"""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Describes the node that a transport belongs to: its instance and generation, the memory of its blocks, and its
    host.
    """

    instance: InstanceId
    generation: Generation
    memory: BlockMemory
    host: Host


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """A consumer's request to attach a transport, as the producer's end needs it: the consumer's `hello`, its dialects
    best first, and this node's blocks.
    """

    hello: Hello
    epoch: int
    dialects: Sequence[str]
    memory: BlockMemory
    """Memory of this node's blocks."""
    layout: KVLayout
    """Layout of this node's blocks."""
    wire: KVLayout
    """Layout in which blocks travel to this consumer."""
    sums: ChecksumCache
    """Checksums of this node's blocks in host memory."""


class Converter(Protocol):
    """Converts received blocks of a producer whose layout differs, and writes them to this node's blocks. Implemented
    by `kvtransfer.conversion.receivers.LayoutConverter`.
    """

    @property
    def wire(self) -> KVLayout:
        """Return the memory layout in which the producer's blocks arrive, before they are converted."""
        ...

    @property
    def waits(self) -> bool:
        """Return whether `place` waits for a device, so that it must not run on the event loop."""
        ...

    def place(self, destination: int, block: memoryview) -> None:
        """Convert `block`, the bytes of one whole, verified block of the producer, and write its tokens to this node's
        blocks. `destination` is the number that `StagingBuffers` gave to the arriving block.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReceiveTarget:
    """The destination of received blocks: `memory`, this node's blocks, which a receiver writes directly or, if the
    layouts differ, through `converter` (otherwise None).
    """

    memory: BlockMemory
    converter: Converter | None = None

    @property
    def block_bytes(self) -> int:
        """Return the size of one whole block in bytes, in the layout in which it arrives, before any conversion."""
        return self.memory.block_bytes if self.converter is None else self.converter.wire.block_bytes


class Intake(Protocol):
    """Receives one block whose bytes arrive in several frames."""

    def take(self, frame: Buffer) -> None:
        """Copy `frame`, the next bytes of the block, to the block's destination or to a buffer until the block is
        complete.
        """
        ...

    def is_right(self) -> bool:
        """Return whether the bytes match the block's checksum; True if it has none. Call it once, after
        the last frame.
        """
        ...


class IncomingParcel(Protocol):
    """One announced parcel whose bytes a transport reads from its own channel, a `Stream`. The transport calls the
    methods, from one thread at a time except for `abandon`.
    """

    @property
    def parts(self) -> int:
        """Return into how many parts each block of this parcel is divided; 1 for whole blocks."""
        ...

    @property
    def placements(self) -> Sequence[BlockPlacement]:
        """Return the blocks of this parcel that the fetch still wants, each with its destination."""
        ...

    def take(self, frame: Buffer) -> None:
        """Accept the next bytes of the parcel: they are copied to their blocks and verified, or skipped if the fetch
        does not want these blocks any more.
        """
        ...

    def placed(self, placement: BlockPlacement, *, matches: bool) -> None:
        """Accept the report that the transport itself has written the block of `placement`, instead of calling `take`.
        `matches` says whether its bytes matched its checksum.
        """
        ...

    def end(self) -> None:
        """Accept the report that all bytes of the parcel have been read from the channel. The producer gets credit for
        them.
        """
        ...

    def abandon(self, reason: str) -> None:
        """Accept the report that the rest of the parcel will never come, because of `reason`, and that nothing writes
        to its blocks any more.
        """
        ...


class Stream(Protocol):
    """A channel of a transport's own, over which the bytes of blocks arrive in the order in which parcels were
    announced, whichever fetch they belong to.
    """

    def expect(self, pieces: Sequence[Piece], parcel: IncomingParcel) -> None:
        """Queue the next parcel to read from the channel; `pieces` are its announced blocks or parts. Called on the
        event loop in the order of the announcements. It must not block; the results are reported to `parcel`.
        """
        ...


class Receiver(Protocol):
    """The consumer's end of an attached transport: it writes the received blocks to their destinations."""

    @property
    def stream(self) -> Stream | None:
        """Return the transport's own channel for bytes of blocks, or None if it has none. With a channel, `receive` is
        not called.
        """
        ...

    @property
    def stages(self) -> bool:
        """Return whether the producer must be notified when a parcel has been read, because its bytes are in the
        producer's staging memory until then. It is also True if `receive` waits for a device, so that it never runs on
        the event loop.
        """
        ...

    def receive(self, placement: BlockPlacement, frames: Sequence[Buffer]) -> bool:
        """Copy one block to its destination: from `frames`, the frames of the announcing message that contain it, or
        from the producer's memory if there are none. Return False if the bytes do not match its checksum.

        It may run in any thread, and in several at the same time. Raises `TransportUnavailable` if the transport broke.
        """
        ...

    def intake(self, placement: BlockPlacement) -> Intake:
        """Return the object that receives one block whose bytes arrive in several frames. Only transports that send
        bytes in frames (`Transport.buffers`) need it.
        """
        ...

    def close(self) -> None:
        """Free the resources of the consumer's end. Copies that are running already may still complete."""
        ...


@dataclass(frozen=True, slots=True)
class ParcelContent:
    """The blocks of a parcel that a `Sender` is to prepare: their numbers in this node's memory, or numbers of parts if
    each block has several `parts`.

    `checked` states for each of them whether it needs a checksum.
    """

    blocks: Sequence[int]
    checked: Sequence[bool]
    parts: int = 1

    def to_sum(self) -> list[int]:
        """Return the numbers, in this node's memory, of those blocks (or parts) of the parcel that need a checksum."""
        return [block for block, is_checked in zip(self.blocks, self.checked, strict=True) if is_checked]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A parcel that is ready to be sent. For each block or part, `sources` has the number under which the consumer
    finds it (in this node's block memory, or in its staging memory), and `checksums` its checksum or None. `views` are
    the bytes if they were staged to be sent as frames, otherwise empty.
    """

    sources: Sequence[int]
    checksums: Sequence[int | None]
    views: Sequence[Buffer] = ()
    parts: int = 1


class Sender(Protocol):
    """The producer's end of an attached transport, for one consumer: it prepares, announces and sends blocks."""

    @property
    def offer(self) -> Offer:
        """Return the data that the consumer needs to reach this transport, such as an address and a secret."""
        ...

    @property
    def batch_bytes(self) -> int:
        """Return the largest number of bytes of blocks that one parcel may contain."""
        ...

    @property
    def taper_bytes(self) -> int | None:
        """Return the size in bytes of the first and last parcels of a prompt, which may be smaller so that copying
        starts and ends earlier. None means that they are as large as the others.
        """
        ...

    @property
    def window_bytes(self) -> int | None:
        """Return the largest number of bytes in flight, or None if they need no bound because the transport sends no
        bytes.
        """
        ...

    @property
    def stages(self) -> bool:
        """Return whether `prepare` copies the blocks to staging memory that the consumer reads. It is divided into
        places for whole blocks, which stay in use until `taken`.
        """
        ...

    def is_quick(self, chosen: ParcelContent, *, is_little: bool) -> bool:
        """Return whether `prepare` of the parcel `chosen` waits for no device and takes less time than waking a thread,
        so that it may run on the event loop. `is_little` is True if the parcel has few bytes.
        """
        ...

    def prepare(self, chosen: ParcelContent) -> Prepared:
        """Copy the blocks of a parcel (`chosen`) to staging memory, if this transport needs that, and compute their
        checksums. It runs in a worker thread, or on the event loop if `is_quick` allows it. Raises
        `TransportUnavailable` if the transport broke.
        """
        ...

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        """Make the bytes of a prepared parcel available to the consumer, and call `announce` once with the frames that
        travel with the announcement. `pieces` are its blocks or parts, as they are announced. Called on the event loop;
        it must not wait.
        """
        ...

    def taken(self, prepared: Prepared) -> None:
        """Free the staging memory of the parcel `prepared`, because the consumer has read its bytes."""
        ...

    def close(self) -> None:
        """Free the resources of the producer's end, after the consumer has stopped using the transport or its
        connection was lost.
        """
        ...


class Transport(Protocol):
    """One way of moving blocks between two nodes, such as `usm` or `zeromq`. Each node creates one object for each
    transport, for all its connections. The node calls `start` once, and `close` when the node itself is closed.
    """

    @property
    def name(self) -> str:
        """Return the transport's name in settings, messages and metrics."""
        ...

    @property
    def pulls(self) -> bool:
        """Return whether bytes may be read from the producer's block memory until the consumer reports the end of its
        copies, so that the producer must keep the blocks until then.
        """
        ...

    @property
    def buffers(self) -> bool:
        """Return whether the bytes of blocks are sent to the consumer, usually in messages of the control connection,
        instead of being copied out of memory that the producer shows.
        """
        ...

    @property
    def streams(self) -> bool:
        """Return whether the bytes come over a channel of the transport's own, in the order of the announcements (see
        `Receiver.stream`).
        """
        ...

    @property
    def narrows(self) -> bool:
        """Return whether the producer can convert blocks to the consumer's KV dtype before it sends them by this
        transport, if that dtype is smaller.
        """
        ...

    async def start(self) -> None:
        """Prepare this node's end, for example by opening a listener. If the transport cannot be used here, it does not
        raise; `serves` then returns False for every consumer.
        """
        ...

    @property
    def dialects(self) -> Sequence[str]:
        """Return the dialects (variants) of this transport that this node can use, best first. Both ends must use the
        same; most transports have none.
        """
        ...

    def serves(self, hello: Hello) -> bool:
        """Return whether the consumer that sent `hello` can be reached by this transport, for example because it runs
        on the same host. The producer asks this.
        """
        ...

    async def sender(self, request: AttachRequest, on_failed: Callable[[str], None]) -> Sender:
        """Create the producer's end for the consumer of `request`. Raises `TransportUnavailable` if that fails.

        If it breaks later, it calls `on_failed` with the reason, on the event loop and only once.
        """
        ...

    async def attach(self, welcome: Welcome, offer: Offer, target: ReceiveTarget) -> Receiver:
        """Create the consumer's end from `offer`, the producer's answer; `welcome` describes the producer, and `target`
        is where blocks are written. Raises `TransportUnavailable` with the reason if the transport cannot be used.
        """
        ...

    async def close(self) -> None:
        """Free everything that this node's end of the transport holds. Called once, after all senders and receivers
        were closed.
        """
        ...
