"""How many connections a server has, and which of them it closes for the sake of a new one. Pure."""

from collections import Counter
from collections.abc import Callable


class Slots:
    """One for each connection of one process, from its acceptance to the end of its descriptor."""

    def __init__(self, most: int, most_per_address: int = 0) -> None:
        """`most_per_address` 0: no limit."""
        self._most = most
        self._most_per_address = most_per_address
        self._num_open = 0
        self._by_address: Counter[str] = Counter()
        self._idle: dict[Slot, None] = {}
        """Between two requests, or with nothing left but to be closed; the one that is longest so is first."""
        self._opening: dict[Slot, None] = {}
        """The head of a request has not arrived whole; the oldest is first."""

    def __len__(self) -> int:
        return self._num_open

    def admit(self, address: str) -> "Slot | None":
        """A slot for a connection from `address`; where all are taken, the one of a connection that serves no request,
        which is closed. None: the new connection must be refused."""
        if self._most_per_address and self._by_address[address] >= self._most_per_address:
            return None
        if self._num_open >= self._most and not self.evict():
            return None
        self._num_open += 1
        self._by_address[address] += 1
        return Slot(self, address)

    def evict(self) -> bool:
        """Close the connection that has been idle longest, else the one that waits longest for the head of a request.
        False: every connection serves a request."""
        slot = next(iter(self._idle or self._opening), None)
        if slot is None:
            return False
        slot.release()
        slot.on_evicted()
        return True

    def _release(self, slot: "Slot") -> None:
        self._num_open -= 1
        self._by_address[slot.address] -= 1
        if not self._by_address[slot.address]:
            del self._by_address[slot.address]


class Slot:
    """Of one connection, which says what it does. A new one waits for the head of its first request."""

    __slots__ = ("_evictable", "_is_released", "_slots", "address", "on_evicted")

    def __init__(self, slots: Slots, address: str) -> None:
        self.address = address
        self.on_evicted: Callable[[], object] = _do_nothing
        """Closes the connection at once; what it had to write is lost."""
        self._slots = slots
        self._is_released = False
        self._evictable: dict[Slot, None] | None = None
        """Which of the lists of connections that may be closed this one is in."""
        self.opens()

    def opens(self) -> None:
        """The head of a request has begun."""
        self._move(self._slots._opening)

    def works(self) -> None:
        """A request is received or answered."""
        if self._evictable is not None:
            del self._evictable[self]
            self._evictable = None

    def idles(self) -> None:
        self._move(self._slots._idle)

    def release(self) -> None:
        """At the connection's end; more than once does nothing."""
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
