"""The share of the time, of late, in which an instance had prompts to compute. Pure: `now` is passed in.

Of a client that sends its next prompt when the last one is answered, none waits for the other: what prompts find when
they come counts instead where that is far less.
"""

from dataclasses import dataclass
from math import exp

RECENT_S = 100.0
"""What was so long ago counts a third."""
ASSUMED_S = 5.0
"""For so long every instance is taken to have been idle before it was first seen: a router that starts beside busy
instances should soon know."""
CREDIBLE = 4.0
"""So many prompts of late say as much of what prompts find as the time does."""
BY_CHANCE = 0.5
"""Prompts that know nothing of each other find an instance busy about as often as it is: more often than this part."""


@dataclass(slots=True)
class BusyShare:
    _busy: float = 0.0
    _known: float = 1.0 - exp(-ASSUMED_S / RECENT_S)
    """Both are sums over the past, faded."""
    _found_busy: float = 0.0
    _came: float = 0.0
    """Prompts, faded likewise."""
    _is_busy: bool = False
    _seen_at: float | None = None

    def observe(self, is_busy: bool, now: float) -> None:
        """From now on, until it is told otherwise."""
        self._pass(now)
        self._is_busy = is_busy

    def value(self, now: float) -> float:
        """In [0, 1]. Of the time, or as prompts found it, where they hardly ever came while it was busy."""
        self._pass(now)
        of_time = self._busy / self._known
        found = (self._found_busy + CREDIBLE * of_time) / (self._came + CREDIBLE)
        return found if found < BY_CHANCE * of_time else of_time

    def found(self, is_busy: bool, now: float) -> None:
        """By a prompt that came."""
        self._pass(now)
        self._came += 1.0
        self._found_busy += is_busy

    def _pass(self, now: float) -> None:
        if self._seen_at is not None and now > self._seen_at:
            fading = exp((self._seen_at - now) / RECENT_S)
            self._known = self._known * fading + (1.0 - fading)
            self._busy = self._busy * fading + (1.0 - fading) * self._is_busy
            self._came *= fading
            self._found_busy *= fading
        self._seen_at = now
