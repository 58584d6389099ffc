"""Distributions of times: means and percentiles of values that carry weights."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


class Distribution:
    """Values are kept to three digits, so that millions of gaps between tokens take little memory."""

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
        """The least value that at least `percent` of the weight does not exceed; 0 if there is none."""
        values = sorted(self._weights)
        if not values:
            return 0.0
        reached = list(accumulate(self._weights[value] for value in values))
        return values[min(len(values) - 1, bisect_left(reached, reached[-1] * percent / 100))]


class Gaps:
    """Seconds between tokens: `all` of them and, with `each`, those of every request, for objectives of its own."""

    def __init__(self, *, each: bool = False) -> None:
        self.all = Distribution()
        self._first: dict[str, float] | None = {} if each else None
        self._later: dict[str, Distribution] = {}

    def add_first(self, attempt_id: str, seconds: float) -> None:
        """Before the first token that a stream writes where it goes on."""
        self.all.add(seconds)
        if self._first is None:
            return
        request_id = _request_of(attempt_id)
        if request_id in self._first:
            self._of(request_id).add(seconds)
        else:
            self._first[request_id] = seconds

    def add(self, attempt_ids: Sequence[str], seconds: float, times: int = 1) -> None:
        """So many gaps of each of these, all as long."""
        if not attempt_ids or not times:
            return
        self.all.add(seconds, len(attempt_ids) * times)
        if self._first is not None:
            for attempt_id in attempt_ids:
                self._of(_request_of(attempt_id)).add(seconds, times)

    def percentile(self, request_id: str, percent: float, *, held_s: float) -> float | None:
        """Of one request's gaps, whose first token was held back for `held_s`: ask once. None: it has none, or they
        were not kept."""
        if self._first is not None and request_id in self._first:
            self._of(request_id).add(max(0.0, self._first.pop(request_id) - held_s))
        its = self._later.pop(request_id, None)
        return its.percentile(percent) if its is not None else None

    def _of(self, request_id: str) -> Distribution:
        return self._later.setdefault(request_id, Distribution())


def _request_of(attempt_id: str) -> str:
    """Instances know attempts: the request's name and a number."""
    return attempt_id.partition("~")[0]
