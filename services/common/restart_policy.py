"""When a process that died is started again, and when it is given up. No clock: times are passed in.

A process that has once become ready has a configuration that works. What ends it later may come from clients, from its
machine or from a bug; it is started again, with delays that grow, for as long as its supervisor runs. Only a process
that has never become ready is given up: its configuration is wrong, and a further start would fail as well.
"""

from dataclasses import dataclass

MIN_DELAY_S = 0.5
MAX_DELAY_S = 15.0
MAX_FAILED_STARTS = 5
"""A process that has never become ready is given up after this many short lives in a row."""
STABLE_LIFE_S = 20.0


@dataclass(slots=True)
class RestartPolicy:
    """Of one process, over all its lives. `has_served`: it has become ready in one of them."""

    short_lives: int = 0
    failed_starts: int = 0
    has_served: bool = False

    def next_delay_s(self, *, lived_s: float, has_served: bool) -> float | None:
        """Return the delay before the next start, in seconds, or None to give the process up. `has_served`: it became
        ready in the life that has ended."""
        self.has_served = self.has_served or has_served
        self.short_lives = 1 if lived_s >= STABLE_LIFE_S else self.short_lives + 1
        self.failed_starts = 0 if lived_s >= STABLE_LIFE_S else self.failed_starts + 1
        if self.failed_starts >= MAX_FAILED_STARTS and not self.has_served:
            return None
        return float(min(MAX_DELAY_S, MIN_DELAY_S * 2 ** min(self.short_lives - 1, 10)))
