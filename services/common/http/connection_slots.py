"""Decides how many connections an HTTP server and one client's address may have, and which one is closed for a newer
one.

It is pure: it does no I/O and reads no clock.
"""

import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

_LEAST_CONNECTIONS = 16
"""Number of connections that is allowed even if the process may open very few files."""

MAX_KEPT_BYTES = 256 * 1024 * 1024
"""Maximum size of all long responses together that stay in memory because their clients receive them slowly."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of one HTTP server for its clients: sizes in bytes, times in seconds, numbers of connections."""

    max_head_bytes: int = 64 * 1024
    """Maximum size of the request line and the headers of one request."""
    head_timeout_s: float = 10.0
    """Longest time from the first byte of a head, or from the start of the connection, to the end of the head.

    It also limits a TLS handshake.
    """
    body_timeout_s: float = 30.0
    """Longest time between two reads of a body, and before the first one."""
    keep_alive_s: float = 75.0
    """Longest time from a response to the next request on the connection.

    It is longer than the time for which proxies keep idle connections (mostly 60 s): otherwise a proxy could send a
    request on a connection that is being closed here.
    """
    send_timeout_s: float = 60.0
    """Longest time for a client to receive the remaining data of a connection that is being closed, and longest time in
    which it may receive nothing of its response."""
    min_receive_bytes_per_s: int = 16 * 1024
    """Smallest rate at which a client must receive a long response, beside `send_timeout_s` for all of it: 50 MB may
    take about 53 minutes."""
    max_kept_bytes: int = MAX_KEPT_BYTES
    """Maximum size of the long responses of slow clients. Beyond it, the connection whose response began first is
    closed."""
    lingering_time_s: float = 30.0
    """Longest time for which data that a client sends after its response is read and discarded.

    If the connection were closed with unread data, TCP would reset it, and the client would lose the response.
    """
    lingering_timeout_s: float = 5.0
    """Longest time between two reads of discarded data."""
    lingering_bytes: int = 64 * 1024 * 1024
    """Maximum size of discarded data."""
    max_connections: int = 8192
    """Maximum number of connections of one process; it is lower if the process may open fewer files."""
    max_connections_per_address: int = 0
    """Maximum number of connections of one client address; 0 means no limit."""


def affordable_connections(most: int) -> int:
    """Return how many connections this process may have: at most `most`, and at most three quarters of the file
    descriptors that its limit (`ulimit -n`) permits, since the rest is kept for everything else.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    return min(most, max(_LEAST_CONNECTIONS, soft - soft // 4))


class Slots:
    """Counts the open connections of one HTTP server and limits their number. A connection counts from its acceptance
    to its end.
    """

    def __init__(self, most: int, most_per_address: int = 0, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        """Start without connections. `most` limits all connections, `most_per_address` those of one client address; 0
        means no limit for an address. `max_kept_bytes` limits the long responses of slow clients.
        """
        self._most = most
        self._max_kept_bytes = max_kept_bytes
        self._kept: dict[Slot, int] = {}
        """Bytes of long responses that slow clients receive, the response that began first at the front."""
        self._kept_bytes = 0
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
        """Return a slot for a new connection from the client `address`, or None if the connection must be refused.

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
        """Close one connection that serves no request: the one that has been idle longest or, if none is idle, the one
        that has waited longest for the head of a request.

        Return False if every connection serves a request.
        """
        slot = next(iter(self._idle or self._opening), None)
        if slot is None:
            return False
        # Released first: `on_evicted` closes the connection, and the place must be free when this returns.
        slot.release()
        slot.on_evicted()
        return True

    def _keep(self, slot: "Slot", num_bytes: int) -> None:
        """Record the bytes of a response for `slot`, and close connections of slow clients if they are too many."""
        self._kept_bytes += num_bytes - self._kept.get(slot, 0)
        self._kept[slot] = num_bytes
        if not num_bytes:
            del self._kept[slot]
        # A fast client is done soon, so the response that began first belongs to one of the slowest clients. The last
        # one is kept, however long it is.
        while self._kept_bytes > self._max_kept_bytes and len(self._kept) > 1:
            slowest = next(iter(self._kept))
            self._kept_bytes -= self._kept.pop(slowest)
            slowest.on_evicted()

    def _release(self, slot: "Slot") -> None:
        self._keep(slot, 0)
        self._num_open -= 1
        self._by_address[slot.address] -= 1
        # A zero left behind for every address that ever connected would be a leak.
        if not self._by_address[slot.address]:
            del self._by_address[slot.address]


class Slot:
    """The place of one connection among the limited number of connections, with a record of what the connection is
    doing. A new connection waits for the head of its first request.
    """

    __slots__ = ("_evictable", "_is_released", "_slots", "address", "on_evicted")

    def __init__(self, slots: Slots, address: str) -> None:
        self.address = address
        self.on_evicted: Callable[[], object] = _do_nothing
        """Closes the connection immediately; data that is not written yet is lost. The owner of the slot sets it."""
        self._slots = slots
        self._is_released = False
        self._evictable: dict[Slot, None] | None = None
        """The list of closable connections that contains this one; None while it serves a request."""
        self.opens()

    def opens(self) -> None:
        """Record that the connection waits for the rest of a request's head. It may be closed to make
        room for another.
        """
        self._move(self._slots._opening)

    def works(self) -> None:
        """Record that the connection receives or answers a request, so that it is not closed to make
        room for another.
        """
        if self._evictable is not None:
            del self._evictable[self]
            self._evictable = None

    def idles(self) -> None:
        """Record that the connection waits for its next request or is about to be closed. It may be closed to make room
        for another.
        """
        self._move(self._slots._idle)

    def keeps_response(self, num_bytes: int) -> None:
        """Record that a response of `num_bytes` stays in memory until the client has received most of it; 0 at the end.
        If all of them together have too many bytes, the connection of the slowest one is closed, maybe this one.
        """
        if not self._is_released:
            self._slots._keep(self, num_bytes)

    def release(self) -> None:
        """Give the slot back at the end of the connection, so that another connection can have it. Further calls do
        nothing.
        """
        if not self._is_released:
            self.works()
            self._is_released = True
            self._slots._release(self)

    def _move(self, evictable: "dict[Slot, None]") -> None:
        if self._evictable is not evictable and not self._is_released:
            if self._evictable is not None:
                del self._evictable[self]
            self._evictable = evictable
            evictable[self] = None


def _do_nothing() -> None: ...
