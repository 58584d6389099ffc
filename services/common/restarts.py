"""When a process that died is started again, and when it is given up. No clock: times are passed in."""

from dataclasses import dataclass

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 15.0
FAILED_STARTS = 5
"""So many lives in a row that ended before the process served, and it is given up."""
LONG_LIFE_S = 20.0


@dataclass(slots=True)
class Restarts:
    """Delays grow while lives are short. Who has served is never given up: what ended it may have come from outside."""

    short_lives: int = 0
    failed_starts: int = 0

    def died(self, *, lived_s: float, has_served: bool) -> float | None:
        """The delay before the next start; None: give it up."""
        self.short_lives = 1 if lived_s >= LONG_LIFE_S else self.short_lives + 1
        self.failed_starts = 0 if has_served or lived_s >= LONG_LIFE_S else self.failed_starts + 1
        if self.failed_starts >= FAILED_STARTS:
            return None
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * float(2 ** (self.short_lives - 1)))
