"""How many requests may be tried again because instances refused or failed: a share of all, so that an overload is not
multiplied by its own retries. Losing an instance is not counted: its streams go on elsewhere, whatever it costs.
"""

from dataclasses import dataclass

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
