"""By how much prompts that two instances read take longer than `joint` predicts. Pure: `now` is passed in.

What a part waits for its first blocks differs from host to host and from transport to transport, and nobody tells it.
"""

from collections import deque
from statistics import median

RECENT = 16
"""Prompts that are remembered of an instance that reads behind others."""
FEW = 3
"""Of fewer nothing is concluded: one prompt may have waited for anything."""
FORGOTTEN_S = 300.0
"""What was so long ago counts no more, lest two never read again because of one bad minute."""
MOST = 3.0


class Lateness:
    __slots__ = ("_recent",)

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def observe(self, times: float, now: float) -> None:
        """A prompt took so many times as long as predicted."""
        self._recent.append((now, times))

    def value(self, now: float) -> float:
        """How many times as long as predicted the next one is expected to take, in [1, `MOST`]."""
        late = [times for at, times in self._recent if now - at < FORGOTTEN_S]
        return min(MOST, max(1.0, median(late))) if len(late) >= FEW else 1.0
