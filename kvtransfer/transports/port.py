"""The interface of a transport: what it must provide. Sessions, credits, the bookkeeping of checksums, and liveness are
done by its callers.

A consumer attaches to a transport: the producer creates a `Sender` for it, which announces blocks once their bytes are
available, and the consumer creates a `Receiver`, which places them. If a transport `pulls`, the consumer's copies read
the producer's memory, so the producer keeps blocks until the lease ends. The package's docstring lists the steps of
adding a transport.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.contracts.layout import KVLayout
from baton_serve.kvtransfer.frames import Hello, Host, Offer, Piece, Welcome
from baton_serve.kvtransfer.memory import BlockMemory
from baton_serve.kvtransfer.session.steps import BlockPlacement
from baton_serve.kvtransfer.transports.checksum_cache import ChecksumCache

Buffer = bytes | memoryview
Announce = Callable[[Sequence[Sequence[Buffer]]], None]
"""Sends the `Blocks` message and, if the bytes travel with it, the bytes: the first group of frames behind it, and each
other group behind a `Bytes` message. Called on the event loop, once for each `send`.
"""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The node that a transport belongs to: its identity, the memory of its blocks, and its host."""

    instance: InstanceId
    generation: Generation
    memory: BlockMemory
    host: Host


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """A consumer that attaches: its identity, its dialects best first, and this node's blocks."""

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
    """Places blocks of a producer whose layout differs. Implemented by
    `kvtransfer.conversion.receivers.LayoutConverter`.
    """

    @property
    def wire(self) -> KVLayout:
        """Return the layout in which the producer's blocks arrive."""
        ...

    @property
    def waits(self) -> bool:
        """Return whether `place` waits for a device."""
        ...

    def place(self, destination: int, block: memoryview) -> None:
        """Convert one whole, verified block and write it to its destination."""
        ...


@dataclass(frozen=True, slots=True)
class ReceiveTarget:
    """The destination of received blocks: `memory`, or `converter` if the layouts differ."""

    memory: BlockMemory
    converter: Converter | None = None

    @property
    def block_bytes(self) -> int:
        """Return the size of one whole block in bytes, in the layout in which it arrives, before any conversion."""
        return self.memory.block_bytes if self.converter is None else self.converter.wire.block_bytes


class Intake(Protocol):
    """Receives the bytes of one block that arrive piece by piece."""

    def take(self, frame: Buffer) -> None:
        """Place the next bytes of the block."""
        ...

    def is_right(self) -> bool:
        """Return whether the bytes match the checksum. Call it after the last frame."""
        ...


class IncomingParcel(Protocol):
    """One announced parcel on its way through a `Stream`. Only one thread at a time may call it, except
    for `abandon`.
    """

    @property
    def parts(self) -> int:
        """Return into how many parts each block of this parcel is divided; 1 for whole blocks."""
        ...

    @property
    def placements(self) -> Sequence[BlockPlacement]:
        """Return the placements of this parcel's blocks that are still wanted."""
        ...

    def take(self, frame: Buffer) -> None:
        """Take the next bytes of the parcel: they are placed and verified, or skipped if nothing wants them."""
        ...

    def placed(self, placement: BlockPlacement, *, matches: bool) -> None:
        """Report a block that the transport has placed itself, instead of calling `take`."""
        ...

    def end(self) -> None:
        """Report that the whole parcel has been read from the channel."""
        ...

    def abandon(self, reason: str) -> None:
        """Report that the rest of the parcel will never come and that nothing writes to its blocks any more."""
        ...


class Stream(Protocol):
    """A channel whose bytes arrive in the order of their announcements, whichever transfer they belong to."""

    def expect(self, pieces: Sequence[Piece], parcel: IncomingParcel) -> None:
        """Queue the next parcel. Called on the event loop in the order of the announcements; it must not block, and
        reports through `parcel`.
        """
        ...


class Receiver(Protocol):
    """The consumer's end of an attached transport."""

    @property
    def stream(self) -> Stream | None:
        """Return the channel of the transport, or None. With a channel, `receive` is not called."""
        ...

    @property
    def stages(self) -> bool:
        """Return whether the producer must be notified when a parcel has been read, because its bytes are in the
        producer's staging memory until then. It is also True if `receive` waits for a device, so that it never runs on
        the event loop.
        """
        ...

    def receive(self, placement: BlockPlacement, frames: Sequence[Buffer]) -> bool:
        """Place one block, whose own frames of the message are `frames`. Return False if the bytes do not match the
        checksum.

        It may run in any thread, and in several at the same time. Raises `TransportUnavailable` if the transport broke.
        """
        ...

    def intake(self, placement: BlockPlacement) -> Intake:
        """Return the intake of one block that arrives piece by piece. Only transports with `buffers` need it."""
        ...

    def close(self) -> None:
        """Free the resources of this end. Copies that are running already may still complete."""
        ...


