"""What a transport must do. Sessions, credits, checksums' bookkeeping and liveness are not its business.

The producer's `Outlet` announces blocks once their bytes can be had; the consumer's `Inlet` places one block. A
transport that `pulls` lets the consumer read the producer's memory, so the producer holds blocks for the lease.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contracts.identity import Generation, InstanceId
from kvtransfer.frames import Hello, Host, Offer, Piece, Welcome
from kvtransfer.memory import BlockMemory
from kvtransfer.session.steps import Placement

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


class Intake(Protocol):
    """One block on its way in."""

    def take(self, frame: Buffer) -> None:
        """Place the block's next bytes."""
        ...

    def is_right(self) -> bool:
        """After the last frame: do the bytes match the checksum?"""
        ...


class Inlet(Protocol):
    def receive(self, placement: Placement, frames: Sequence[Buffer]) -> bool:
        """Place one block; may run in any thread, several at once. False: the bytes do not match the checksum.

        `frames` are the block's own frames of the message. Raises `TransportUnavailable` when it cannot serve.
        """
        ...

    def intake(self, placement: Placement) -> Intake:
        """As `receive`, for a block that comes in several messages. Only transports with `buffers` need it."""
        ...

    def close(self) -> None: ...


class Outlet(Protocol):
    def send(self, pieces: Sequence[Piece], announce: Announce) -> None:
        """Make the blocks' bytes available to the consumer, then call `announce`."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def pulls(self) -> bool: ...

    @property
    def buffers(self) -> bool:
        """Sent bytes wait in queues, so they must be bounded by a window."""
        ...

    async def start(self) -> None: ...

    def offer(self, hello: Hello) -> Offer | None:
        """What this consumer needs to be served this way; None: impossible from here."""
        ...

    async def attach(self, welcome: Welcome, offer: Offer) -> Inlet:
        """Raises `TransportUnavailable` with the reason."""
        ...

    def outlet(self) -> Outlet:
        """Raises `TransportUnavailable`."""
        ...

    async def close(self) -> None: ...
