"""Decides whose grammar is compiled next, and how many may wait. Callers that wait for one take turns, and share the
places of the queue.
"""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass

from baton_serve.services.router.protocol.errors import RateLimitError


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits for grammars that are compiled: `max_running` at a time, and `max_waiting` more in the queue."""

    max_running: int = 2
    max_waiting: int = 32


class FairSlots:
    """Limits how many grammars are compiled at a time: each needs a slot, and the callers (owners of API keys) get
    slots in turn. Use it from one event loop at a time.

    A caller that sends many slow grammars thereby delays its own grammars, and those of others by at most one turn. In
    a full queue a new grammar takes the place of the newest one of the caller with the most waiting grammars.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._num_running = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """The waiting grammars of each caller that has any, in the order of the callers' turns."""

    @property
    def num_waiting(self) -> int:
        """The number of grammars that wait for a slot."""
        return sum(map(len, self._waiting.values()))

    async def acquire(self, caller: str) -> None:
        """Wait until a grammar of `caller` gets a slot, which must be given back with `release`.

        Raises `RateLimitError` if the queue is full, also later if a caller with fewer grammars needs the place in the
        queue.
        """
        if self._num_running < self._limits.max_running:
            self._num_running += 1
            return
        if self.num_waiting >= self._limits.max_waiting:
            self._make_room(caller)
        slot = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(slot)
        try:
            # `release` transfers the slot of another grammar, so `_num_running` does not change.
            await slot
        except asyncio.CancelledError:
            # The slot may have been transferred just before the cancellation: then the next one must get it.
            if slot.done() and not slot.cancelled() and slot.exception() is None:
                self.release()
            self._remove(caller, slot)
            raise

    def release(self) -> None:
        """Give a slot back. The next waiting grammar gets it: one of the caller whose last turn was longest ago."""
        while self._waiting:
            caller, slots = next(iter(self._waiting.items()))
            slot = slots.popleft()
            self._waiting.move_to_end(caller)
            if not slots:
                del self._waiting[caller]
            if not slot.done():
                slot.set_result(None)
                return
        self._num_running -= 1

    def _make_room(self, caller: str) -> None:
        """Remove the newest grammar of the caller that has the most waiting ones from the full queue; its `acquire`
        raises.

        Raises `RateLimitError` if `caller` would then not have fewer waiting grammars than that other caller.
        """
        error = RateLimitError(
            f"{self.num_waiting} other grammars and schemas wait to be compiled: try again later", retry_after_s=1.0
        )
        most = max(self._waiting, key=lambda one: len(self._waiting[one]), default=caller)
        if len(self._waiting.get(most, ())) <= len(self._waiting.get(caller, ())) + 1:
            raise error
        slot = self._waiting[most].pop()
        if not slot.done():
            slot.set_exception(error)

    def _remove(self, caller: str, slot: "asyncio.Future[None]") -> None:
        slots = self._waiting.get(caller, deque())
        if slot in slots:
            slots.remove(slot)
            if not slots:
                del self._waiting[caller]
