"""Keeps work away from an instance that fails again and again: a circuit breaker. Pure: `now` is passed in.

Open after `FAILURES` failures in a row; after a pause, longer each time, one request may try again, and its success
closes it.
"""

from dataclasses import dataclass
from typing import Literal

FAILURES = 5
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

State = Literal["closed", "open", "half_open"]


@dataclass(slots=True)
class Circuit:
    failures: int = 0
    _pause_s: float = 0.0
    _open_until: float = 0.0
    _is_trying: bool = False

    def state(self, now: float) -> State:
        if self.failures < FAILURES:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def allows(self, now: float) -> bool:
        """Half open, only until somebody tries."""
        if self.failures < FAILURES:
            return True
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self._is_trying)

    def tries(self, now: float) -> None:
        """A request is sent there."""
        self._is_trying = self.state(now) == "half_open"

    def succeeded(self) -> None:
        self.failures, self._pause_s, self._is_trying = 0, 0.0, False

    def failed(self, now: float) -> None:
        self.failures += 1
        self._is_trying = False
        if self.failures >= FAILURES:
            self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2.0 * self._pause_s))
            self._open_until = now + self._pause_s

    def given_up(self) -> None:
        """The request that tried ended without telling anything."""
        self._is_trying = False
