"""A counter for one thread: prometheus_client's own takes a lock and checks its value at every increment.

Exposed under the same names and in the same format.
"""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry


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
