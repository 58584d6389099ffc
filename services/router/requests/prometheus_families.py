"""A histogram for one thread: prometheus_client's own takes a lock and walks its buckets at every observation.

Exposed under the same names and in the same format.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class CounterValue:
    """`value` is only ever added to."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class CounterFamilies(Collector):
    """All counters of a process, each a family with the label `model_name` and perhaps one more."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families: dict[str, tuple[str, Sequence[str], dict[tuple[str, ...], CounterValue]]] = {}
        registry.register(self)

    def declare(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        """`labels` beside `model_name`. A family is exposed from now on, with or without samples."""
        self._families.setdefault(name, (text, ("model_name", *labels), {}))

    def labels(self, name: str, *values: str) -> CounterValue:
        """`values` of the labels, the model's name first."""
        counts = self._families[name][2]
        count = counts.get(values)
        if count is None:
            count = counts[values] = CounterValue()
        return count

    def collect(self) -> Iterator[Metric]:
        for name, (text, labels, counts) in self._families.items():
            family = CounterMetricFamily(name, text, labels=labels)
            for values, count in counts.items():
                family.add_metric(values, count.value)
            yield family


class Histogram:
    """`bounds` are upper ones, ascending, without infinity."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative_counts(self) -> list[tuple[str, float]]:
        total, found = 0, []
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            total += count
            found.append((str(floatToGoString(bound)), float(total)))  # type: ignore[no-untyped-call]
        return found


class HistogramFamilies(Collector):
    """All histograms of a process, each a family with the label `model_name`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families: dict[str, tuple[str, dict[str, Histogram]]] = {}
        registry.register(self)

    def add(self, name: str, text: str, bounds: Sequence[float], model_name: str) -> Histogram:
        _, models = self._families.setdefault(name, (text, {}))
        return models.setdefault(model_name, Histogram(bounds))

    def collect(self) -> Iterator[Metric]:
        for name, (text, models) in self._families.items():
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            for model_name, histogram in models.items():
                family.add_metric([model_name], histogram.cumulative_counts(), histogram.sum)
            yield family
