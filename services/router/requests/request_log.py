"""What is told of flights that have ended: metrics, the list of the last ones, and a line of the log each.

They are told of a few at a time, a moment later, and before anybody reads: what follows itself takes half the time of
what follows other work, and no answer waits for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from baton_serve.services.common.callbacks import call_each
from baton_serve.services.common.logs import log_past
from baton_serve.services.router.requests.lifecycle import Flight
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.recent_requests import RecentRequest, RecentRequests
from baton_serve.services.router.requests.request_log_line import ended_line

logger = logging.getLogger(__name__)

_TOGETHER = 16
"""More would hold up the streams that run for more than half a millisecond."""
_WITHIN_S = 0.05


class Endings:
    def __init__(self, metrics: RouterMetrics, *, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._untold: list[Flight] = []
        self._next: asyncio.Handle | None = None
        self._is_soon = False
        self._recent = RecentRequests()

    def add(self, flight: Flight) -> None:
        self._untold.append(flight)
        if self._next is None or (len(self._untold) >= _TOGETHER and not self._is_soon):
            self._plan()

    def recent(self) -> Sequence[tuple[float, RecentRequest]]:
        """The last ones, newest first, each with the moment of its end."""
        self.tell()
        return self._recent.all()

    def tell(self) -> None:
        """Of all that have ended until now."""
        flights, self._untold = self._untold, []
        self._plan()
        self._tell(flights)

    def _plan(self) -> None:
        if self._next is not None:
            self._next.cancel()
        loop, num_untold = asyncio.get_running_loop(), len(self._untold)
        self._is_soon = num_untold >= _TOGETHER
        if self._is_soon:
            self._next = loop.call_soon(self._tell_some)
        else:
            self._next = loop.call_later(_WITHIN_S, self._tell_some) if num_untold else None

    def _tell_some(self) -> None:
        """The rest in other turns of the loop: hundreds may end at once."""
        flights, self._untold = self._untold[:_TOGETHER], self._untold[_TOGETHER:]
        self._plan()
        self._tell(flights)

    def _tell(self, flights: Sequence[Flight]) -> None:
        call_each("a request's record", [partial(self._record, flight) for flight in flights])
        if logger.isEnabledFor(logging.INFO):
            now = self._clock()
            since_1970 = time.time() - now
            for flight in flights:
                log_past(logger, "request ended", ended_line(flight), at=since_1970 + (flight.timeline.ended_at or now))

    def _record(self, flight: Flight) -> None:
        self._metrics.ended(flight)
        self._recent.add(flight.job.request_id, len(flight.job.token_ids), flight.num_generated, flight.timeline)
