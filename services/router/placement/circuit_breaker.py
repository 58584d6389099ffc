"""Keeps work away from an instance that fails again and again: a circuit breaker. Pure: `now` is passed in.

Open after `FAILURE_THRESHOLD` failures in a row; after a pause, longer each time, one request may try again, and its
success closes it.
"""

from dataclasses import dataclass
from typing import Literal

MIN_RETRIES_PER_S = 5.0
_MAX_RETRIES = 100.0


@dataclass(slots=True)
class RetryBudget:
    """A bucket: each request puts `ratio` in, time puts a little in, each retry takes 1 out."""

    ratio: float
    _tokens: float = _MAX_RETRIES
    _at: float = 0.0

    def record_request(self) -> None:
        self._tokens = min(_MAX_RETRIES, self._tokens + self.ratio)

    def take_retry(self, now: float) -> bool:
        """Takes from the budget. Without a ratio nothing is ever tried again."""
        if self.ratio <= 0:
            return False
        self._tokens = min(_MAX_RETRIES, self._tokens + max(0.0, now - self._at) * MIN_RETRIES_PER_S)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


FAILURE_THRESHOLD = 5
MIN_OPEN_S = 1.0
MAX_OPEN_S = 60.0

CircuitState = Literal["closed", "open", "half_open"]


@dataclass(slots=True)
class CircuitBreaker:
    failures: int = 0
    _pause_s: float = 0.0
    _open_until: float = 0.0
    _is_probing: bool = False

    def state(self, now: float) -> CircuitState:
        if self.failures < FAILURE_THRESHOLD:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def allows(self, now: float) -> bool:
        """Half open, only until somebody tries."""
        if self.failures < FAILURE_THRESHOLD:
            return True
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self._is_probing)

    def begin_attempt(self, now: float) -> None:
        """A request is sent there."""
        self._is_probing = self.state(now) == "half_open"

    def succeeded(self) -> None:
        self.failures, self._pause_s, self._is_probing = 0, 0.0, False

    def failed(self, now: float) -> None:
        self.failures += 1
        self._is_probing = False
        if self.failures >= FAILURE_THRESHOLD:
            self._pause_s = min(MAX_OPEN_S, max(MIN_OPEN_S, 2.0 * self._pause_s))
            self._open_until = now + self._pause_s

    def abandon_attempt(self) -> None:
        """The request that tried ended without telling anything."""
        self._is_probing = False
