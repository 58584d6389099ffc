"""Requests that wait in the router, in the order in which they go: by priority, then fairly between callers.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each request starts where its caller's last one ended, on a
virtual clock that advances with the work let go. A caller with a thousand requests waiting
delays its own, not another's. Pure.
"""

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton_serve.services.router.protocol.caller import Caller

T = TypeVar("T")


@dataclass(slots=True, order=True)
class _Entry(Generic[T]):
    priority: int
    start: float
    order: int
    tokens: int = field(compare=False)
    item: T | None = field(compare=False)


class FairQueue(Generic[T]):
    """Items are compared by identity; each may wait once."""

    def __init__(self) -> None:
        self._heap: list[_Entry[T]] = []
        self._entries: dict[int, _Entry[T]] = {}
        self._virtual_ends: dict[str, float] = {}
        self._virtual_clock = 0.0
        self._order = 0
        self.tokens = 0
        """Of all that wait."""

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, item: T, caller: Caller, *, priority: int, tokens: int) -> None:
        start = max(self._virtual_clock, self._virtual_ends.get(caller.name, 0.0))
        self._virtual_ends[caller.name] = start + tokens / caller.weight
        entry = _Entry(priority, start, self._order, tokens, item)
        self._order += 1
        self._entries[id(item)] = entry
        self.tokens += tokens
        heapq.heappush(self._heap, entry)

    def first(self) -> T | None:
        while self._heap and self._heap[0].item is None:
            heapq.heappop(self._heap)
        return self._heap[0].item if self._heap else None

    def remove(self, item: T) -> bool:
        """It goes, or was given up. Whether it waited."""
        entry = self._entries.pop(id(item), None)
        if entry is None:
            return False
        entry.item = None
        self.tokens -= entry.tokens
        self._virtual_clock = max(self._virtual_clock, entry.start) if entry is self._heap[0] else self._virtual_clock
        if not self._entries:
            self._heap.clear()
            self._virtual_ends.clear()
            self._virtual_clock = 0.0
        return True

    def tokens_before(self, caller: Caller, *, priority: int) -> int:
        """Of all that would go before a request that came now."""
        if not self._entries:
            return 0
        start = max(self._virtual_clock, self._virtual_ends.get(caller.name, 0.0))
        return sum(e.tokens for e in self._entries.values() if (e.priority, e.start) <= (priority, start))

    def items(self) -> list[T]:
        return [entry.item for entry in self._entries.values() if entry.item is not None]

    def check_invariants(self) -> None:
        assert self.tokens == sum(entry.tokens for entry in self._entries.values())
        assert len(self._entries) <= len(self._heap)
        assert all(entry.item is not None for entry in self._entries.values())
