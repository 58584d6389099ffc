"""What a transport must do. Sessions, credits, checksums' bookkeeping and liveness are not its business.

A consumer attaches: the producer makes an `Sender` for it, which announces blocks once their bytes can be had, and the
consumer an `Receiver`, which places them. A transport that `pulls` has the consumer's copies read the producer's
memory, so the producer holds blocks for the lease.
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
"""Sends the `Blocks` message, and the blocks' bytes if they travel with it: the first group of frames right behind it,
the others behind a `Bytes` message each. Called on the event loop, once per `send`."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    instance: InstanceId
    generation: Generation
    memory: BlockMemory
    host: Host


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """A consumer that attaches: who it is, and the dialects it knows."""

    hello: Hello
    epoch: int
    dialects: Sequence[str]
    memory: BlockMemory
    """Where the blocks lie."""
    layout: KVLayout
    wire: KVLayout
    """As they travel to this consumer."""
    sums: ChecksumCache
    """Of this node's blocks."""


class Converter(Protocol):
    """Where the consumer's layout differs: `kvtransfer.conversion.receivers.Converter`."""

    @property
    def wire(self) -> KVLayout:
        """Of the blocks that arrive."""
        ...

    @property
    def waits(self) -> bool: ...
    def place(self, destination: int, block: memoryview) -> None: ...


@dataclass(frozen=True, slots=True)
class ReceiveTarget:
    """Where a consumer wants blocks: in `memory`, or through `converter`."""

    memory: BlockMemory
    converter: Converter | None = None

    @property
    def block_bytes(self) -> int:
        """Of a whole block that arrives."""
        return self.memory.block_bytes if self.converter is None else self.converter.wire.block_bytes


class Intake(Protocol):
    """One block on its way in."""

    def take(self, frame: Buffer) -> None:
        """Place the block's next bytes."""
        ...

    def is_right(self) -> bool:
        """After the last frame: do the bytes match the checksum?"""
        ...


class IncomingParcel(Protocol):
    """One announced parcel on its way through a `Stream`. Called by one thread at a time, except `abandon`."""

    @property
    def parts(self) -> int:
        """Its pieces are each one of so many of a block."""
        ...

    @property
    def placements(self) -> Sequence[BlockPlacement]:
        """Of the parcel's blocks, those that are still wanted."""
        ...

    def take(self, frame: Buffer) -> None:
        """The parcel's next bytes: placed, verified, or skipped where nobody wants them."""
        ...

    def placed(self, placement: BlockPlacement, *, matches: bool) -> None:
        """Instead of `take`: the transport has placed this block itself."""
        ...

    def end(self) -> None:
        """All of the parcel is out of the pair."""
        ...

    def abandon(self, reason: str) -> None:
        """The rest of it will never come. Nothing writes into its places any more."""
        ...


class Stream(Protocol):
    """Bytes that come in the order of their announcements, whichever transfer they are for."""

    def expect(self, pieces: Sequence[Piece], landing: IncomingParcel) -> None:
        """Called on the event loop, in the order of the announcements. Never blocks; answers through `landing`."""
        ...


class Receiver(Protocol):
    @property
    def stream(self) -> Stream | None:
        """Where a transport has one, `receive` is not called."""
        ...

    @property
    def stages(self) -> bool:
        """The producer staged the bytes: it must hear when a parcel is read no more. `receive` waits for a device."""
        ...

    def receive(self, placement: BlockPlacement, frames: Sequence[Buffer]) -> bool:
        """Place one block; may run in any thread, several at once. False: the bytes do not match the checksum.

        `frames` are the block's own frames of the message. Raises `TransportUnavailable` when it cannot serve.
        """
        ...

    def intake(self, placement: BlockPlacement) -> Intake:
        """As `receive`, for a block that comes piecemeal. Only transports with `buffers` need it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ParcelContent:
    """What a parcel will carry: blocks, or one of `parts` of each, and which of them carry a checksum."""

    blocks: Sequence[int]
    checked: Sequence[bool]
    parts: int = 1

    def to_sum(self) -> list[int]:
        return [block for block, is_checked in zip(self.blocks, self.checked, strict=True) if is_checked]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What can be sent: where the consumer finds each block or part, its checksum, and its bytes if they are staged."""

    sources: Sequence[int]
    checksums: Sequence[int | None]
    views: Sequence[Buffer] = ()
    parts: int = 1


class Sender(Protocol):
    @property
    def offer(self) -> Offer:
        """What the consumer needs to attach."""
        ...

    @property
    def batch_bytes(self) -> int:
        """So much is announced by one message."""
        ...

    @property
    def taper_bytes(self) -> int | None:
        """The first and the last messages announce as little as this; None: no less than others."""
        ...

    @property
    def window_bytes(self) -> int | None:
        """So much may be on its way; None: nothing waits in queues."""
        ...

    @property
    def stages(self) -> bool:
        """What `prepare` staged stays until `taken`, in places for whole blocks."""
        ...

    def is_quick(self, chosen: ParcelContent, *, is_little: bool) -> bool:
        """`prepare` waits for no device, and is quicker than waking a thread. `is_little`: by the number of bytes."""
        ...

    def prepare(self, chosen: ParcelContent) -> Prepared:
        """In a worker thread, or on the loop if that is quicker. Raises `TransportUnavailable`."""
        ...

    def send(self, pieces: Sequence[Piece], prepared: Prepared, announce: Announce) -> None:
        """On the loop: make the blocks' bytes available to the consumer, then call `announce`."""
        ...

    def taken(self, prepared: Prepared) -> None:
        """The consumer reads nothing of this parcel any more."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def pulls(self) -> bool: ...

    @property
    def buffers(self) -> bool:
        """Bytes come in messages of the control connection."""
        ...

    @property
    def streams(self) -> bool:
        """Bytes come over a channel of the pair's own, in the order of the announcements, through `Receiver.stream`."""
        ...

    @property
    def narrows(self) -> bool:
        """It sends blocks in the consumer's dtype where that is smaller."""
        ...

    async def start(self) -> None: ...

    @property
    def dialects(self) -> Sequence[str]:
        """Ways of this transport that both ends must agree on, best first; most have none."""
        ...

    def serves(self, hello: Hello) -> bool:
        """Could this consumer be served this way?"""
        ...

    async def sender(self, wish: AttachRequest, on_failed: Callable[[str], None]) -> Sender:
        """For one connection. Raises `TransportUnavailable`. `on_failed`: it broke later; call it on the loop, once."""
        ...

    async def attach(self, welcome: Welcome, offer: Offer, target: ReceiveTarget) -> Receiver:
        """Raises `TransportUnavailable` with the reason."""
        ...

    async def close(self) -> None: ...
