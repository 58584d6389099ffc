"""When flights have taken too long: one timer for all, since hardly one of them ever meets its deadline."""

import asyncio
from collections.abc import Callable, Collection

from baton_serve.services.common.callbacks import call_each
from baton_serve.services.router.requests.lifecycle import RequestLifecycle


class Deadlines:
    def __init__(self, lifecycles: Collection[RequestLifecycle], *, clock: Callable[[], float]) -> None:
        """`lifecycles` are those that run, now and at any later time."""
        self._lifecycles = lifecycles
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0

    def watch(self, lifecycle: RequestLifecycle) -> None:
        """One of `lifecycles`, from now on."""
        if self._timer is None or lifecycle.deadline < self._at:
            self._set(lifecycle.deadline)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, at: float) -> None:
        self.close()
        self._at = at
        self._timer = asyncio.get_running_loop().call_later(at - self._clock(), self._expire_due)

    def _expire_due(self) -> None:
        self._timer = None
        now = self._clock()
        call_each("a request", [lifecycle.expire for lifecycle in self._lifecycles if lifecycle.deadline <= now])
        if self._lifecycles:
            self._set(min(lifecycle.deadline for lifecycle in self._lifecycles))
