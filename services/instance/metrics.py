"""Metrics of an instance: the state of its engine and cache, and the bytes that its transfers moved.

Histograms of requests and counts of tokens are the router's. Gauges are read when they are asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.instance import LinkStatus, Load
from baton_serve.kvtransfer.ladder import ProbeOutcome
from baton_serve.kvtransfer.settings import LADDER, PROBED
from baton_serve.services.instance.ports import EngineStats


class EngineCollector(Collector):
    """Samples of the engine's last snapshot, labelled with the model's name as vLLM does."""

    def __init__(
        self,
        *,
        model: str,
        stats: Callable[[], EngineStats],
        load: Callable[[], Load],
        links: Callable[[], Sequence[LinkStatus]],
    ) -> None:
        self._model = model
        self._stats = stats
        self._load = load
        self._links = links

    def collect(self) -> Iterator[Metric]:
        stats, load = self._stats(), self._load()
        used = 1.0 - stats.free_blocks / stats.total_blocks if stats.total_blocks else 0.0
        hits = stats.prefix_hit_tokens / stats.prefix_query_tokens if stats.prefix_query_tokens else 0.0
        host_used = stats.host_used_blocks / stats.host_total_blocks if stats.host_total_blocks else 0.0
        host_hits = stats.host_hit_tokens / stats.prefix_query_tokens if stats.prefix_query_tokens else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests of the running batch", load.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for room or for their blocks", load.waiting)
        yield self._gauge("vllm:num_requests_swapped", "Always 0: what is preempted is computed again", 0.0)
        yield self._gauge("vllm:gpu_cache_usage_perc", "Fraction of KV blocks in use; 1 is all", used)
        yield self._gauge("vllm:cpu_cache_usage_perc", "Fraction of the host tier in use; 0 without one", host_used)
        yield self._gauge("vllm:gpu_prefix_cache_hit_rate", "Fraction of prompt tokens found in the device tier", hits)
        yield self._gauge(
            "vllm:cpu_prefix_cache_hit_rate", "Fraction of prompt tokens found in the host tier", host_hits
        )
        yield self._counter("vllm:num_preemptions", "Sequences that gave up their memory", stats.preemptions)
        yield self._gauge("baton:held_blocks", "Blocks kept for a handoff", load.held_blocks)
        yield self._gauge("baton:leases", "Prompts whose blocks are kept or reserved", stats.held + stats.reserved)
        yield self._gauge("baton:free_blocks", "KV blocks that can be allocated", stats.free_blocks)
        yield self._gauge("baton:total_blocks", "KV blocks of the cache", stats.total_blocks)
        yield self._gauge("baton:host_used_blocks", "KV blocks in the host tier", stats.host_used_blocks)
        yield self._gauge("baton:host_total_blocks", "KV blocks that fit the host tier", stats.host_total_blocks)
        yield self._counter("baton:host_stored_blocks", "KV blocks copied to the host tier", stats.host_stored_blocks)
        yield self._counter("baton:host_loaded_blocks", "KV blocks copied back from it", stats.host_loaded_blocks)
        yield self._gauge("baton:queued_tokens", "Prompt tokens admitted and not computed", stats.queued_tokens)
        yield self._gauge("baton:prefill_tokens_per_second", "Measured speed", stats.prefill_tokens_per_s)
        yield self._gauge("baton:decode_step_seconds", "Measured duration of a step", stats.decode_step_s)
        yield self._counter("baton:engine_steps", "Steps of the engine", stats.steps)
        yield from self._link_speeds()

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        metric = GaugeMetricFamily(name, documentation, labels=["model_name"])
        metric.add_metric([self._model], value)
        return metric

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        metric = CounterMetricFamily(name, documentation, labels=["model_name"])
        metric.add_metric([self._model], value)
        return metric

    def _link_speeds(self) -> Iterator[Metric]:
        labels = ["peer", "transport", "choice"]
        used = GaugeMetricFamily(
            "baton:kv_link_bytes_per_second",
            "Speed of the last transfers from a peer, as their consumer measured it",
            labels=labels,
        )
        probed = GaugeMetricFamily(
            "baton:kv_link_probed_bytes_per_second", "Speed of the transport in use, in the last probe", labels=labels
        )
        for link in self._links():
            used.add_metric([link.peer, link.transport, link.choice], link.bytes_per_second)
            if link.probed_bytes_per_second:
                probed.add_metric([link.peer, link.transport, link.choice], link.probed_bytes_per_second)
        yield used
        yield probed


class TransferMetrics:
    """`kvtransfer.TransferObserver`, and the place where failed handoffs are counted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._bytes = Counter("baton:kv_bytes", "Bytes of blocks moved", ["transport", "direction"], registry=registry)
        self._errors = Counter("baton:transfer_errors", "Handoffs that failed", ["reason"], registry=registry)
        self._retries = Counter("baton:transfer_retries", "Fetches tried again", ["transport"], registry=registry)
        self._mismatches = Counter(
            "baton:checksum_mismatches", "Blocks that arrived with other bytes", ["transport"], registry=registry
        )
        self._probes = Counter(
            "baton:kv_probes",
            "Transports tried between two throw-away processes",
            ["transport", "outcome"],
            registry=registry,
        )
        self._changes = Counter(
            "baton:kv_transport_changes",
            "Links that gave a transport up (demoted) or moved to one that a probe proved (promoted)",
            ["transport", "change"],
            registry=registry,
        )
        # From zero, so that the first of each is an increase for Prometheus.
        for transport in (*LADDER, PROBED):
            self._retries.labels(transport)
            self._mismatches.labels(transport)
            for change in ("demoted", "promoted"):
                self._changes.labels(transport, change)
        for outcome in get_args(ProbeOutcome):
            self._probes.labels(PROBED, outcome.replace(" ", "_"))

    def moved(
        self, *, peer: InstanceId, transport: str, direction: Literal["received", "sent"], num_bytes: int
    ) -> None:
        self._bytes.labels(transport, direction).inc(num_bytes)

    def retried(self, *, peer: InstanceId, transport: str, reason: str) -> None:
        self._retries.labels(transport).inc()

    def mismatched(self, *, peer: InstanceId, transport: str, blocks: int) -> None:
        self._mismatches.labels(transport).inc(blocks)

    def probed(self, *, peer: InstanceId, transport: str, outcome: str) -> None:
        self._probes.labels(transport, outcome.replace(" ", "_")).inc()

    def switched(self, *, peer: InstanceId, transport: str, change: Literal["demoted", "promoted"]) -> None:
        self._changes.labels(transport, change).inc()

    def handoff_failed(self, reason: str) -> None:
        self._errors.labels(reason).inc()
