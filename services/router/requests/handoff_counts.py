"""Counts handoffs that were due and completed, and decides when an unused prefill pool is warned of.

If prefill and decode instances cannot exchange blocks, decode instances compute the prompts themselves, and clients see
only a longer latency. `/health` and the alert BatonNoHandoffs therefore compare handoffs that were due with completed
ones. A request too short for disaggregation is not due, nor is one that was predicted to be faster on one instance.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from baton_serve.services.router.requests.metrics import RouterMetrics

WINDOW_S = 60
"""Length of the window of the counts in `/health`, in seconds."""


class HandoffStats(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of KV handoffs of one model in the last minute, as `/health` shows them."""

    due_last_minute: int = 0
    """Placements that needed a KV handoff, or would have needed one that no two instances can do."""
    completed_last_minute: int = 0
    stalled_s: float = 0.0
    """Seconds since the first due handoff after the last completed one; 0 if none was due in the last minute."""

    @property
    def warning(self) -> str | None:
        """A text for the operator if handoffs were needed for a minute but none was completed, or else None."""
        # A single handoff may take long, for example behind a queue of prompts: only a whole minute says something.
        if self.completed_last_minute or not self.due_last_minute or self.stalled_s < WINDOW_S:
            return None
        return (
            f"no KV handoff was completed in the last {self.stalled_s:.0f} s, though {self.due_last_minute} were due "
            "in the last minute: look for 'no KV handoff is possible' in the log of the router, and for failed "
            "handoffs in those of the decode instances"
        )


def joined(processes: Iterable[Mapping[str, HandoffStats]]) -> dict[str, HandoffStats]:
    """Return the numbers of handoffs of several router processes added up, by name of the model."""
    # Models are never added up: one whose handoffs work would hide another whose handoffs do not.
    models: dict[str, list[HandoffStats]] = {}
    for process in processes:
        for model, stats in process.items():
            models.setdefault(model, []).append(stats)
    return {model: _joined(found) for model, found in models.items()}


def warning_of(handoffs: Mapping[str, HandoffStats]) -> str | None:
    """Return the warnings about handoffs of all models as one text, or None for no warning. `handoffs` is by model
    name.
    """
    return "; ".join(f"model {model}: {one.warning}" for model, one in handoffs.items() if one.warning) or None


def _joined(found: Sequence[HandoffStats]) -> HandoffStats:
    return HandoffStats(
        due_last_minute=sum(one.due_last_minute for one in found),
        completed_last_minute=sum(one.completed_last_minute for one in found),
        stalled_s=max(one.stalled_s for one in found),
    )


class HandoffCounts:
    """Counts for one model how many requests needed a KV handoff and how many handoffs were completed, in one router
    process.

    Its dispatcher owns it. Use it on the event loop only.
    """

    def __init__(self, metrics: RouterMetrics, *, clock: Callable[[], float]) -> None:
        """Start with zero handoffs. `clock` is the router's monotonic clock; the totals since the start also go to
        `metrics`.
        """
        self._metrics = metrics
        self._clock = clock
        self._due = _WindowCount()
        self._completed = _WindowCount()
        self._stalled_since: float | None = None

    def add_due(self) -> None:
        """Count a request whose placement needs a KV handoff."""
        now = self._clock()
        # After a minute without requests a new one begins a new stall: an idle cluster is not a broken one.
        if self._stalled_since is None or not self._due.value(now):
            self._stalled_since = now
        self._due.add(now)
        self._metrics.handoff_due()

    def add_completed(self) -> None:
        """Count a KV handoff whose blocks have all arrived."""
        self._completed.add(self._clock())
        self._stalled_since = None
        self._metrics.handoff_completed()

    def stats(self) -> HandoffStats:
        """Return the numbers of handoffs in the last minute."""
        now = self._clock()
        due = self._due.value(now)
        return HandoffStats(
            due_last_minute=due,
            completed_last_minute=self._completed.value(now),
            stalled_s=now - self._stalled_since if due and self._stalled_since is not None else 0.0,
        )


class _WindowCount:
    """Counts events of the last `WINDOW_S` seconds, with a resolution of one second."""

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()
        """Pairs of second and number of events, oldest first: at most `WINDOW_S` + 1 of them."""

    def add(self, now: float) -> None:
        second = int(now)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1][1] += 1
            return
        self._expire(now)
        self._seconds.append([second, 1])

    def value(self, now: float) -> int:
        """Return the number of events in the last `WINDOW_S` seconds before `now`."""
        self._expire(now)
        return sum(count for _, count in self._seconds)

    def _expire(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            self._seconds.popleft()
