"""A timer that is moved with each request, nearly always to a later time, and almost never ends."""

import asyncio
from collections.abc import Callable


class LateTimer:
    """Calls one function at one time. Moving it to a later time costs an assignment: the loop's own timer stays where
    it is, and looks again when it ends."""

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
        """Call `then` at the loop's time `at`, and nothing that was set before."""
        self._at, self._then = at, then
        if self._handle is not None:
            if self._handle.when() <= at:
                return
            self._handle.cancel()
        self._handle = self._loop.call_at(at, self._look)

    def clear(self) -> None:
        self._at = self._then = None

    def close(self) -> None:
        """Clear it and give the loop's timer back."""
        self.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _look(self) -> None:
        self._handle = None
        if self._at is None:
            return
        if self._at > self._loop.time():
            self._handle = self._loop.call_at(self._at, self._look)
            return
        then = self._then
        self.clear()
        if then is not None:
            then()
