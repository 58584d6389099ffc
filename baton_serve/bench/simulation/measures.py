"""Distributions of times: means and percentiles of weighted values."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


class Distribution:
    """Weighted values, rounded to three digits, so that millions of inter-token gaps take little memory. The mean is
    exact."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._weights: dict[float, float] = {}
        self._sum = 0.0
        for value in values:
            self.add(value)

    def add(self, value: float, weight: float = 1.0) -> None:
        rounded = float(f"{value:.3g}")
        self._weights[rounded] = self._weights.get(rounded, 0.0) + weight
        self._sum += value * weight

    @property
    def weight(self) -> float:
        return sum(self._weights.values())

    @property
    def mean(self) -> float:
        weight = self.weight
        return self._sum / weight if weight else 0.0

    def percentile(self, percent: float) -> float:
        """Return the smallest value that at least `percent` of the weight does not exceed; 0 without any values."""
        values = sorted(self._weights)
        if not values:
            return 0.0
        reached = list(accumulate(self._weights[value] for value in values))
        return values[min(len(values) - 1, bisect_left(reached, reached[-1] * percent / 100))]


class Gaps:
    """Seconds between tokens: `all` of them and, with `each`, also those of each request, for a per-request ITL
    target."""

    def __init__(self, *, each: bool = False) -> None:
        self.all = Distribution()
        self._first: dict[str, float] | None = {} if each else None
        """First gap of each request, kept apart until it is known how long the router held back the first token; None
        without `each`."""
        self._later: dict[str, Distribution] = {}

    def add_first(self, attempt_id: str, seconds: float) -> None:
        """Add the gap before the first token that an instance generates after a sequence has joined its batch."""
        self.all.add(seconds)
        if self._first is None:
            return
        request_id = _request_of(attempt_id)
        # A later attempt (replay): its gap is an ordinary one.
        if request_id in self._first:
            self._of(request_id).add(seconds)
        else:
            self._first[request_id] = seconds

    def add(self, attempt_ids: Sequence[str], seconds: float, times: int = 1) -> None:
        """Add `times` gaps of equal length for each of these attempts."""
        if not attempt_ids or not times:
            return
        self.all.add(seconds, len(attempt_ids) * times)
        if self._first is not None:
            for attempt_id in attempt_ids:
                self._of(_request_of(attempt_id)).add(seconds, times)

    def percentile(self, request_id: str, percent: float, *, held_s: float) -> float | None:
        """Return a percentile of one request's gaps and forget them: call it once. Its first gap is reduced by
        `held_s`, the time for which the router held back the first token. Return None if the request has no gaps or
        they were not kept."""
        if self._first is not None and request_id in self._first:
            self._of(request_id).add(max(0.0, self._first.pop(request_id) - held_s))
        its = self._later.pop(request_id, None)
        return its.percentile(percent) if its is not None else None

    def _of(self, request_id: str) -> Distribution:
        return self._later.setdefault(request_id, Distribution())


def _request_of(attempt_id: str) -> str:
    """Return the request ID of an attempt ID, which is the request ID with a number."""
    return attempt_id.partition("~")[0]
