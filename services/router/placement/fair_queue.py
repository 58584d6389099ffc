"""Decides the order of requests that wait in the router: by priority, then fairly between API keys. Pure.

It implements start-time fair queueing (Goyal, Vin and Cheng, 1996). Each request has a start on a virtual clock, namely
where its caller's previous request ended; the clock advances with the requests that are sent on. A caller with a
thousand waiting requests therefore delays its own requests and not those of other callers.
"""

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton_serve.services.router.protocol.caller import Caller

T = TypeVar("T")


@dataclass(slots=True, order=True)
class _Entry(Generic[T]):
    """One item in the queue. The order of the fields is the sort order: the smallest priority first, then the earliest
    start.
    """

    priority: int
    start: float
    order: int
    """Number of the entry since the queue was made. It decides ties, since items cannot be compared."""
    tokens: int = field(compare=False)
    item: T | None = field(compare=False)
    """The field is None after the item was removed; the entry stays in the heap until it comes first."""


class FairQueue(Generic[T]):
    """Holds waiting items, such as requests, and orders them by priority and fairly among callers. Items are compared
    by identity, and each may be in the queue once.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry[T]] = []
        self._entries: dict[int, _Entry[T]] = {}
        self._virtual_ends: dict[str, float] = {}
        self._virtual_clock = 0.0
        self._order = 0
        self.tokens = 0
        """Prompt tokens of all waiting items."""

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, item: T, caller: Caller, *, priority: int, tokens: int) -> None:
        """Add an item of `caller` that needs `tokens` prompt tokens computed. Items with a smaller `priority` go
        first.
        """
        # A caller that was idle starts at the clock: it must not collect credit while it sends nothing.
        start = max(self._virtual_clock, self._virtual_ends.get(caller.name, 0.0))
        self._virtual_ends[caller.name] = start + tokens / caller.weight
        entry = _Entry(priority, start, self._order, tokens, item)
        self._order += 1
        self._entries[id(item)] = entry
        self.tokens += tokens
        heapq.heappush(self._heap, entry)

    def first(self) -> T | None:
        """Return the item that is next in the queue's order without removing it, or None if the queue is empty."""
        while self._heap and self._heap[0].item is None:
            heapq.heappop(self._heap)
        return self._heap[0].item if self._heap else None

    def remove(self, item: T) -> bool:
        """Remove an item, because it goes on or is given up. Return False if it was not in the queue."""
        entry = self._entries.pop(id(item), None)
        if entry is None:
            return False
        entry.item = None  # removing it from the middle of the heap would cost O(n)
        self.tokens -= entry.tokens
        # Only the first item advances the clock: it is sent on. An item further back was cancelled by its client.
        self._virtual_clock = max(self._virtual_clock, entry.start) if entry is self._heap[0] else self._virtual_clock
        if not self._entries:
            # An empty queue starts again at 0, so that neither the table of callers nor the clock grows forever.
            self._heap.clear()
            self._virtual_ends.clear()
            self._virtual_clock = 0.0
        return True

    def tokens_before(self, caller: Caller, *, priority: int) -> int:
        """Return the number of prompt tokens of all items that would go before a new item of `caller` with this
        priority.
        """
        if not self._entries:
            return 0
        start = max(self._virtual_clock, self._virtual_ends.get(caller.name, 0.0))
        return sum(e.tokens for e in self._entries.values() if (e.priority, e.start) <= (priority, start))

    def items(self) -> list[T]:
        """Return all waiting items in the order of their arrival."""
        return [entry.item for entry in self._entries.values() if entry.item is not None]

    def check_invariants(self) -> None:
        """Assert that the queue's counts agree with its items. For tests."""
        assert self.tokens == sum(entry.tokens for entry in self._entries.values())
        assert len(self._entries) <= len(self._heap)
        assert all(entry.item is not None for entry in self._entries.values())