@dataclass(frozen=True, slots=True)
class ParcelContent:
    """The content of a parcel that is to be prepared: numbers of blocks, or of parts if each block has several `parts`.

    `checked` states for each of them whether it needs a checksum.
    """

    blocks: Sequence[int]
    checked: Sequence[bool]
    parts: int = 1

    def to_sum(self) -> list[int]:
        """Return the blocks of the parcel that need a checksum."""
        return [block for block, is_checked in zip(self.blocks, self.checked, strict=True) if is_checked]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A parcel that is ready to be sent. For each block or part, `sources` has the number under which the consumer
    finds it in the shown memory, and `checksums` its checksum or None. `views` are the bytes if they are staged.
    """

    sources: Sequence[int]
    checksums: Sequence[int | None]
    views: Sequence[Buffer] = ()
    parts: int = 1


class Sender(Protocol):
    """The producer's end of an attached transport, for one consumer."""

    @property
    def offer(self) -> Offer:
        """Return the data that the consumer needs to attach."""
        ...

    @property
    def batch_bytes(self) -> int:
        """Return the largest number of bytes that one message announces."""
        ...

    @property
    def taper_bytes(self) -> int | None:
        """Return the size in bytes of the first and last parcels of a prompt, which may be smaller so that copying
        starts and ends earlier. None means that they are as large as the others.
        """
        ...

    @property
    def window_bytes(self) -> int | None:
        """Return the largest number of bytes in flight, or None if the transport queues nothing."""
        ...

    @property
    def stages(self) -> bool:
        """Return whether `prepare` copies the bytes to staging memory. Its places, each for a whole block, stay in use
        until `taken`.
        """
        ...

    def is_quick(self, chosen: ParcelContent, *, is_little: bool) -> bool:
        """Return whether `prepare` waits for no device and takes less time than waking a thread. `is_little` is True if
        the parcel has few bytes.
        """
        ...

    def prepare(self, chosen: ParcelContent) -> Prepared:
        """Stage the bytes and compute checksums. It runs in a worker thread, or on the event loop after `is_quick`.
        Raises `TransportUnavailable`.
        """
        ...

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        """Make the bytes available to the consumer, and call `announce`. Called on the event loop."""
        ...

    def taken(self, prepared: Prepared) -> None:
        """Free the staged bytes of a parcel: the consumer does not read them any more."""
        ...

    def close(self) -> None:
        """Free the resources of this end, after the consumer has detached or its connection was lost."""
        ...


class Transport(Protocol):
    """One way of moving blocks between two nodes, as one node sees it. The node starts it once and closes it at its
    end.
    """

    @property
    def name(self) -> str:
        """Return the name by which settings, messages and metrics refer to it."""
        ...

    @property
    def pulls(self) -> bool:
        """Return whether the consumer reads the producer's memory directly, so that nothing is sent."""
        ...

    @property
    def buffers(self) -> bool:
        """Return whether the bytes of blocks are sent to the consumer, usually in messages of the control connection,
        instead of being copied out of memory that the producer shows.
        """
        ...

    @property
    def streams(self) -> bool:
        """Return whether the bytes come over a channel of the pair's own, in the order of the announcements, through
        `Receiver.stream`.
        """
        ...

    @property
    def narrows(self) -> bool:
        """Return whether it can send blocks in the consumer's dtype if that is smaller."""
        ...

    async def start(self) -> None:
        """Prepare this end, for example by opening a listener. A transport that cannot be used serves no consumer; it
        does not raise.
        """
        ...

    @property
    def dialects(self) -> Sequence[str]:
        """Return the variants of this transport, best first. Both ends must use the same; most transports have none."""
        ...

    def serves(self, hello: Hello) -> bool:
        """Return whether a consumer with this `hello` can be reached by this transport, such as a process on the same
        host.
        """
        ...

    async def sender(self, request: AttachRequest, on_failed: Callable[[str], None]) -> Sender:
        """Create the producer's end for one connection. Raises `TransportUnavailable`.

        If it breaks later, it must call `on_failed` with the reason, on the event loop and only once.
        """
        ...

    async def attach(self, welcome: Welcome, offer: Offer, target: ReceiveTarget) -> Receiver:
        """Create the consumer's end from the producer's offer. Raises `TransportUnavailable` with the reason."""
        ...

    async def close(self) -> None:
        """Free everything that the transport holds. Called once, after all receivers and senders were closed."""
        ...
