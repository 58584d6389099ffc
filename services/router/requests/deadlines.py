"""When flights have taken too long: one timer for all, since hardly one of them ever meets its deadline."""

import asyncio
from collections.abc import Callable, Collection

from baton_serve.services.common.callbacks import call_each
from baton_serve.services.router.requests.lifecycle import Flight


class Deadlines:
    def __init__(self, flights: Collection[Flight], *, clock: Callable[[], float]) -> None:
        """`flights` are those that run, now and at any later time."""
        self._flights = flights
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0

    def watch(self, flight: Flight) -> None:
        """One of `flights`, from now on."""
        if self._timer is None or flight.deadline < self._at:
            self._set(flight.deadline)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, at: float) -> None:
        self.close()
        self._at = at
        self._timer = asyncio.get_running_loop().call_later(at - self._clock(), self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._clock()
        call_each("a request", [flight.expire for flight in self._flights if flight.deadline <= now])
        if self._flights:
            self._set(min(flight.deadline for flight in self._flights))
