"""Defines the interface of a backend: a channel between two processes, made at run time.

A channel has one direction: rank 0, the producer, sends; rank 1 receives. Collective libraries do not notice a dead
peer, and some calls have no deadline and cannot be interrupted. Therefore every call runs in a thread that can be given
up.
"""

from collections.abc import Sequence
from typing import Protocol

from baton_serve.kvtransfer.errors import TransportUnavailable

LANES = 3
"""Number of messages that are in flight at the same time, if the library allows it."""


class PairBrokenError(TransportUnavailable):
    """A pair (connection of two processes through a collective library) cannot be used any more."""


class Pair(Protocol):
    """A connection of two processes through a collective library: one sends, the other receives. One thread at a time
    uses it. Both ends must exchange messages of the same sizes in the same order. Its methods raise `PairBrokenError`
    if the pair breaks.
    """

    def send(self, parts: Sequence[memoryview]) -> None:
        """Send the buffers `parts` as one message to the other process. The buffers may be changed when
        this returns.
        """
        ...

    def receive(self, parts: Sequence[memoryview]) -> None:
        """Wait for the next message of the other process, and write it to the buffers `parts`, which must have the same
        sizes as the sent ones.
        """
        ...

    def abandon(self) -> None:
        """Give up the connection; any thread may call this, and it does not wait. A call of `send` or `receive` that is
        running raises an error, or never returns.
        """
        ...


class Meeting(Protocol):
    """The producer's half of connecting two processes by a collective library: the address at which the consumer joins,
    and the secret that the consumer needs. Both are sent to the consumer.
    """

    @property
    def address(self) -> bytes: ...
    @property
    def secret(self) -> bytes: ...

    def join(self, timeout_s: float) -> Pair:
        """Wait until the consumer has joined, and return the connected pair. Raises `PairBrokenError` if that fails or
        takes longer than `timeout_s`; with some libraries it may never return.
        """
        ...


class Backend(Protocol):
    """One way of connecting two processes through a collective library. Its name is a dialect of the transport
    `oneccl`.
    """

    @property
    def name(self) -> str: ...

    def load(self) -> None:
        """Load the collective library, which may take seconds. Raises `TransportUnavailable` if it cannot be loaded."""
        ...

    def meet(self, host: str) -> Meeting:
        """Prepare, as the producer, to be connected with one consumer. `host` is an address of this machine that the
        consumer can reach. Raises `TransportUnavailable` if that fails.
        """
        ...

    def join(self, address: bytes, secret: bytes, timeout_s: float) -> Pair:
        """Connect to the producer as the consumer, with the address and secret of the producer's `Meeting`, and wait
        for the connection. Raises `PairBrokenError` if that fails or takes longer than `timeout_s`; with some libraries
        it may never return.
        """
        ...
