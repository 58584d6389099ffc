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
from baton_serve.services.common.logs import log_at
from baton_serve.services.router.requests.lifecycle import RequestLifecycle
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.requests.recent_requests import RecentRequest, RecentRequests
from baton_serve.services.router.requests.request_log_line import log_fields

logger = logging.getLogger(__name__)

_MAX_BATCH_REQUESTS = 16
"""More would hold up the streams that run for more than half a millisecond."""
_MAX_DELAY_S = 0.05


class RequestLog:
    def __init__(self, metrics: RouterMetrics, *, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._unlogged: list[RequestLifecycle] = []
        self._next: asyncio.Handle | None = None
        self._is_soon = False
        self._recent = RecentRequests()

    def add(self, lifecycle: RequestLifecycle) -> None:
        self._unlogged.append(lifecycle)
        if self._next is None or (len(self._unlogged) >= _MAX_BATCH_REQUESTS and not self._is_soon):
            self._schedule()

    def recent(self) -> Sequence[tuple[float, RecentRequest]]:
        """The last ones, newest first, each with the moment of its end."""
        self.flush()
        return self._recent.all()

    def flush(self) -> None:
        """Of all that have ended until now."""
        lifecycles, self._unlogged = self._unlogged, []
        self._schedule()
        self._log(lifecycles)

    def _schedule(self) -> None:
        if self._next is not None:
            self._next.cancel()
        loop, num_unlogged = asyncio.get_running_loop(), len(self._unlogged)
        self._is_soon = num_unlogged >= _MAX_BATCH_REQUESTS
        if self._is_soon:
            self._next = loop.call_soon(self._flush_some)
        else:
            self._next = loop.call_later(_MAX_DELAY_S, self._flush_some) if num_unlogged else None

    def _flush_some(self) -> None:
        """The rest in other turns of the loop: hundreds may end at once."""
        lifecycles, self._unlogged = self._unlogged[:_MAX_BATCH_REQUESTS], self._unlogged[_MAX_BATCH_REQUESTS:]
        self._schedule()
        self._log(lifecycles)

    def _log(self, lifecycles: Sequence[RequestLifecycle]) -> None:
        call_each("a request's record", [partial(self._record, lifecycle) for lifecycle in lifecycles])
        if logger.isEnabledFor(logging.INFO):
            now = self._clock()
            since_1970 = time.time() - now
            for lifecycle in lifecycles:
                log_at(
                    logger, "request ended", log_fields(lifecycle), at=since_1970 + (lifecycle.timeline.ended_at or now)
                )

    def _record(self, lifecycle: RequestLifecycle) -> None:
        self._metrics.ended(lifecycle)
        self._recent.add(
            lifecycle.request.request_id, len(lifecycle.request.token_ids), lifecycle.num_generated, lifecycle.timeline
        )
