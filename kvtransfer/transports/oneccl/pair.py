"""What a backend must do: make a channel between two processes, at run time, without a world of others.

A channel has one direction: rank 0, the producer, sends; rank 1 receives. Collective libraries do not notice a dead
peer, and some can neither wait with a deadline nor be interrupted: every call is made in a thread that may be given up.
"""

from collections.abc import Sequence
from typing import Protocol

from baton_serve.kvtransfer.errors import TransportUnavailable

LANES = 3
"""Messages that are under way at once, where a library allows it."""


class PairBrokenError(TransportUnavailable):
    pass


class Pair(Protocol):
    """Used by one thread at a time. Both ends name the same sizes in the same order. Raises `PairBrokenError`."""

    def send(self, parts: Sequence[memoryview]) -> None:
        """Returns when the parts may be changed."""
        ...

    def receive(self, parts: Sequence[memoryview]) -> None: ...

    def abandon(self) -> None:
        """From any thread, never blocks. A call under way ends with an error, or never."""
        ...


class Meeting(Protocol):
    """The producer's half of a rendezvous: where, and with which secret, the consumer joins."""

    @property
    def address(self) -> bytes: ...
    @property
    def secret(self) -> bytes: ...

    def join(self, timeout_s: float) -> Pair:
        """Blocks until the consumer has joined. Raises `PairBrokenError`; may never return."""
        ...


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    def load(self) -> None:
        """Loads the library: seconds. Raises `TransportUnavailable`."""
        ...

    def meet(self, host: str) -> Meeting:
        """`host`: an address of this machine that the consumer can reach. Raises `TransportUnavailable`."""
        ...

    def join(self, address: bytes, secret: bytes, timeout_s: float) -> Pair:
        """The consumer's half. Blocks; raises `PairBrokenError`; may never return."""
        ...
