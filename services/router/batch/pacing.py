"""Decide when the next line of a batch is sent, and how many may run beside the requests of clients."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

LINES_PER_INSTANCE = 16
"""Requests of batches per instance while no client has waited for an answer for some seconds."""
QUIET_S = 1.0
"""Time in seconds without a client's request after which one more request of a batch per instance runs. The number
doubles with each further such time, so that a client that returns after a pause does not meet many of them."""
MAX_HOLD_S = 1.0
"""Longest time in seconds between two new requests of batches while clients wait for their first tokens."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """The number of clients' requests in this router process at one moment. Requests of batches are not counted."""

    num_instances: int
    """Number of instances that are ready."""
    num_generating: int
    """Number of them that are decode or unified instances."""
    num_running: int
    """Number of clients' requests that run now."""
    num_waiting: int
    """Number of clients' prompts without a first token."""
    num_started: int
    """Number of clients' requests since the start of the process. It also counts requests between two looks."""


def batch_concurrency(max_concurrency: int, max_concurrent_requests: int) -> int:
    """Return how many requests of batches may run at once in this process: `--batch-max-concurrency`, but at most half
    of the router's `--max-concurrent-requests`.

    A batch must not use up the limit at which requests of clients are refused.
    """
    return max(1, min(max_concurrency, max_concurrent_requests // 2))


def max_lines(load: RouterLoad, *, quiet_s: float, most: int) -> int:
    """Return how many requests of batches may run now, at most `most`. `quiet_s` is the time in seconds since a
    client's request last ran.

    The number is at least one while an instance is ready: a batch must end although clients never pause.
    """
    # Without an instance each request would only wait, fail with status 503 and be tried again.
    if not load.num_instances:
        return 0
    # Each line beside clients lengthens the decode steps of all streams of its instance.
    if quiet_s < QUIET_S:
        return min(most, max(1, load.num_generating))
    per_instance = min(LINES_PER_INSTANCE, 1 << int(min(quiet_s / QUIET_S, 10.0)))
    return min(most, per_instance * load.num_instances)


def may_start(load: RouterLoad, *, num_running: int, quiet_s: float, held_s: float, most: int) -> bool:
    """Return whether one more request of a batch may start while `num_running` others run, of at most `most`.

    `held_s` is the time in seconds since the last one started. While clients wait for first tokens, one starts each
    `MAX_HOLD_S`.
    """
    if load.num_waiting and held_s < MAX_HOLD_S:
        return False
    return num_running < max_lines(load, quiet_s=quiet_s, most=most)


class LineGate:
    """Decides when requests of this process's batches may start: each waits here until `may_start` allows it. Use it on
    the event loop only.

    The next request to start belongs to the owner with the fewest running requests among the owners that wait, however
    many batches and requests each has.
    """

    def __init__(
        self, load: Callable[[], RouterLoad], *, most: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the gate. At most `most` requests run at a time; `load` returns the present load of clients for each
        decision.
        """
        self._load = load
        self._most = most
        self._clock = clock
        # As long ago as it takes to allow all of them: a batch that finds no client starts at once.
        self._busy_at = clock() - QUIET_S * LINES_PER_INSTANCE
        self._started_at = self._busy_at
        self._num_started = 0
        self._changed = asyncio.Event()
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        """The number of requests of batches that run now."""
        return self._running.total()

    async def enter(self, stop: asyncio.Event, owner: str = "") -> bool:
        """Wait until one more request of a batch of `owner` may run, and count it as running. Return False, without
        counting, once `stop` is set.
        """
        self._waiting[owner] += 1
        try:
            while not stop.is_set():
                if self._is_open() and self._is_next(owner):
                    self._running[owner] += 1
                    self._started_at = self._clock()
                    return True
                self._changed.clear()
                try:
                    # The load of clients changes without an event, so it is looked at again soon.
                    async with asyncio.timeout(_POLL_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue
            return False
        finally:
            self._waiting[owner] -= 1
            # An owner that waits no more must not keep others waiting.
            self._changed.set()

    def leave(self, owner: str = "") -> None:
        """Stop counting a request of `owner` as running."""
        self._running[owner] -= 1
        self._changed.set()

    def _is_next(self, owner: str) -> bool:
        """Return whether this owner has no more running requests than any other owner that waits."""
        waiting = [other for other, number in self._waiting.items() if number > 0]
        return all(self._running[owner] <= self._running[other] for other in waiting)

    def _is_open(self) -> bool:
        load, now = self._load(), self._clock()
        # A short request may begin and end between two looks; only the counter shows it.
        if load.num_running or load.num_started != self._num_started:
            self._busy_at, self._num_started = now, load.num_started
        return may_start(
            load,
            num_running=self.num_running,
            quiet_s=now - self._busy_at,
            held_s=now - self._started_at,
            most=self._most,
        )
