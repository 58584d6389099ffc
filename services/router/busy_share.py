"""The share of the time, of late, in which an instance had prompts to compute. Pure: `now` is passed in."""

from dataclasses import dataclass
from math import exp

RECENT_S = 100.0
"""What was so long ago counts a third."""
ASSUMED_S = 5.0
"""For so long every instance is taken to have been idle before it was first seen: a router that starts beside busy
instances should soon know."""


@dataclass(slots=True)
class BusyShare:
    _busy: float = 0.0
    _known: float = 1.0 - exp(-ASSUMED_S / RECENT_S)
    """Both are sums over the past, faded."""
    _is_busy: bool = False
    _seen_at: float | None = None

    def observe(self, is_busy: bool, now: float) -> None:
        """From now on, until it is told otherwise."""
        self._pass(now)
        self._is_busy = is_busy

    def value(self, now: float) -> float:
        """In [0, 1]."""
        self._pass(now)
        return self._busy / self._known

    def _pass(self, now: float) -> None:
        if self._seen_at is not None and now > self._seen_at:
            fading = exp((self._seen_at - now) / RECENT_S)
            self._known = self._known * fading + (1.0 - fading)
            self._busy = self._busy * fading + (1.0 - fading) * self._is_busy
        self._seen_at = now
