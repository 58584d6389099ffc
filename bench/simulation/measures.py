"""Distributions of times: means and percentiles of values that carry weights."""

from bisect import bisect_left
from collections.abc import Iterable
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
