"""Implements Prometheus counters and histograms without locks, for one thread.

Those of prometheus_client take a lock for every update, and their histogram walks over its buckets at each observation:
too slow for a router that observes every token.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class CounterValue:
    """The value of one counter for one combination of labels. Callers add to `value` and never take away from it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class CounterFamilies(Collector):
    """Collects all Prometheus counters of a process by name. Each has the label `model_name` and perhaps others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families: dict[str, tuple[str, Sequence[str], dict[tuple[str, ...], CounterValue]]] = {}
        registry.register(self)

    def declare(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        """Add a counter with the help `text` and with `labels` besides `model_name`.

        It is exposed from then on, even without values. A second declaration of the same name changes nothing.
        """
        self._families.setdefault(name, (text, ("model_name", *labels), {}))

    def labels(self, name: str, *values: str) -> CounterValue:
        """Return the value of the counter `name` for these values of its labels, the model's name first."""
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
    """One Prometheus histogram of one model. `bounds` are the upper bounds of its buckets, ascending, without
    infinity.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Add one observed value to its bucket and to the sum."""
        # `bisect_left` puts a value that equals a bound into its bucket: the bounds are inclusive ("le").
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative_counts(self) -> list[tuple[str, float]]:
        """Return for each bucket the text of its upper bound and the number of observations up to it, as Prometheus
        expects them.
        """
        total, found = 0, []
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            total += count
            found.append((str(floatToGoString(bound)), float(total)))  # type: ignore[no-untyped-call]
        return found


class HistogramFamilies(Collector):
    """Collects all Prometheus histograms of a process by name, with the label `model_name`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families: dict[str, tuple[str, dict[str, Histogram]]] = {}
        registry.register(self)

    def add(self, name: str, text: str, bounds: Sequence[float], model_name: str) -> Histogram:
        """Return the histogram `name` of a model. If the name is new, a histogram is created with the help `text`."""
        _, models = self._families.setdefault(name, (text, {}))
        return models.setdefault(model_name, Histogram(bounds))

    def collect(self) -> Iterator[Metric]:
        for name, (text, models) in self._families.items():
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            for model_name, histogram in models.items():
                family.add_metric([model_name], histogram.cumulative_counts(), histogram.sum)
            yield family
