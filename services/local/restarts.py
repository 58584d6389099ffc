"""When a process that died is started again, and when it is given up. No clock: times are passed in."""

from dataclasses import dataclass

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 15.0
FAST_DEATHS = 5
"""So many deaths in a row, each soon after its start, and the process is given up."""
LONG_LIFE_S = 20.0


@dataclass(slots=True)
class Restarts:
    fast_deaths: int = 0

    def died(self, *, lived_s: float) -> float | None:
        """The delay before the next start; None: give it up."""
        self.fast_deaths = 1 if lived_s >= LONG_LIFE_S else self.fast_deaths + 1
        if self.fast_deaths >= FAST_DEATHS:
            return None
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * float(2 ** (self.fast_deaths - 1)))
