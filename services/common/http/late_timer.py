"""A timer for deadlines that are moved with each request, almost always to a later time, and that rarely expire."""

import asyncio
from collections.abc import Callable


class LateTimer:
    """A timer with one callback, for deadlines that are often moved to a later time. Moving one costs only an
    assignment: the event loop's own timer is not changed, and is set again when it expires too early.
    """

    __slots__ = ("_at", "_handle", "_loop", "_then")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._at: float | None = None
        self._then: Callable[[], object] | None = None
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._at is not None

    def set(self, at: float, then: Callable[[], object]) -> None:
        """Call `then` once at the time `at` (of the event loop's clock, in seconds). This replaces an
        earlier setting.
        """
        self._at, self._then = at, then
        if self._handle is not None:
            # The loop's timer comes first, and `_check` then sets it to the new time.
            if self._handle.when() <= at:
                return
            self._handle.cancel()
        self._handle = self._loop.call_at(at, self._check)

    def clear(self) -> None:
        """Remove the setting, so that nothing is called. The event loop's own timer may still expire once, without
        effect.
        """
        self._at = self._then = None

    def close(self) -> None:
        """Forget the set time and its callback, and cancel the event loop's own timer."""
        self.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _check(self) -> None:
        self._handle = None
        if self._at is None:
            return
        if self._at > self._loop.time():
            self._handle = self._loop.call_at(self._at, self._check)
            return
        then = self._then
        self.clear()
        if then is not None:
            then()
