"""Decides which inputs of pooling models share a forward pass, by their lengths. It has no tensors and no clock.

A pass pads all inputs to the longest, so inputs of similar lengths are put together, those with images apart. The input
that comes first in order (priority, then arrival) is always among them.
"""

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from msgspec import Struct

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.pooling import PoolingInput, PoolingSpec

MIN_FILL_RATIO = 0.6
"""Shortest input of a pass as a fraction of the longest. A shorter one waits for a pass of its own lengths."""
NEGLIGIBLE_TOKENS = 16
"""Largest difference in tokens that is always accepted, since such padding costs less than another pass."""


class QueuedInput(Struct, frozen=True, eq=False, gc=False):
    """One input of a pooling request that waits to be computed. `number` is larger for inputs that were queued
    later."""

    request_id: RequestId
    index: int
    input: PoolingInput
    params: PoolingSpec
    priority: int
    number: int

    @property
    def length(self) -> int:
        return len(self.input.token_ids)

    @property
    def has_images(self) -> bool:
        return bool(self.input.media)


class _OrderKey(NamedTuple):
    """The place of a queued input in the order of computation; the smallest key comes first."""

    priority: int
    number: int


class PoolingInputQueue:
    """The inputs of a pooling engine that wait to be computed. They are sorted twice: by length, so that a pass has
    little padding, and by priority and arrival."""

    def __init__(self) -> None:
        self._by_length: list[QueuedInput] = []
        self._order: list[_OrderKey] = []
        self._items: dict[int, QueuedInput] = {}
        self._num_added = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, request_id: RequestId, inputs: list[PoolingInput], params: PoolingSpec, priority: int) -> None:
        """Queue the inputs of one request. Lower values of `priority` are computed first."""
        for index, given in enumerate(inputs):
            self._num_added += 1
            item = QueuedInput(request_id, index, given, params, priority, self._num_added)
            self._items[item.number] = item
            insort(self._by_length, item, key=_length_key)
            heappush(self._order, _OrderKey(priority, item.number))
            self.num_tokens += item.length

    def discard(self, request_id: RequestId) -> None:
        """Remove all queued inputs of this request."""
        for item in [item for item in self._items.values() if item.request_id == request_id]:
            self._remove(item)
        self._order = [key for key in self._order if key.number in self._items]
        heapify(self._order)

    def take(self, *, max_tokens: int, max_inputs: int) -> list[QueuedInput]:
        """Remove the inputs of the next pass from the queue and return them, the shortest first. They are the first
        input by priority and arrival, and others of similar length.

        The pass has at most `max_tokens` tokens with padding, unless a single input is longer. Return an empty list if
        nothing is queued.
        """
        # Inputs that shared an earlier pass left their entry in the heap.
        while self._order and self._order[0].number not in self._items:
            heappop(self._order)
        if not self._order:
            return []
        head = self._items[self._order[0].number]
        low = self._position(head)
        high = low + 1
        # Extend the range around the first input by the neighbour whose length is nearer, as long as one fits.
        while high - low < max_inputs:
            longer = self._fits(low, high + 1, max_tokens)
            shorter = self._fits(low - 1, high, max_tokens)
            if not longer and not shorter:
                break
            if longer and (not shorter or self._distance(high, head) <= self._distance(low - 1, head)):
                high += 1
            else:
                low -= 1
        taken = self._by_length[low:high]
        for item in taken:
            self._remove(item)
        return taken

    def check_invariants(self) -> None:
        """Assert that both orders hold the same inputs, correctly sorted. Only tests call it."""
        assert sorted(self._items) == sorted(item.number for item in self._by_length)
        assert self._by_length == sorted(self._by_length, key=_length_key)
        assert self.num_tokens == sum(item.length for item in self._by_length)
        assert set(self._items) <= {key.number for key in self._order}

    def _fits(self, low: int, high: int, max_tokens: int) -> bool:
        """Return whether the inputs at positions `low` to `high` (exclusive) in the order of lengths can be computed in
        one pass: they have similar lengths, and at most `max_tokens` tokens with padding."""
        if low < 0 or high > len(self._by_length):
            return False
        # The range is sorted, so its ends are its shortest and its longest input.
        first, last = self._by_length[low], self._by_length[high - 1]
        shortest, longest = first.length, last.length
        if first.has_images != last.has_images:
            return False
        is_alike = longest - shortest <= NEGLIGIBLE_TOKENS or shortest >= MIN_FILL_RATIO * longest
        return is_alike and (high - low) * longest <= max_tokens

    def _distance(self, position: int, head: QueuedInput) -> int:
        """Return by how many tokens the input at `position` in the order of lengths is longer or shorter than
        `head`."""
        return abs(self._by_length[position].length - head.length)

    def _position(self, item: QueuedInput) -> int:
        """Return the position of a queued input in the order of lengths."""
        return bisect_left(self._by_length, _length_key(item), key=_length_key)

    def _remove(self, item: QueuedInput) -> None:
        del self._items[item.number]
        del self._by_length[self._position(item)]
        self.num_tokens -= item.length


def _length_key(item: QueuedInput) -> tuple[bool, int, int]:
    """Return the key by which inputs are sorted: those without images first, and each kind by length. It contains the
    input's number, so that no two keys are equal."""
    return item.has_images, item.length, item.number
