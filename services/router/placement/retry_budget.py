"""How many requests may be tried again because instances refused or failed: a share of all, so that an overload is not
multiplied by its own retries. Losing an instance is not counted: its streams go on elsewhere, whatever it costs.
"""

from dataclasses import dataclass

AT_LEAST_PER_S = 5.0
_MOST = 100.0


@dataclass(slots=True)
class RetryBudget:
    """A bucket: each request puts `ratio` in, time puts a little in, each retry takes 1 out."""

    ratio: float
    _tokens: float = _MOST
    _at: float = 0.0

    def request(self) -> None:
        self._tokens = min(_MOST, self._tokens + self.ratio)

    def allows_retry(self, now: float) -> bool:
        """Takes from the budget. Without a ratio nothing is ever tried again."""
        if self.ratio <= 0:
            return False
        self._tokens = min(_MOST, self._tokens + max(0.0, now - self._at) * AT_LEAST_PER_S)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
