"""The interface of a backend: make a channel between two processes at run time, without a world of other ranks.

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
    """The pair cannot be used any more."""


class Pair(Protocol):
    """A connection to one peer, used by one thread at a time. Both ends must send and receive messages of the same
    sizes in the same order. Its methods raise `PairBrokenError`.
    """

    def send(self, parts: Sequence[memoryview]) -> None:
        """Send a message. The parts may be changed when it returns."""
        ...

    def receive(self, parts: Sequence[memoryview]) -> None:
        """Receive a message into the parts."""
        ...

    def abandon(self) -> None:
        """Give the pair up, from any thread and without blocking. A running call ends with an error, or never."""
        ...


class Meeting(Protocol):
    """The producer's half of a rendezvous: the address at which the consumer joins, and the secret that it needs."""

    @property
    def address(self) -> bytes: ...
    @property
    def secret(self) -> bytes: ...

    def join(self, timeout_s: float) -> Pair:
        """Wait until the consumer has joined. Raises `PairBrokenError`; it may never return."""
        ...


class Backend(Protocol):
    """One way of connecting two processes: a collective library and how it is used. Its name is a dialect of the
    transport `oneccl`.
    """

    @property
    def name(self) -> str: ...

    def load(self) -> None:
        """Load the library, which may take seconds. Raises `TransportUnavailable`."""
        ...

    def meet(self, host: str) -> Meeting:
        """Prepare a rendezvous at `host`, an address of this machine that the consumer can reach. Raises
        `TransportUnavailable`.
        """
        ...

    def join(self, address: bytes, secret: bytes, timeout_s: float) -> Pair:
        """Join a rendezvous as the consumer. It blocks, raises `PairBrokenError`, and may never return."""
        ...
