"""Computes an instance's Prometheus metrics, such as the fraction of KV blocks in use and transferred bytes.

Request histograms and token counters belong to the router. Gauges are read when Prometheus scrapes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.instance import LinkStatus, Load, Role
from baton_serve.kvtransfer.ladder import ProbeOutcome
from baton_serve.kvtransfer.settings import LADDER, PROBED
from baton_serve.services.instance.interfaces import EngineStats


class EngineCollector(Collector):
    """Presents the engine's last statistics as Prometheus metrics, labelled with `model_name` as in vLLM."""

    def __init__(
        self,
        *,
        model: str,
        stats: Callable[[], EngineStats],
        load: Callable[[], Load],
        links: Callable[[], Sequence[LinkStatus]],
        is_sleeping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_sleeping = is_sleeping
        self._model = model
        self._stats = stats
        self._load = load
        self._links = links

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the engine with their current values; Prometheus' library calls it at each scrape."""
        stats, load = self._stats(), self._load()
        # Avoid a division by 0: a pooling engine has 0 blocks, and before the first prompt there are 0 queries.
        used = 1.0 - stats.free_blocks / stats.total_blocks if stats.total_blocks else 0.0
        hits = stats.prefix_hit_tokens / stats.prefix_query_tokens if stats.prefix_query_tokens else 0.0
        host_used = stats.host_used_blocks / stats.host_total_blocks if stats.host_total_blocks else 0.0
        host_hits = stats.host_hit_tokens / stats.prefix_query_tokens if stats.prefix_query_tokens else 0.0
        yield self._gauge("vllm:num_requests_running", "Number of requests in the running batch.", load.running)
        yield self._gauge(
            "vllm:num_requests_waiting",
            "Number of requests that wait for free KV blocks, for a slot in the batch, or for blocks that a"
            " handoff brings.",
            load.waiting,
        )
        yield self._gauge(
            "vllm:num_requests_swapped", "Always 0: preempted sequences are recomputed, not swapped.", 0.0
        )
        yield self._gauge("vllm:gpu_cache_usage_perc", "Fraction of the device's KV blocks in use (1 = all).", used)
        yield self._gauge(
            "vllm:cpu_cache_usage_perc",
            "Fraction of the host tier in use (1 = all); 0 without --host-kv-gb.",
            host_used,
        )
        yield self._gauge(
            "vllm:gpu_prefix_cache_hit_rate",
            "Fraction of prompt tokens found in the prefix cache on the device, since start.",
            hits,
        )
        yield self._gauge(
            "vllm:cpu_prefix_cache_hit_rate",
            "Fraction of prompt tokens found in the host tier, since start.",
            host_hits,
        )
        yield self._counter(
            "vllm:num_preemptions",
            "Cumulative number of preemptions: sequences whose KV blocks were freed, to be recomputed later.",
            stats.preemptions,
        )
        yield self._gauge(
            "baton:held_blocks",
            "KV blocks of finished prefills, kept until the decode instance has fetched them.",
            load.held_blocks,
        )
        yield self._gauge(
            "baton:leases",
            "Prompts in a handoff: on a prefill instance those whose blocks are kept, on a decode instance those"
            " with reserved blocks.",
            stats.held + stats.reserved,
        )
        yield self._gauge(
            "baton:free_blocks",
            "KV blocks that can be allocated now, including cached blocks that no request uses.",
            stats.free_blocks,
        )
        yield self._sleep_state()
        yield self._gauge("baton:total_blocks", "KV blocks of the cache on the device.", stats.total_blocks)
        yield self._gauge("baton:host_used_blocks", "KV blocks stored in the host tier.", stats.host_used_blocks)
        yield self._gauge("baton:host_total_blocks", "Capacity of the host tier in KV blocks.", stats.host_total_blocks)
        yield self._counter(
            "baton:host_stored_blocks", "KV blocks copied from the device to the host tier.", stats.host_stored_blocks
        )
        yield self._counter(
            "baton:host_loaded_blocks",
            "KV blocks copied from the host tier back to the device.",
            stats.host_loaded_blocks,
        )
        yield self._counter(
            "baton:host_damaged_blocks",
            "KV blocks whose bytes changed in the host tier: dropped and computed again.",
            stats.host_damaged_blocks,
        )
        yield self._gauge(
            "baton:queued_tokens", "Prompt tokens of accepted requests that are not computed yet.", stats.queued_tokens
        )
        yield self._gauge(
            "baton:prefill_tokens_per_second",
            "Measured prefill rate in prompt tokens per second.",
            stats.prefill_tokens_per_s,
        )
        yield self._gauge(
            "baton:decode_step_seconds",
            "Measured duration of a step without prompt tokens, in seconds (moving average).",
            stats.decode_step_s,
        )
        yield self._counter("baton:engine_steps", "Number of steps that the engine has run.", stats.steps)
        yield from self._link_speeds()

    def _sleep_state(self) -> Metric:
        metric = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "1 for the present state: awake, or discard_all after /sleep, whose two levels free the weights and the KV"
            " cache here.",
            labels=["model_name", "sleep_state"],
        )
        is_sleeping = self._is_sleeping()
        for state, is_true in (("awake", not is_sleeping), ("weights_offloaded", False), ("discard_all", is_sleeping)):
            metric.add_metric([self._model, state], float(is_true))
        return metric

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
            "Throughput of the last KV transfers from a peer, measured by the receiver, in bytes per second.",
            labels=labels,
        )
        probed = GaugeMetricFamily(
            "baton:kv_link_probed_bytes_per_second",
            "Throughput of the transport in use, measured by the last probe, in bytes per second.",
            labels=labels,
        )
        for link in self._links():
            used.add_metric([link.peer, link.transport, link.choice], link.bytes_per_second)
            if link.probed_bytes_per_second:
                probed.add_metric([link.peer, link.transport, link.choice], link.probed_bytes_per_second)
        yield used
        yield probed


