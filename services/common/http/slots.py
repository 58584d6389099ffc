"""Limits the number of a server's connections, and chooses which one is closed in favour of a new one.

It is pure: it does no I/O and reads no clock.
"""

from collections import Counter
from collections.abc import Callable


class Slots:
    """Counts the connections of one process, from their acceptance to the close of their file descriptors."""

    def __init__(self, most: int, most_per_address: int = 0) -> None:
        """`most` limits all connections, `most_per_address` those of one client address; 0 means no limit."""
        self._most = most
        self._most_per_address = most_per_address
        self._num_open = 0
        self._by_address: Counter[str] = Counter()
        self._idle: dict[Slot, None] = {}
        """Connections between two requests or about to be closed, the longest idle one first (dicts keep the order)."""
        self._opening: dict[Slot, None] = {}
        """Connections on which the head of a request is not complete yet, the oldest one first."""

    def __len__(self) -> int:
        return self._num_open

    def admit(self, address: str) -> "Slot | None":
        """Return a slot for a new connection from `address`, or None if it must be refused.

        If all slots are taken, a connection that serves no request is closed to make room.
        """
        if self._most_per_address and self._by_address[address] >= self._most_per_address:
            return None
        if self._num_open >= self._most and not self.evict():
            return None
        self._num_open += 1
        self._by_address[address] += 1
        return Slot(self, address)

    def evict(self) -> bool:
        """Close the connection that has been idle longest, or else the one that has waited longest for a head.

        Return False if every connection serves a request.
        """
        slot = next(iter(self._idle or self._opening), None)
        if slot is None:
            return False
        # Released first: `on_evicted` closes the connection, and the place must be free when this returns.
        slot.release()
        slot.on_evicted()
        return True

    def _release(self, slot: "Slot") -> None:
        self._num_open -= 1
        self._by_address[slot.address] -= 1
        # A zero left behind for every address that ever connected would be a leak.
        if not self._by_address[slot.address]:
            del self._by_address[slot.address]


class Slot:
    """The slot of one connection, which reports here what it is doing. A new one waits for its first head."""

    __slots__ = ("_evictable", "_is_released", "_slots", "address", "on_evicted")

    def __init__(self, slots: Slots, address: str) -> None:
        self.address = address
        self.on_evicted: Callable[[], object] = _do_nothing
        """Closes the connection at once; data that is not written yet is lost. The owner of the slot sets it."""
        self._slots = slots
        self._is_released = False
        self._evictable: dict[Slot, None] | None = None
        """The list of closable connections that contains this one; None while it serves a request."""
        self.opens()

    def opens(self) -> None:
        """Report that the head of a request has begun."""
        self._move(self._slots._opening)

    def works(self) -> None:
        """Report that a request is being received or answered, so the connection must not be closed."""
        if self._evictable is not None:
            del self._evictable[self]
            self._evictable = None

    def idles(self) -> None:
        """Report that the connection waits for its next request or is about to be closed."""
        self._move(self._slots._idle)

    def release(self) -> None:
        """Free the slot at the end of the connection. Further calls do nothing."""
        if not self._is_released:
            self.works()
            self._is_released = True
            self._slots._release(self)

    def _move(self, evictable: "dict[Slot, None]") -> None:
        if self._evictable is not evictable and not self._is_released:
            self.works()
            self._evictable = evictable
            evictable[self] = None


def _do_nothing() -> None: ...