class TransferMetrics:
    """Counts KV transfers and their errors as Prometheus metrics; implements `kvtransfer.TransferObserver` and
    `interfaces.HandoffCounter`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._bytes = Counter(
            "baton:kv_bytes", "Bytes of KV blocks sent or received.", ["transport", "direction"], registry=registry
        )
        self._errors = Counter(
            "baton:transfer_errors", "Handoffs and prefix pulls that failed, by reason.", ["reason"], registry=registry
        )
        self._retries = Counter(
            "baton:transfer_retries", "Fetches of KV blocks that were retried.", ["transport"], registry=registry
        )
        self._mismatches = Counter(
            "baton:checksum_mismatches",
            "KV blocks that arrived with a wrong checksum.",
            ["transport"],
            registry=registry,
        )
        self._probes = Counter(
            "baton:kv_probes",
            "Probes of a transport, each between two temporary processes, by outcome.",
            ["transport", "outcome"],
            registry=registry,
        )
        self._changes = Counter(
            "baton:kv_transport_changes",
            "Changes of the transport of a link: away from a failing one (demoted), or to one that a probe found"
            " faster (promoted).",
            ["transport", "change"],
            registry=registry,
        )
        # Create all label values with 0, or Prometheus cannot see the increase from "absent" to 1 as a rate.
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
        """Count a failed handoff or prefix pull; `reason` becomes a label, so it must have few values."""
        self._errors.labels(reason).inc()


class EmbeddingMetrics:
    """Counts images that are encoded here, on an encode instance, and embeddings that come from there, on the others.

    Implements `engine.pooling.encode_engine.EncodeObserver` and `kv_sharing.encoded_images.FetchCounter`.
    """

    def __init__(self, registry: CollectorRegistry, role: Role) -> None:
        """Show only the metrics of the role: those of the others would be 0 for ever."""
        shown = registry if role == "encode" else None
        self._encoded = Counter(
            "baton:encoded_images",
            "Images of which embeddings were asked for: computed, cached, or damaged in memory and computed again.",
            ["result"],
            registry=shown,
        )
        self._seconds = Counter("baton:encode_seconds", "Time in which images were encoded.", registry=shown)
        fetching = registry if role in ("prefill", "unified") else None
        self._fetched = Counter(
            "baton:image_embeddings",
            "Images whose embeddings were asked of an encode instance: fetched, or missed and encoded here.",
            ["result"],
            registry=fetching,
        )
        self._fetch_seconds = Counter(
            "baton:embedding_fetch_seconds",
            "Time from a request for embeddings until they were here, waiting included.",
            registry=fetching,
        )
        for result in ("computed", "cached", "damaged"):
            self._encoded.labels(result)
        for result in ("fetched", "missed"):
            self._fetched.labels(result)

    def computed(self, seconds: float) -> None:
        """Count an image that was encoded in this time."""
        self._encoded.labels("computed").inc()
        self._seconds.inc(seconds)

    def found(self, num_images: int) -> None:
        """Count images whose embeddings were cached."""
        self._encoded.labels("cached").inc(num_images)

    def damaged(self) -> None:
        """Count an image whose cached embeddings have changed in memory."""
        self._encoded.labels("damaged").inc()

    def fetched_embeddings(self, num_images: int, seconds: float) -> None:
        """Count images whose embeddings arrived from one instance after this time."""
        self._fetched.labels("fetched").inc(num_images)
        self._fetch_seconds.inc(seconds)

    def missed_embeddings(self, num_images: int) -> None:
        """Count images whose embeddings did not arrive."""
        self._fetched.labels("missed").inc(num_images)
